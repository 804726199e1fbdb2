"""Recompute policies, which choose the reused tokens to compute again; one policy per file."""

AUTO_POLICY = "auto"
"""The name of the controller that chooses a policy for each prompt (`kvrag.fusion.controller`)."""

DEFAULT_POLICY = "two_stage"
"""The default policy of the engine, the adapters and the command line."""
