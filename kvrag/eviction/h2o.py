"""The H2O policy: keeps the keys that drew most attention so far, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.eviction.base import (
    EvictionPolicy,
    HeldKeys,
    budget_of,
    check_budget,
    check_counts,
    lowest,
)


@dataclass(frozen=True)
class H2OPolicy(EvictionPolicy):
    """Keep heavy hitters and recent keys.

    Source: Zhang et al., H2O (arXiv 2306.14048) §4. A key's score is the attention that it has
    drawn from all queries. Over budget, the key with the lowest score is forgotten at every step.

    Deviations: only the last `window` queries of the prompt count. So no prompt needs all its
    attention weights in memory, and prompts of reused chunks, which have no others, work too. Query
    heads that share a key head count by their mean.

    Parameters
    ----------
    heavy
        Keys kept for their score, 1 or more; 768 if no share is given.
    recent
        Last keys kept, 1 or more; 256 if no share is given.
    share
        Replaces both: the keys kept, as a share of the prompt's tokens; half of them the last ones.
    window
        How many of the prompt's last queries count, 1 or more.
    """

    name: ClassVar[str] = "h2o"
    heavy: int | None = None
    recent: int | None = None
    share: float | None = None
    window: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is None:
            object.__setattr__(self, "heavy", 768 if self.heavy is None else self.heavy)
            object.__setattr__(self, "recent", 256 if self.recent is None else self.recent)
        check_budget(self, self.share, heavy=self.heavy, recent=self.recent)
        check_counts(self, window=self.window)

    @property
    def num_queries(self) -> int:
        return self.window

    def note(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:  # noqa: ARG002
        keys.marks.add_(weights.mean(1).sum(1))

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor | None:
        budget = budget_of(keys, self.share, (self.heavy or 0) + (self.recent or 0))
        recent = budget // 2 if self.recent is None else self.recent
        spared = keys.is_recent(recent).logical_or_(~keys.held)
        scores = keys.marks.masked_fill(spared, float("inf"))
        return lowest(scores, keys.held.sum(1, keepdim=True) - budget.clamp(min=1))
