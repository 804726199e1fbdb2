"""Metadata as JSON values, within limits, and filters of a search by it.

A filter has the form that LangChain's vector stores share::

    {"source": "manual.pdf"}
    {"year": {"$gte": 2020, "$lt": 2024}, "lang": {"$in": ["en", "de"]}}
    {"$or": [{"page": 3}, {"$and": [{"title": "Preface"}, {"page": {"$ne": 1}}]}]}

It becomes an SQL condition over a table of ``(name, value, row)``, with one line for each value.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from kvrag import arguments
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.limits import MAX_METADATA_CHARACTERS, MAX_METADATA_DEPTH, MAX_METADATA_VALUES

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
    found: dict[str, Any] = _Plain().value(values, 0)
    return found


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

    def value(self, value: Any, depth: int) -> Any:
        """Return a value that this many others hold."""
        if depth > MAX_METADATA_DEPTH:
            raise DocumentError(
                f"the metadata is nested more than {MAX_METADATA_DEPTH} levels deep; flatten it"
            )
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
            return {self._text(str(key)): self.value(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, depth + 1) for item in value]
        if isinstance(value, date):  # or a time
            return None if value != value else self._text(written(value))  # pandas' NaT
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return self.value(plain_scalar(value), depth + 1)
        return self._text(str(value))

    def _text(self, text: str) -> str:
        self._num_characters += len(text)
        if self._num_characters > MAX_METADATA_CHARACTERS:
            raise DocumentError(
                f"the metadata holds more than {MAX_METADATA_CHARACTERS:,} characters; leave "
                "some out"
            )
        return text.encode("utf-8", "replace").decode()


def written(moment: date) -> str:
    """Return a date or a time in ISO 8601: in UTC if it has an offset."""
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        with contextlib.suppress(OverflowError):  # at the calendar's ends
            moment = moment.astimezone(UTC)
    return moment.isoformat()


def _as_time(text: str) -> bytes | None:
    """Return a text as a time, None if it is none: a blob that orders times, and is no text."""
    if _TIME.fullmatch(text) is None:
        return None
    try:
        joined = re.sub(r"^(.{10}) ", r"\1T", text.upper()).replace(" ", "").replace("UTC", "Z")
        moment = datetime.fromisoformat(joined)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the 30th of February
        return None
    return _TIMES + moment.replace(tzinfo=None).isoformat(timespec="microseconds").encode()


Wanted = Mapping[str, Any] | None
"""A filter as callers give it; None admits all chunks."""

_MOST_DEPTH = 16
_MOST_CONDITIONS = 100
# In all lists of a filter together: SQLite takes 32,766 parameters by default.
_MOST_VALUES = 10_000

_RANGES = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_OPERATORS = ("$eq", "$ne", "$in", "$nin", *_RANGES)

Value = str | int | float | bytes
_TIMES = b"t"  # begins each time; a boolean is a smaller byte


@dataclass(frozen=True)
class Filter:
    """A checked filter.

    Attributes
    ----------
    key
        The filter as a text; equal filters have equal ones.
    condition
        An SQL condition on the column ``row`` of the table ``of`` (`kvrag.ingest.words`).
    values
        The condition's parameters.
    """

    key: str
    condition: str
    values: tuple[Value, ...]


def read_filter(given: Any) -> Filter | None:
    """Return a filter as it was given, checked; None stays None.

    A field without a condition may have any value. A list has each of its values: ``$eq`` finds it
    by one of them, ``$ne`` if none is equal. A chunk without the field is found only by ``$ne`` and
    ``$nin``. Ranges compare numbers with numbers, times with times (`kvrag.ingest.filters`), and
    other texts by their code points. A field of a mapping is named ``outer.inner``.

    Raises
    ------
    ParameterError
        When it is not a filter; the message names the part that is wrong.
    """
    if given is None:
        return None
    reader = _Reader()
    condition = reader.mapping(given, "filter", 1)
    key = json.dumps(given, sort_keys=True, default=repr)
    return Filter(key, condition, tuple(reader.values))


_OWN = ("source", "ordinal")  # what the index knows of a chunk, whatever its document says


def on_metadata(given: Any) -> Any:
    """Return a filter in which ``source`` and ``ordinal`` mean what the documents' metadata says.

    Vector stores of frameworks know no other fields than the metadata.
    """
    if isinstance(given, list | tuple):
        return [on_metadata(one) for one in given]
    if not isinstance(given, Mapping):
        return given
    return {
        f"metadata.{name}" if name in _OWN else name: (
            on_metadata(value) if name in ("$and", "$or") else value
        )
        for name, value in given.items()
    }


def searched_fields(source: str, ordinal: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what filters see of a chunk: its metadata, with its own source and ordinal.

    The metadata may come from the document's author, who must not pass it off as another one's.
    What it says under these two names has the names ``metadata.source`` and ``metadata.ordinal``.
    """
    claimed = {f"metadata.{name}": metadata[name] for name in _OWN if name in metadata}
    return {**metadata, **claimed, "source": source, "ordinal": ordinal}


def values_of(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Yield the names and values of metadata as filters see them; leaves out null."""
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", one) for inner, one in values_of(value))
        elif isinstance(value, list):
            for one in value:
                yield from values_of({name: one})
        elif value is not None:
            yield name, bytes([value]) if isinstance(value, bool) else value  # true is not 1
            if isinstance(value, str) and (moment := _as_time(value)) is not None:
                yield name, moment


class _Reader:
    """Turns a filter into SQL, and counts its parts."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._num_conditions = 0
        self._num_listed = 0

    def mapping(self, given: Any, where: str, depth: int) -> str:
        if depth > _MOST_DEPTH:
            raise ParameterError(f"{where[:80]}: nested more than {_MOST_DEPTH} levels deep")
        if not isinstance(given, Mapping) or not given:
            raise ParameterError(
                f"{where}: expected a mapping of fields to values or conditions, such as "
                f'{{"source": "manual.pdf"}}, found {arguments.shown(given)}'
            )
        parts = []
        for name, value in given.items():
            if name in ("$and", "$or"):
                if not isinstance(value, list | tuple) or not value:
                    raise ParameterError(
                        f"{where}: {name} expects a list of filters, found {arguments.shown(value)}"
                    )
                inner = [
                    self.mapping(one, f"{where}.{name}[{number}]", depth + 1)
                    for number, one in enumerate(value)
                ]
                parts.append(f" {name[1:].upper()} ".join(inner))
            elif not isinstance(name, str) or name.startswith("$"):
                raise ParameterError(
                    f"{where}: {arguments.shown(name)} is no field; expected a field's name, "
                    f"'$and' or '$or' ({', '.join(_OPERATORS)} belong inside a field's condition)"
                )
            else:
                parts.append(self._field(name, value, f"{where}.{arguments.cut(name)}"))
        return "(" + " AND ".join(f"({part})" for part in parts) + ")"

    def _field(self, name: str, value: Any, where: str) -> str:
        arguments.text(name, f"{where[:80]}: a field's name")
        if not isinstance(value, Mapping):
            return self._condition(name, "$eq", value, where)
        if not value:
            raise ParameterError(f"{where}: expected a condition, such as {{'$eq': 1}}, found {{}}")
        return " AND ".join(self._condition(name, *one, where) for one in value.items())

    def _condition(self, name: str, operator: Any, value: Any, where: str) -> str:
        self._num_conditions += 1
        if self._num_conditions > _MOST_CONDITIONS:
            raise ParameterError(f"the filter has more than {_MOST_CONDITIONS} conditions")
        if operator not in _OPERATORS:
            raise ParameterError(
                f"{where}: unknown operator {arguments.shown(operator)}; expected one of "
                f"{', '.join(_OPERATORS)}"
            )
        where = f"{where}.{operator}"
        self.values.append(name)
        if operator in _RANGES:
            return self._range(operator, value, where)
        if operator in ("$eq", "$ne"):
            self.values.append(_scalar(value, where))
            test = "= ?"
        else:
            if not isinstance(value, list | tuple | set | frozenset):
                raise ParameterError(f"{where}: expected a list, found {arguments.shown(value)}")
            self._num_listed += len(value)
            if self._num_listed > _MOST_VALUES:
                raise ParameterError(
                    f"{where[:80]}: the lists of the filter have more than {_MOST_VALUES:,} values "
                    "together; use fewer, or several searches"
                )
            self.values += [_scalar(one, where) for one in value]
            test = f"IN ({', '.join('?' * len(value))})"
        negation = "NOT " if operator in ("$ne", "$nin") else ""
        return f"row {negation}IN (SELECT row FROM fields WHERE name = ? AND value {test})"

    def _range(self, operator: str, value: Any, where: str) -> str:
        bound = _scalar(value, where)
        if isinstance(bound, bytes) and not bound.startswith(_TIMES):
            raise ParameterError(f"{where}: expected a number, a text or a time, found {value}")
        self.values.append(bound)
        # SQLite orders numbers before texts, and texts before booleans and times (blobs).
        same_kind = "value < ''"
        if isinstance(bound, str):
            same_kind = "value >= '' AND value < x''"
        elif isinstance(bound, bytes):
            same_kind = f"value >= x'{_TIMES.hex()}'"
        test = f"value {_RANGES[operator]} ?"
        return f"row IN (SELECT row FROM fields WHERE name = ? AND {test} AND {same_kind})"


def _scalar(value: Any, where: str) -> Value:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = plain_scalar(value)
    if isinstance(value, date) and value == value:  # not pandas' NaT
        value = written(value)
    if isinstance(value, str):
        text = arguments.text(value, where)
        # Stored times are there as texts too, but one time may be written in several ways.
        return _as_time(text) or text
    if isinstance(value, bool):
        return bytes([value])
    is_number = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    if is_number or (isinstance(value, float) and math.isfinite(value)):
        number: int | float = value
        return number
    hint = "; for several values, write {'$in': [...]}" if isinstance(value, list | tuple) else ""
    raise ParameterError(
        f"{where}: expected a text, a number, a boolean or a time, found "
        f"{arguments.shown(value)}{hint}"
    )
