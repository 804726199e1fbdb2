"""Document metadata as JSON values, within limits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from kvrag.errors import DocumentError
from kvrag.ingest.limits import (
    MAX_METADATA_CHARACTERS,
    MAX_METADATA_DEPTH,
    MAX_METADATA_VALUES,
)
from kvrag.ingest.times import written


def plain_metadata(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return metadata as JSON values; values without a JSON form become text.

    Dates and times become ISO 8601 (`kvrag.ingest.times`).

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
