"""The SnapKV policy: keeps what the prompt's last queries attend to, and all keys of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import max_pool1d

from kvrag.errors import ParameterError
from kvrag.eviction.base import (
    EvictionPolicy,
    HeldKeys,
    budget_of,
    check_budget,
    check_counts,
    lowest,
)


@dataclass(frozen=True)
class SnapKVPolicy(EvictionPolicy):
    """Keep what an observation window at the prompt's end attends to, and the window itself.

    Source: Li et al., SnapKV (arXiv 2404.14469) §4. The window's attention is summed for each key,
    then pooled over neighbours so that kept keys form stretches. The keys with the highest sums are
    kept. Query heads that share a key head count by their mean.

    Parameters
    ----------
    budget
        Keys of the prompt to keep, the window's included, 1 or more; 1024 if no share is given.
    share
        Replaces it: a share of the prompt's tokens.
    window
        Queries of the observation window, 1 or more.
    pool
        Width of the pooling, an odd number of keys.
    """

    name: ClassVar[str] = "snapkv"
    budget: int | None = None
    share: float | None = None
    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is None:
            object.__setattr__(self, "budget", 1024 if self.budget is None else self.budget)
        check_budget(self, self.share, budget=self.budget)
        check_counts(self, window=self.window, pool=self.pool)
        if self.pool % 2 == 0:
            raise ParameterError(f"eviction 'snapkv': pool={self.pool}: expected an odd number")

    @property
    def num_queries(self) -> int:
        return self.window

    def note(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:  # noqa: ARG002
        keys.marks.add_(weights.mean(1).sum(1))

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor | None:
        budget = budget_of(keys, self.share, self.budget or 0).clamp(min=1)
        # Slots are still in the order of the prompt.
        pooled = max_pool1d(keys.marks[:, None], self.pool, stride=1, padding=self.pool // 2)[:, 0]
        window = budget.clamp(max=self.window)
        spared = keys.is_recent(window).logical_or_(~keys.held)
        scores = pooled.masked_fill(spared, float("inf"))
        return lowest(scores, keys.held.sum(1, keepdim=True) - budget)

    def after_step(self, keys: HeldKeys) -> None:  # noqa: ARG002
        return None
