"""The policies ``deviation`` and ``gradual``: tokens furthest from fresh KV (CacheBlend)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    CandidateStats,
    PromptRows,
    RecomputePolicy,
    check_ratio,
    share_of,
)

ON = ("k", "v", "kv")


@dataclass(frozen=True)
class DeviationPolicy(RecomputePolicy):
    """Compute the tokens with the highest KV deviation (HKVD) again.

    Source: CacheBlend (arXiv 2405.16444) §4.2-4.3. Layer 0 runs for all tokens: its K/V depend on
    no other token. So stored and fresh KV first differ in layer 1, and the choice is made there.
    It holds for all later layers (`GradualPolicy` narrows it further).

    Deviation: fresh K/V of layer 1 are written for all tokens, chosen or not, since they have
    been computed anyway and are exact.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens to compute again from layer 1 on, 0..1.
    on
        What to compare: ``"v"`` values (the paper's code), ``"k"`` keys (LMCache's choice), or
        ``"kv"`` both, each relative to its mean.
    """

    name: ClassVar[str] = "deviation"
    ratio: float = 0.15
    on: str = "v"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if self.on not in ON:
            raise ParameterError(
                f"{self.name} on={shown(self.on)}: expected 'k', 'v' or 'kv' ('attention' left "
                "kvrag with 0.3: policy 'two_stage' keeps more)"
            )

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if self.ratio == 0.0:
            return torch.empty(0, dtype=torch.long)
        return prompt.reused()

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        if self.ratio == 1.0:
            return None
        kept = share_of(self.ratio, prompt.num_reused)
        return [prompt.num_reused] + [kept] * (prompt.num_layers - 1)

    def score(self, prompt: PromptRows, stats: CandidateStats) -> torch.Tensor:  # noqa: ARG002
        return _combined(stats.deviation, self.on)


def _combined(deviation: Mapping[str, torch.Tensor], on: str) -> torch.Tensor:
    """Return ``[m]``: the deviation of K, of V, or of both, each divided by its mean."""
    if on != "kv":
        return deviation[on]
    parts = [deviation[one] for one in on]
    return torch.stack([part / part.mean().clamp(min=1e-30) for part in parts]).sum(0)


@dataclass(frozen=True)
class GradualPolicy(DeviationPolicy):
    """Start with more tokens than `ratio` and drop, layer by layer, those that deviate least.

    Source: CacheBlend (arXiv 2405.16444) §4.3, figure 9. Each layer drops the tokens whose stored
    KV was nearest to fresh KV in the layer before, so that the remaining tokens deviate in several
    layers. The mean share over the layers from 1 on is `ratio`.

    Deviations: the paper leaves the shares open; here they fall linearly from ``1 + spread`` to
    ``1 - spread`` times the ratio. A layer's deviation is measured while its K/V are written, so
    that nothing is projected twice; it decides for the next layer.

    Parameters
    ----------
    ratio, on
        See `DeviationPolicy`.
    spread
        How far the shares fall around the mean, relative to it; above 0, up to 1.
    """

    name: ClassVar[str] = "gradual"
    spread: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.spread <= 1.0:
            raise ParameterError(
                f"gradual spread {self.spread}: expected more than 0, up to 1 (to choose only "
                "once, use policy 'deviation')"
            )

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        if self.ratio == 1.0:
            return None
        falling = _falling_counts(self.ratio, self.spread, prompt.num_reused, prompt.num_layers - 1)
        return [prompt.num_reused, *falling]


def _falling_counts(ratio: float, spread: float, num_tokens: int, num_layers: int) -> list[int]:
    """Return how many tokens each layer computes: falling counts, whose mean is `ratio`.

    No share may exceed 1, so a ratio above one half leaves less room to fall.
    """
    if num_layers == 1 or ratio == 0.0:
        return [share_of(ratio, num_tokens)] * num_layers
    reach = min(spread, 1.0 / ratio - 1.0)
    slope = 2.0 * reach / (num_layers - 1)
    exact = [num_tokens * ratio * (1.0 + reach - slope * layer) for layer in range(num_layers)]
    counts = [min(num_tokens, int(count + 1e-9)) for count in exact]
    missing = share_of(ratio, num_tokens * num_layers) - sum(counts)
    for layer, count in enumerate(counts):
        # From the first layer on, so that the counts never rise.
        if missing and count < num_tokens:
            counts[layer] += 1
            missing -= 1
    return counts
