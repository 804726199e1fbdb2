"""Which reused tokens are computed again: one policy a file."""

DEFAULT_POLICY = "two_stage"
"""What the engine, the adapters and the command line take where nobody names a policy."""
