"""Language-model classes for the frameworks."""
