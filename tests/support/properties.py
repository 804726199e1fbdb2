"""The number of examples that property tests draw, and of trials that others make."""

import os
from collections.abc import Iterable
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")
_FULL = 100
IS_EXHAUSTIVE = os.environ.get("KVRAG_EXHAUSTIVE", "") not in ("", "0")

# No time limit, since machines may be busy. Loaded before any test is imported (`conftest.py`),
# unless the command line names another profile: `pytest --hypothesis-profile=full`.
settings.register_profile("quick", deadline=None, max_examples=_FULL // 10)
settings.register_profile("full", deadline=None, max_examples=_FULL)
settings.load_profile("quick")


def examples(number: int) -> int:
    """Return the share of `number` that the profile draws: of all, or a tenth."""
    return max(number * settings().max_examples // _FULL, 1)


def in_turn(values: Iterable[T]) -> list[tuple[T, bool]]:
    """Return each value with False or True in turn, or with both if `IS_EXHAUSTIVE`."""
    pairs = [(value, flag) for value in values for flag in (False, True)]
    return pairs if IS_EXHAUSTIVE else [pairs[at] for at in range(len(pairs)) if at % 4 in (0, 3)]


def trials(number: int, few: int) -> int:
    """Return `number` under ``make test-all EXHAUSTIVE=1``, else `few`."""
    return number if IS_EXHAUSTIVE else few


def few(number: int, values: Iterable[T]) -> list[T]:
    """Return the first values only, or all if `IS_EXHAUSTIVE`."""
    return list(values)[: None if IS_EXHAUSTIVE else number]


def every(step: int, values: Iterable[T]) -> list[T]:
    """Return every `step`-th value, or all if `IS_EXHAUSTIVE`."""
    return list(values)[:: 1 if IS_EXHAUSTIVE else step]
