"""Dates and times in metadata: one written form, and one order.

A time without an offset counts as UTC, and a date as its first moment.
"""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, date, datetime

# ISO 8601, also with a space where T belongs, as databases and `str(datetime)` write it.
_ZONE = r"(?: ?(?:[Zz]|UTC|[+-]\d\d(?::?\d\d)?))?"
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:(?:[Tt ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?|[Tt]\d\d)" + _ZONE + ")?"
    r"|\d{8}[Tt]\d{4}(?:\d\d(?:[.,]\d+)?)?" + _ZONE
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
