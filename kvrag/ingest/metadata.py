"""Document metadata as JSON values, within limits; dates and times have one form and one order.

A time without an offset counts as UTC, and a date as its first moment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

from kvrag.errors import DocumentError
from kvrag.ingest.limits import (
    MAX_METADATA_CHARACTERS,
    MAX_METADATA_DEPTH,
    MAX_METADATA_VALUES,
)

# ISO 8601, also with a space where T belongs, as databases and `str(datetime)` write it.
_ZONE = r"(?: ?(?:[Zz]|UTC|[+-]\d\d(?::?\d\d)?))?"
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:(?:[Tt ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?|[Tt]\d\d)" + _ZONE + ")?"
    r"|\d{8}[Tt]\d{4}(?:\d\d(?:[.,]\d+)?)?" + _ZONE
)


def plain_metadata(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return metadata as JSON values; values without a JSON form become text.

    Dates and times become ISO 8601 (`written`).

    Raises
    ------
    DocumentError
        When it is not a mapping, is nested too deeply (as anything that contains itself is), or
        holds too much.
    """
    if not isinstance(values, Mapping):
        raise DocumentError(
            f"the metadata is a value of type {type(values).__name__}: expected a mapping, such as "
            "{}"
        )
    return _Plain().mapping(values, 1)


def plain_scalar(value: Any) -> Any:
    """Return a NumPy scalar as a value of Python."""
    item = value.item()
    if isinstance(item, int) and getattr(getattr(value, "dtype", None), "kind", "") == "M":
        return value.astype("datetime64[us]").item()  # Python's times have no nanoseconds
    return item


class _Plain:
    """Converts values and counts them: a few lists that hold each other can expand without end."""

    def __init__(self) -> None:
        self._num_values = 0
        self._num_characters = 0

    def mapping(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        _check_depth(depth)
        return {self._text(str(key)): self._value(value, depth) for key, value in values.items()}

    def _value(self, value: Any, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_METADATA_VALUES:
            raise DocumentError(
                f"the metadata holds more than {MAX_METADATA_VALUES:,} values; leave some out"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            # Larger ones do not read back alike everywhere, and Python refuses to write long ones.
            return int(value) if -(1 << 63) <= value < 1 << 63 else self._text(hex(value))
        if isinstance(value, float):
            return float(value) if value - value == 0 else str(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return self.mapping(value, depth + 1)
        if isinstance(value, list | tuple | set | frozenset):
            _check_depth(depth + 1)
            return [self._value(item, depth + 1) for item in value]
        if isinstance(value, date):  # or a time
            return None if value != value else self._text(written(value))  # pandas' NaT
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            _check_depth(depth + 1)
            return self._value(plain_scalar(value), depth + 1)
        return self._text(str(value))

    def _text(self, text: str) -> str:
        self._num_characters += len(text)
        if self._num_characters > MAX_METADATA_CHARACTERS:
            raise DocumentError(
                f"the metadata holds more than {MAX_METADATA_CHARACTERS:,} characters; leave "
                "some out"
            )
        return text.encode("utf-8", "replace").decode()


def _check_depth(depth: int) -> None:
    if depth > MAX_METADATA_DEPTH:
        raise DocumentError(
            f"the metadata is nested more than {MAX_METADATA_DEPTH} levels deep; flatten it"
        )


def written(moment: date) -> str:
    """Return a date or a time in ISO 8601: in UTC if it has an offset."""
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        with contextlib.suppress(OverflowError):  # at the calendar's ends
            moment = moment.astimezone(UTC)
    return moment.isoformat()


def order_of(text: str) -> str | None:
    """Return a text that orders times as they follow each other, or None if it is no time."""
    if _TIME.fullmatch(text) is None:
        return None
    try:
        joined = re.sub(r"^(.{10}) ", r"\1T", text.upper()).replace(" ", "").replace("UTC", "Z")
        moment = datetime.fromisoformat(joined)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the 30th of February
        return None
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds")
