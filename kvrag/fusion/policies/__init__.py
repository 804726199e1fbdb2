"""Which reused tokens are computed again: one policy a file."""
