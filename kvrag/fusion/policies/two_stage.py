"""What the question looks at *and* what is off there: two criteria, one after the other."""

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


@dataclass(frozen=True)
class TwoStagePolicy(RecomputePolicy):
    """Compute the tokens again that the question gathers much from and that have changed most.

    Source: ProphetKV: a choice by the question, fused over all layers, then recomputation of one
    set of tokens. The first stage takes `pool` times as many tokens as wanted by what the question
    gathers from each, mean over all layers: weighted by the values' norms, layers that move the
    residual stream more count more. The second ranks them by that, times how far their stored
    values are off in layer 1.

    Deviations: the second stage is CacheBlend's criterion (§4.2) inside the pool: salient tokens
    that no other chunk has changed are right as they are and make room. The pool runs through
    layer 0 only. To compare attention there, as `DeviationPolicy` can, would save next to nothing:
    half of the pool is chosen, and would attend twice.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens that is computed again from layer 1 on, 0..1.
    pool
        Candidates over tokens wanted, 1 or more; 1 leaves out the second stage.
    """

    name: ClassVar[str] = "two_stage"
    ratio: float = 0.15
    pool: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if not 1.0 <= self.pool < math.inf:
            raise ParameterError(f"two_stage pool {self.pool}: expected 1 or more, and finite")

    def question_layers(self, num_layers: int) -> range:
        return range(0) if self.ratio in (0.0, 1.0) else range(num_layers)

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
        return relevance * stats.deviation["v"].sqrt()

    def _num_pooled(self, prompt: PromptRows) -> int:
        return share_of(min(1.0, self.pool * self.ratio), prompt.num_reused)

    @staticmethod
    def _fused(prompt: PromptRows) -> torch.Tensor:
        """Return ``[n]``: the mean relevance of all layers."""
        assert prompt.relevance is not None
        return prompt.relevance.mean(dim=0)
