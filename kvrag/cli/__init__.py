"""The `kvrag` command."""
