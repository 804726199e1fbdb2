"""Two runs of `kvrag bench regress`: which figures changed by more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrag.tune.bootstrap import mean_interval
from kvrag_bench.regress.results import Entry, Results

# Processors and libraries round in other ways, which changes every case a little.
_ROUNDING = 0.005


class Verdict(StrEnum):
    """What a comparison found."""

    SAME = "within noise"
    BETTER = "better"
    WORSE = "worse"
    NEW = "not measured then"
    GONE = "not measured now"
    OTHER_MACHINE = "another machine"
    OTHER_CASES = "other cases"


@dataclass(frozen=True)
class Change:
    """One figure then and now; one of the two may be missing.

    Attributes
    ----------
    share
        What the value rose by, as a share of the earlier one; None if there is nothing to compare.
    """

    before: Entry | None
    now: Entry | None
    share: float | None
    verdict: Verdict

    @property
    def entry(self) -> Entry:
        """The figure, as it is now if it was measured."""
        entry = self.now or self.before
        assert entry is not None
        return entry


def compare(before: Results | None, now: Results) -> list[Change]:
    """Return the change of each figure that either run has, in the order of the later one.

    Timings changed if all of the later ones are greater, or all less, than all of the earlier
    ones. Figures of cases changed if the 95 % interval of the differences, case by case, excludes
    zero, and the mean differs by more than 0.5 %.
    """
    earlier = {} if before is None else {one.name: one for one in before.entries}
    same_machine = before is not None and before.processor == now.processor
    changes = [_change(earlier.pop(one.name, None), one, same_machine) for one in now.entries]
    return changes + [Change(one, None, None, Verdict.GONE) for one in earlier.values()]


def _change(before: Entry | None, now: Entry, same_machine: bool) -> Change:
    if before is None:
        return Change(None, now, None, Verdict.NEW)
    if before.is_timed != now.is_timed or (
        not now.is_timed and len(before.values) != len(now.values)
    ):
        return Change(before, now, None, Verdict.OTHER_CASES)
    share = now.value / before.value - 1 if before.value else None
    if now.is_timed and not same_machine:
        return Change(before, now, share, Verdict.OTHER_MACHINE)
    rose = _rose(before, now)
    if rose is None:
        return Change(before, now, share, Verdict.SAME)
    is_better = rose == now.is_more_better
    return Change(before, now, share, Verdict.BETTER if is_better else Verdict.WORSE)


def _rose(before: Entry, now: Entry) -> bool | None:
    """Return whether the value rose or fell; None if it may have stayed."""
    if now.is_timed:
        (low, high), (then_low, then_high) = now.interval, before.interval
        return None if low <= then_high and then_low <= high else low > then_high
    if abs(now.value - before.value) <= _ROUNDING * abs(before.value):
        return None
    differences = [b - a for a, b in zip(before.values, now.values, strict=True)]
    low, high = mean_interval(differences)
    return None if low <= 0 <= high else low > 0
