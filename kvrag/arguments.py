"""Checks of callers' arguments. Each error names the argument that is wrong.

Numbers of other libraries, such as NumPy's, are accepted. A bool is not a number here; NaN and
infinity are refused.
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
    """Return `value` as an int; raise ParameterError if it is not a whole number in range."""
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
    """Return `value` as a float; raise ParameterError if it is not a finite number in range.

    Parameters
    ----------
    least, most
        Inclusive bounds.
    above
        An exclusive lower bound.
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
    """Return `value`; raise ParameterError if it is not True or False."""
    if not isinstance(value, bool):
        raise _refused(name, value, "True or False")
    return value


def text(value: Any, name: str) -> str:
    """Return `value`; raise ParameterError if it is not a string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise _refused(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair, or "
            "a byte that was not text; encode it as UTF-8"
        ) from error
    return value


def texts(value: Any, name: str) -> list[str]:
    """Return `value` as a list of strings; raise ParameterError if it is not several strings."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, "several texts, such as a list of them")
    found = list(value)
    for one in found:
        if not isinstance(one, str):
            raise ParameterError(f"{name} holds {_shown(one)}: expected texts only")
    return found


def path(value: Any, name: str) -> Path:
    """Return `value` as a `Path`; raise ParameterError if it is not a path."""
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
