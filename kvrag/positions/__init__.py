"""Position encodings: placing position-free keys and stripping placed ones."""
