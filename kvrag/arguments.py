"""What callers hand in, checked before it is used: a wrong value is told by its name.

Whole numbers and numbers of other libraries (NumPy's, say) are taken for what they are; a bool is
no number, and what is no number or not finite is refused.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvrag.errors import ParameterError


def whole(value: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number; ParameterError where it is none, or out of range."""
    try:
        if isinstance(value, bool) or getattr(value, "ndim", False):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise _refused(name, value, f"a whole number{_range(least, most)}") from None
    if (least is not None and found < least) or (most is not None and found > most):
        raise _refused(name, value, f"a whole number{_range(least, most)}")
    return found


def number(
    value: Any,
    name: str,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
) -> float:
    """Return a finite number; ParameterError where it is none, or out of range.

    Parameters
    ----------
    least, most
        Bounds that it may reach.
    above
        A bound that it may not reach.
    """
    expected = f"a number{_range(least, most)}"
    if above is not None:
        expected = f"a number above {above:g}" + ("" if most is None else f", at most {most:g}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refused(name, value, expected)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    is_low = (least is not None and found < least) or (above is not None and found <= above)
    if not math.isfinite(found) or is_low or (most is not None and found > most):
        raise _refused(name, value, expected)
    return found


def flag(value: Any, name: str) -> bool:
    """Return True or False; ParameterError for anything else."""
    if not isinstance(value, bool):
        raise _refused(name, value, "True or False")
    return value


def text(value: Any, name: str) -> str:
    """Return a text; ParameterError where it is none, or holds what UTF-8 cannot."""
    if not isinstance(value, str):
        raise _refused(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair, or "
            "a byte that was no text; give it encoded as UTF-8"
        ) from error
    return value


def texts(value: Any, name: str) -> list[str]:
    """Return several texts; ParameterError for a single one, or where one of them is none."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, "several texts, such as a list of them")
    found = list(value)
    for one in found:
        if not isinstance(one, str):
            raise ParameterError(f"{name} holds {_shown(one)}: expected texts alone")
    return found


def path(value: Any, name: str) -> Path:
    """Return a path; ParameterError where it is none."""
    if isinstance(value, bytes) or not isinstance(value, str | os.PathLike):
        raise _refused(name, value, "a path")
    if "\0" in str(value):
        raise _refused(name, value, "a path without zero bytes")
    return Path(value)


def _refused(name: str, value: Any, expected: str) -> ParameterError:
    return ParameterError(f"{name} {_shown(value)}: expected {expected}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _range(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}" if most < 1e6 else f" from {least:g} to {most:,}"
    if least is not None:
        return f", at least {least:g}"
    return "" if most is None else f", at most {most:g}"
