"""Work in slices: a prompt is fused a little at a time, so that other prompts need not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch

from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.fusion.layout import RecordId
from kvrag.loading import threads
from kvrag.loading.patience import SlowStoreError
from kvrag.models.batched_prefill import Share
from kvrag.models.rows import rows_at_once

T = TypeVar("T")
_P = ParamSpec("_P")

Slices = Generator[bool, bool | None, T]
"""Work that can pause. It yields True where it waits for stored KV, otherwise False.

Send True to let it wait for them in the next slice. Otherwise the next slice returns at once while
nothing has come.
"""

SLICE_ROWS = 256
"""Rows that a layer computes in one slice on the CPU: about as long as a step of decoding."""


def slice_rows(device: torch.device) -> int:
    """Return how many rows a layer computes in one slice."""
    return SLICE_ROWS if device.type == "cpu" else rows_at_once(device)


class Clock:
    """Wall seconds by stage; one stage may have several laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last call to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def resume(self) -> None:
        """Leave out the time since the last call, which belongs to other work."""
        self._last = time.perf_counter()

    def move(self, stage: str, other: str, seconds: float) -> None:
        """Count seconds as another stage's; nobody may have waited for them in this one."""
        self.seconds[stage] = max(0.0, self.seconds[stage] - seconds)
        self.seconds[other] += seconds


class StoppedError(Exception):
    """The result of some work is not needed any more."""


def in_one_go(function: Callable[_P, Slices[T]]) -> Callable[_P, T]:
    """Return a function that does all of the work that another one returns."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> T:
        return whole(function(*args, **kwargs))

    return call


def whole(work: Slices[T], is_wanted: Callable[[], bool] = lambda: True) -> T:
    """Do all of the work, and return its result.

    Parameters
    ----------
    work
        The work.
    is_wanted
        Asked before the work and after each slice that computed something.

    Raises
    ------
    StoppedError
        If the result is no longer wanted; the work has freed what it held.
    """
    has_computed, answer = True, None
    try:
        while True:
            if has_computed and not is_wanted():
                work.close()
                raise StoppedError
            has_computed, answer = not work.send(answer), True
    except StopIteration as done:
        result: T = done.value
        return result


def in_one_slice(work: Callable[[], T]) -> Slices[T]:
    """Do work without a pause."""
    yield from ()
    return work()


def in_background(work: Callable[[], None], clock: Clock) -> Slices[None]:
    """Do work in another thread; raise what it raises. The work has ended when this ends."""
    future: Future[None] = threads.start(work)
    try:
        yield from until(future.done, clock)
        future.result()
    finally:
        threads.end([future])


def until(is_here: Callable[[], bool], clock: Clock) -> Slices[None]:
    """Pause until something is here, or the caller wants to wait for it: only that is counted."""
    while not is_here():
        must_wait = yield True
        clock.resume()
        if must_wait:
            return


def joined(
    share: Share,
    computing: Callable[[], AbstractContextManager[None]],
    run_alone: Callable[[], None],
    clock: Clock,
    stage: str,
) -> Slices[None]:
    """Have a share computed with those of other prompts, or alone; a slice."""
    is_done = yield from share.joined()
    clock.resume()
    if not is_done:
        with computing():
            run_alone()
    clock.lap(stage)
    clock.seconds[stage] += share.seconds


# -- stored KV that is lost ----------------------------------------------------------------------

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
