"""The policy ``query``: the tokens that the question attends to; others need not be exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    PromptRows,
    RecomputePolicy,
    check_ratio,
    highest,
    share_of,
)


@dataclass(frozen=True)
class QueryPolicy(RecomputePolicy):
    """Compute the tokens again from which the question gathers most.

    Source: InfoFlow KV: the question's attention over the reused KV, placed at their global
    positions, weighted by the norm of the values. For this, the question is computed once over
    stored KV, and then again over the repaired KV.

    Deviations: by default the mean over all layers counts. The norms of the values give more
    weight to layers that change the residual stream more.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens to compute again in every layer, 0..1.
    depth
        The single layer whose attention counts, as a share of the layers: 0 is the first, 1 the
        last; None uses all layers.
    """

    name: ClassVar[str] = "query"
    ratio: float = 0.15
    depth: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ParameterError(f"query depth {self.depth}: expected a share between 0 and 1")

    def question_layers(self, num_layers: int) -> range:
        if self.ratio in (0.0, 1.0):
            return range(0)
        if self.depth is None:
            return range(num_layers)
        layer_index = round(self.depth * (num_layers - 1))
        return range(layer_index, layer_index + 1)

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        # The same in all layers, and known before the question is observed.
        return [share_of(self.ratio, prompt.num_reused)] * prompt.num_layers

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if self.ratio == 0.0:
            return torch.empty(0, dtype=torch.long)
        if self.ratio == 1.0:
            return prompt.reused()
        assert prompt.relevance is not None
        chosen = highest(prompt.relevance.mean(dim=0), share_of(self.ratio, prompt.num_reused))
        return prompt.reused()[chosen.cpu()]
