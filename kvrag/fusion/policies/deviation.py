"""The tokens whose stored KV is furthest from fresh KV: CacheBlend's criterion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    PromptRows,
    RecomputePolicy,
    Seen,
    check_ratio,
    share_of,
)

ON = ("k", "v", "kv")


@dataclass(frozen=True)
class DeviationPolicy(RecomputePolicy):
    """Compute the tokens of highest KV deviation (HKVD) again.

    Source: CacheBlend (arXiv 2405.16444) §4.2-4.3. Layer 0 runs for all tokens: its K/V depend on
    no other token, so layer 1 is the first where stored and fresh KV can differ, and the first to
    choose on; the choice holds for all layers (`GradualPolicy` goes on choosing).

    Deviations: fresh K/V of layer 1 are written for all tokens, chosen or not, since they have
    been computed anyway and are exact.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens that is computed again from layer 1 on, 0..1.
    on
        ``"v"`` measures values (the paper's code), ``"k"`` keys (LMCache's choice), ``"kv"`` both,
        each against its mean.
    """

    name: ClassVar[str] = "deviation"
    ratio: float = 0.15
    on: str = "v"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if self.on not in ON:
            raise ParameterError(f"{self.name} on={self.on!r}: expected 'k', 'v' or 'kv'")

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if self.ratio == 0.0:
            return torch.empty(0, dtype=torch.long)
        return prompt.reused()

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        if self.ratio == 1.0:
            return None
        kept = share_of(self.ratio, prompt.num_reused)
        return [prompt.num_reused] + [kept] * (prompt.num_layers - 1)

    def score(self, prompt: PromptRows, seen: Seen) -> torch.Tensor:  # noqa: ARG002
        return combined_deviation(seen, self.on)


def combined_deviation(seen: Seen, on: str) -> torch.Tensor:
    """Return ``[m]``: the deviation of keys, of values, or of both, each against its mean."""
    if on == "k":
        return seen.key_deviation
    if on == "v":
        return seen.value_deviation
    both = (seen.key_deviation, seen.value_deviation)
    return sum(
        (part / part.mean().clamp(min=1e-30) for part in both), torch.zeros_like(seen.key_deviation)
    )
