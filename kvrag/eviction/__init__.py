"""A KV cache that forgets keys while it answers.

Imports `models` and everything below it.
Begin with `base.py`, then `registry.py`, the policies; `cache.py` applies one in Transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_EVICTION = "none"
"""The name for the full cache, among the names of policies."""


@dataclass(frozen=True)
class EvictionReport:
    """What one evicting cache kept.

    Attributes
    ----------
    policy
        The policy with its parameters.
    num_prompt, num_tokens
        Tokens of the prompts, and of prompts and answers so far.
    prompt_share
        The share of the prompt's keys that was kept after it: the mean over layers and heads.
    kept_share
        The share of all keys that is kept now: the mean over layers and heads.
    kept_by_layer
        `kept_share` of each layer.
    size_bytes, full_bytes
        Bytes of the cache now, its notes included, and bytes that all keys and values would take.
    peak_bytes
        The most bytes that keys and values took at any time.
    """

    policy: str
    num_prompt: int
    num_tokens: int
    prompt_share: float
    kept_share: float
    kept_by_layer: tuple[float, ...]
    size_bytes: int
    full_bytes: int
    peak_bytes: int

    def one_line(self) -> str:
        """Return a summary in one line."""
        return f"{self.kept_share:.0%} of the KV kept by {self.policy}"
