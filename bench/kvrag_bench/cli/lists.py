"""Options that hold several comma-separated values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from kvrag.arguments import shown
from kvrag.errors import ParameterError

_Value = TypeVar("_Value", int, float)


def names(text: str, option: str) -> tuple[str, ...]:
    """Return the names in `text`; raise ParameterError if there are none."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ParameterError(f"{option} is empty: expected names, comma-separated")
    return found


def numbers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Return the whole numbers in `text`; raise ParameterError if one is not, or below `least`."""
    return _values(text, option, int, lambda n: n >= least, f"whole numbers from {least}")


def shares(text: str, option: str) -> tuple[float, ...]:
    """Return the shares in `text`; raise ParameterError if one is not a number from 0 to 1."""
    return _values(text, option, float, lambda share: 0 <= share <= 1, "shares from 0 to 1")


def positive(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers in `text`; raise ParameterError if one is not finite and above 0."""
    return _values(text, option, float, lambda n: 0 < n < math.inf, "numbers above 0")


def _values(
    text: str,
    option: str,
    parse: Callable[[str], _Value],
    is_allowed: Callable[[_Value], bool],
    expected: str,
) -> tuple[_Value, ...]:
    try:
        found = tuple(parse(part) for part in names(text, option))
    except ValueError:
        found = ()
    if not found or not all(map(is_allowed, found)):
        raise ParameterError(f"{option} {shown(text)}: expected {expected}, comma-separated")
    return found
