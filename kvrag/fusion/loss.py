"""Stored KV that is not available: the error, its reasons, and the loop that plans again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.fusion.layout import RecordId
from kvrag.fusion.slices import Slices
from kvrag.loading.patience import SlowStoreError

MISS_ABSENT = "KV not in the store"
MISS_DAMAGED = "record damaged"
MISS_UNREADABLE = "store unreadable"
MISS_PROFILE = "codec profile missing"
MISS_SLOW = "store slower than computing"

REASONS = (None, MISS_PROFILE, MISS_UNREADABLE, MISS_ABSENT, MISS_DAMAGED, MISS_SLOW)
"""What `LostError.lost` may say; processes tell each other a reason by its number."""

DAMAGE = (RecordError, StoreError, IndexFormatError, ProfileError)
"""Errors that a store or record may raise; the span is then computed, and counted as a miss."""

P = TypeVar("P")
T = TypeVar("T")


class LostError(Exception):
    """Records are unavailable or not wanted: the prompt has to be planned without them.

    Attributes
    ----------
    lost
        For each record the reason for the miss; None if computing it is a choice.
    """

    def __init__(self, lost: Mapping[RecordId, str | None]) -> None:
        super().__init__(", ".join(f"chunk {one[0]}: {why}" for one, why in lost.items()))
        self.lost = lost


def without_lost(
    plan: P, attempt: Callable[[P], Slices[T]], without: Callable[[P, LostError], P]
) -> Slices[T]:
    """Carry out a plan; as often as records turn out to be lost, start again without them.

    Parameters
    ----------
    plan
        The first plan.
    attempt
        Carries a plan out. What it has computed when it raises LostError has seen the lost records.
    without
        Returns the plan without what an error names. Each plan has fewer records, so this ends.
    """
    while True:
        try:
            return (yield from attempt(plan))
        except LostError as error:
            plan = without(plan, error)


def reason_of(error: Exception) -> str:
    """Return the reason, for a report, why a span is not available."""
    if isinstance(error, ProfileError):
        return MISS_PROFILE
    if isinstance(error, SlowStoreError):
        return MISS_SLOW
    return MISS_UNREADABLE if isinstance(error, StoreError) else MISS_DAMAGED
