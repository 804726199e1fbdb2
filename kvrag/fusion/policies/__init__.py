"""Recompute policies, which choose the reused tokens to compute again; one policy per file."""

DEFAULT_POLICY = "two_stage"
"""The default policy of the engine, the adapters and the command line."""
