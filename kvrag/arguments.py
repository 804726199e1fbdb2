"""Checks of callers' arguments. Each error names the argument that is wrong.

Numbers of other libraries, such as NumPy's, are accepted. A bool is not a number here; NaN and
infinity are refused.
"""

from __future__ import annotations

import difflib
import errno
import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrag.errors import ParameterError

_MOST_SHOWN = 200
# A path object has one slash where the URL had two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|gs|az|file):")

# The precisions that a model can compute in.
AUTO = "auto"
INT8 = "int8"
INT4 = "int4"
QUANTISED = (INT8, INT4)
"""What weights are copied in fewer bits for."""
COMPUTES = (AUTO, "float32", "bfloat16", *QUANTISED)
"""What can be asked for."""


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


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ParameterError if there are options: the ones that a caller did not have to give."""
    if options:
        raise ParameterError(f"unknown option {', '.join(map(repr, sorted(options)))}")


def only(options: Iterable[str], known: Iterable[str], taker: str) -> None:
    """Raise ParameterError if an option is not among those that `taker` takes."""
    if unknown := sorted(set(options) - {*known}):
        names = ", ".join(sorted(known))
        raise ParameterError(f"unknown option {cut(', '.join(unknown))}; {taker} takes {names}")


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


def texts(value: Any, name: str, *, is_utf8: bool = False) -> list[str]:
    """Return `value` as a list of strings; raise ParameterError if it is not several strings.

    With `is_utf8`, UTF-8 must be able to encode each of them.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, "several texts, such as a list of them")
    found = list(value)
    for one in found:
        if not isinstance(one, str):
            raise ParameterError(f"{name} holds {shown(one)}: expected texts only")
        if is_utf8:
            text(one, f"{shown(one)} in {name}")
    return found


def path(value: Any, name: str) -> Path:
    """Return `value` as a `Path`, with the home folder in place of ``~``.

    Raises
    ------
    ParameterError
        When it is not a path, or one that the system can never open: the name is too long, or
        links lead in a circle. The path need not exist.
    """
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else b""
    if isinstance(given, bytes) or not given:
        raise _refused(name, value, "a path to a file or folder")
    try:
        found = Path(given).expanduser()
        found.stat()
    except RuntimeError:
        raise _refused(name, given, "the name of a user with a home folder after ~") from None
    except UnicodeEncodeError:
        raise _refused(name, given, "a path that the system can encode") from None
    except ValueError:
        raise _refused(name, given, "a path without zero bytes") from None
    except OSError as error:
        # The code that opens the path reports everything else.
        if error.errno == errno.ELOOP:
            raise _refused(name, given, "no links that lead in a circle: remove them") from error
        if error.errno == errno.ENAMETOOLONG:
            raise _refused(name, given, "a shorter name; this one is too long") from error
    return found


def user_cache() -> Path:
    """Return the folder of the user's caches: `XDG_CACHE_HOME`, or the usual one."""
    return path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")


def resolved_path(value: Any, name: str) -> Path:
    """Return `value` as an absolute path without links. Raises as `path` does."""
    return path(value, name).resolve()


def is_url(value: Any) -> bool:
    """Return whether an index's path is a URL, or a path object that was made from one."""
    return isinstance(value, str | Path) and _URL.match(str(value)) is not None


def shown(value: Any) -> str:
    """Return `value` as messages quote it: in Python's notation, and cut (`cut`)."""
    try:
        return cut(repr(value))
    except Exception:  # such as a whole number of 5,000 digits
        return f"a value of type {type(value).__name__}"


def cut(text: str) -> str:
    """Return at most 200 characters of a text for a message; anybody may have written the text."""
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _refused(name: str, value: Any, expected: str) -> ParameterError:
    return ParameterError(f"{name} {shown(value)}: expected {expected}")


def _range(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}" if most < 1e6 else f" from {least:g} to {most:,}"
    if least is not None:
        return f", at least {least:g}"
    return "" if most is None else f", at most {most:g}"


_MOST = 3


def like(name: str, known: Iterable[str]) -> str:
    """Return " (is it ...?)" with the most similar names, or "" if none is similar."""
    return suggestion(nearest(name, alike(name, known)))


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are most similar to one, best first."""
    return difflib.get_close_matches(name, list(known), n=_MOST)


def nearest(name: str, found: Sequence[str]) -> list[str]:
    """Return those of similar names that are about as similar as the most similar one."""
    ratios = [difflib.SequenceMatcher(None, one, name).ratio() for one in found]
    return [one for one, ratio in zip(found, ratios, strict=True) if ratio > max(ratios) - 0.1]


def suggestion(found: Sequence[str]) -> str:
    """Return " (is it ...?)" with the first of these names, or "" if there are none."""
    return f" (is it {' or '.join(map(repr, found[:_MOST]))}?)" if found else ""


def check_compute(compute: object) -> None:
    """Raise ParameterError unless `compute` is None or one of `COMPUTES`."""
    if compute is not None and compute not in COMPUTES:
        raise ParameterError(f"compute {shown(compute)}: expected one of {', '.join(COMPUTES)}")
