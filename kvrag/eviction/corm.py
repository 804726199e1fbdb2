"""Keys that no recent query found important are forgotten: each head keeps what it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy, HeldKeys, check_counts


@dataclass(frozen=True)
class CormPolicy(EvictionPolicy):
    """Forget long-term minor keys.

    Source: Dai et al., *Sequence can Secretly Tell You What to Discard* (arXiv 2404.15949) §4. A
    key is important to a query that gives it at least 1/t of its attention, t being the keys that
    the query sees; otherwise it is minor. What was minor to all of the last `window` queries goes,
    unless it is among the last `recent` keys. Nothing goes before so many queries are on record;
    the prompt's last ones are the first of it.

    Deviations, where the paper is silent: t counts the keys that the head still holds (in a sliding
    window, those within it), and where query heads share a key head, a key that is important to
    one of them is important.

    What was evicted while the prompt was computed would have changed the queries behind it; here
    the whole prompt attends to the whole prompt, and keys go at its end.

    Parameters
    ----------
    window
        Queries on record, 1 or more (the paper's first 256).
    recent
        Keys that are always kept, 1 or more (its second 256).
    threshold
        How many times 1/t of its attention a query gives a key that is important to it, above 0;
        1 is the paper's rule, more forgets more.
    """

    name: ClassVar[str] = "corm"
    window: int = 256
    recent: int = 256
    threshold: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, window=self.window, recent=self.recent)
        if not 0.0 < self.threshold < math.inf:
            raise ParameterError(
                f"eviction 'corm': threshold={self.threshold}: expected more than 0, and finite"
            )

    @property
    def num_queries(self) -> int:
        return self.window

    def note(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:
        # A key's mark is the number, from 1, of the last query that found it important.
        important = weights.amax(1) >= (self.threshold / num_visible)[:, :, None]
        if weights.shape[2] == 1:
            torch.where(important[:, 0], keys.num_noted + 1.0, keys.marks, out=keys.marks)
            return
        numbers = keys.num_noted + torch.arange(1, weights.shape[2] + 1, device=weights.device)
        latest = torch.where(important, numbers[:, :, None], 0).amax(1)
        torch.maximum(keys.marks, latest.to(keys.marks.dtype), out=keys.marks)

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor:
        # Marks are 0 or more: below that nothing goes. Few large operations: this is every step's.
        oldest = keys.num_noted - self.window
        gone = keys.marks <= oldest.masked_fill(oldest < 0, -1)
        gone &= keys.places < keys.num_seen - self.recent
        return gone.logical_and_(keys.held)
