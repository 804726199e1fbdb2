"""Two runs of `kvrag bench regress`: which figures changed by more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrag.tune.calibrate import mean_interval
from kvrag_bench.regress.results import SPEED, Entry, Results

# Processors and libraries round in other ways, which changes every case a little.
_ROUNDING = 0.005


class Verdict(StrEnum):
    """What a comparison found."""

    SAME = "within noise"
    BETTER = "better"
    WORSE = "worse"
    NEW = "not measured then"
    GONE = "not measured now"
    OTHER_MACHINE = "another processor"
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
    share = now.value / before.value - 1 if before.value else None
    if now.group == SPEED:
        verdict = _of_timings(before, now) if same_machine else Verdict.OTHER_MACHINE
    elif len(before.values) != len(now.values):
        share, verdict = None, Verdict.OTHER_CASES
    else:
        verdict = _of_cases(before, now)
    return Change(before, now, share, verdict)


def _of_timings(before: Entry, now: Entry) -> Verdict:
    if min(now.values) > max(before.values):
        return Verdict.WORSE
    return Verdict.BETTER if max(now.values) < min(before.values) else Verdict.SAME


def _of_cases(before: Entry, now: Entry) -> Verdict:
    low, high = mean_interval([b - a for a, b in zip(before.values, now.values, strict=True)])
    if low <= 0 <= high or abs(now.value - before.value) <= _ROUNDING * abs(before.value):
        return Verdict.SAME
    return Verdict.WORSE if low > 0 else Verdict.BETTER
