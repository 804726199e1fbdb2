"""What an eviction policy kept of one generation's KV, and the memory it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvictionReport:
    """The account of one cache.

    Attributes
    ----------
    policy
        The policy with its parameters.
    num_prompt, num_tokens
        Tokens of the prompts, and of prompts and answers so far.
    prompt_share
        Keys kept behind the prompt, over those that there were: the mean over layers and heads.
    kept_share
        The same of the whole cache as it is now.
    kept_by_layer
        `kept_share` of each layer.
    size_bytes, full_bytes
        What the cache takes now, its own notes included, and what all keys and values would take.
    peak_bytes
        The most that keys and values took at a time.
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
        """Return what matters at a terminal."""
        return f"{self.kept_share:.0%} of the KV kept by {self.policy}"
