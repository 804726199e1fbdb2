"""The StreamingLLM policy: keeps the first keys and the most recent ones, by place alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.eviction.base import EvictionPolicy, HeldKeys, budget_of, check_budget, check_counts


@dataclass(frozen=True)
class StreamingPolicy(EvictionPolicy):
    """Keep attention sinks and a window of recent keys.

    Source: Xiao et al., StreamingLLM (arXiv 2309.17453) §3. Deviation: keys keep their positions.
    The paper renumbers the remaining keys, for texts longer than the model's context.

    Parameters
    ----------
    sinks
        First keys kept, 0 or more.
    recent
        Last keys kept, 1 or more.
    share
        Replaces `recent`: sinks and recent keys together, as a share of the prompt's tokens.
    """

    name: ClassVar[str] = "streaming"
    sinks: int = 4
    recent: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is None and self.share is None:
            object.__setattr__(self, "recent", 1020)
        check_budget(self, self.share, recent=self.recent)
        check_counts(self, at_least=0, sinks=self.sinks)

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor:
        budget = budget_of(keys, self.share, self.sinks + (self.recent or 0))
        recent = (budget - self.sinks).clamp(min=1)
        return keys.held & (keys.places >= self.sinks) & ~keys.is_recent(recent)
