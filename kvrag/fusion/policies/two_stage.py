"""The policy ``two_stage``: tokens that the question attends to *and* whose KV deviates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    CandidateStats,
    PromptRows,
    RecomputePolicy,
    check_ratio,
    highest,
    share_of,
)

# Tokens that see only their own chunk in layer 0, as in a short window, differ by rounding:
# by less than this, relative to the largest distance. Those are ranked by relevance alone.
_ROUNDING = 1e-5
# With more, SmolLM2's answers get worse; with fewer, no better.
_KEPT = 0.6


@dataclass(frozen=True)
class TwoStagePolicy(RecomputePolicy):
    """Compute the tokens again that matter most to the question and have changed most.

    Source: ProphetKV: a choice by the question, combined over all layers, then recomputation of
    one set of tokens. The first stage takes `pool` times as many tokens as wanted, by how much the
    question gathers from each, as the mean over all layers (`look`: over the first ones). This is
    weighted by the values' norms, so layers that change the residual stream more count more. The
    second stage ranks these tokens by the same mean, times the distance between stored and fresh
    values in layer 1.

    Deviations: the second stage applies CacheBlend's criterion (§4.2) inside the pool: relevant
    tokens that no other chunk has changed are already exact, and leave room for others. The pool
    runs only through layer 0. Comparing attention there, as `DeviationPolicy` can, would save
    almost nothing: half of the pool is chosen, and would attend twice.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens to compute again from layer 1 on, 0..1.
    pool
        Number of candidates per token wanted, 1 or more; 1 skips the second stage.
    look
        Share of the layers, from the first, in which the question is computed to observe it, above
        0 and at most 1. If they end between the middle and the last, those from the middle on
        count: what a question gathers in the first ones says little. Where they end before the
        last, the question stays as it was computed in six of ten of them, and what precedes it in
        all of them.
    """

    name: ClassVar[str] = "two_stage"
    ratio: float = 0.15
    pool: float = 2.0
    look: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if not 1.0 <= self.pool < math.inf:
            raise ParameterError(f"two_stage pool {self.pool}: expected 1 or more, and finite")
        if not 0.0 < self.look <= 1.0:
            raise ParameterError(f"two_stage look {self.look}: expected above 0 and at most 1")

    def question_layers(self, num_layers: int) -> range:
        if self.ratio in (0.0, 1.0):
            return range(0)
        stop, middle = max(1, round(self.look * num_layers)), num_layers // 2
        return range(middle if middle < stop < num_layers else 0, stop)

    def kept_layers(self, num_layers: int) -> int:
        looked = self.question_layers(num_layers).stop
        return int(_KEPT * looked) if looked < num_layers else 0

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if self.ratio == 0.0:
            return torch.empty(0, dtype=torch.long)
        if self.ratio == 1.0:
            return prompt.reused()
        assert prompt.relevance is not None
        pooled = highest(self._fused(prompt), self._num_pooled(prompt))
        return prompt.reused()[pooled.cpu()]

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        if self.ratio in (0.0, 1.0):
            return None
        kept = share_of(self.ratio, prompt.num_reused)
        return [self._num_pooled(prompt)] + [kept] * (prompt.num_layers - 1)

    def score(self, prompt: PromptRows, stats: CandidateStats) -> torch.Tensor:
        reused = prompt.reused().to(stats.positions.device)
        relevance = self._fused(prompt)[torch.searchsorted(reused, stats.positions)]
        far = stats.deviation["v"].sqrt()
        return relevance * far.clamp(min=_ROUNDING * far.max())

    def _num_pooled(self, prompt: PromptRows) -> int:
        return share_of(min(1.0, self.pool * self.ratio), prompt.num_reused)

    @staticmethod
    def _fused(prompt: PromptRows) -> torch.Tensor:
        """Return ``[n]``: the mean relevance over the observed layers."""
        assert prompt.relevance is not None
        return prompt.relevance.mean(dim=0)
