"""Counts of a store's events."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

MISS_ABSENT = "absent"
MISS_UNREADABLE = "unreadable"
MISS_DAMAGED = "damaged"


Labels = tuple[tuple[str, str], ...]
Counts = dict[tuple[str, Labels], float]
"""Maps a counter's name and labels to its value."""
MetricsOf = Mapping[str, tuple[str, tuple[str, ...]]]
"""Maps a counter's name to its description and the names of its labels."""

_PLACE = ("tier", "store")
METRICS: MetricsOf = {
    "store_hits": ("Records opened.", _PLACE),
    "store_misses": ("Records not found, not readable or damaged.", (*_PLACE, "reason")),
    "store_read_bytes": ("Bytes of records read.", _PLACE),
    "store_written_bytes": ("Bytes of records written.", _PLACE),
    "store_seconds": ("Seconds of opening and reading records, by all threads.", _PLACE),
    "store_evictions": ("Records removed to keep within a limit.", _PLACE),
    "store_evicted_bytes": ("Bytes of records removed to keep within a limit.", _PLACE),
}
_COUNTED = {
    "store_hits": "hits",
    "store_read_bytes": "bytes_read",
    "store_written_bytes": "bytes_written",
    "store_seconds": "seconds",
    "store_evictions": "evictions",
    "store_evicted_bytes": "bytes_evicted",
}


@dataclass(frozen=True)
class StoreCounts:
    """Counts of one store since it was opened by this process.

    Attributes
    ----------
    name
        The store's name, such as ``file`` or ``redis``.
    hits
        Number of records opened.
    misses
        Number of failed reads by reason: ``absent``, ``unreadable`` (the medium refused) or
        ``damaged`` (the bytes are not those written).
    bytes_read, bytes_written
        Bytes of records read and written.
    evictions, bytes_evicted
        Records removed to keep within a limit, and their bytes.
    seconds
        Time spent opening and reading records, by all threads.
    """

    name: str
    hits: int
    misses: dict[str, int]
    bytes_read: int
    bytes_written: int
    evictions: int
    bytes_evicted: int
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return the counts as JSON values."""
        return asdict(self)


_SUMS = tuple(one.name for one in fields(StoreCounts) if one.name not in ("name", "misses"))


class StoreMetrics:
    """Counts events of one store; safe to use from several threads.

    Parameters
    ----------
    name
        The store's name in reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._sums: dict[str, Any] = dict.fromkeys(_SUMS, 0) | {"seconds": 0.0}

    def hit(self) -> None:
        """Count a record that was opened."""
        self._add(hits=1)

    def miss(self, reason: str) -> None:
        """Count a record that could not be read, by reason."""
        with self._lock:
            self._misses[reason] += 1

    def read(self, num_bytes: int) -> None:
        """Count bytes read."""
        self._add(bytes_read=num_bytes)

    def wrote(self, num_bytes: int) -> None:
        """Count bytes written."""
        self._add(bytes_written=num_bytes)

    def evicted(self, num_bytes: int) -> None:
        """Count a record removed to keep within a limit."""
        self._add(evictions=1, bytes_evicted=num_bytes)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Count the seconds that opening or reading a record takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add(seconds=time.perf_counter() - started)

    def counts(self) -> StoreCounts:
        """Return the counts so far."""
        with self._lock:
            return StoreCounts(self.name, misses=dict(self._misses), **self._sums)

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount


def labelled(counts: Sequence[StoreCounts]) -> Counts:
    """Return the counts of a store's tiers, by the names of `METRICS`.

    Labels are ``tier`` (0 is the fastest) and ``store`` (``file``, ``redis``).
    """
    found: Counts = {}
    for number, one in enumerate(counts):
        place: Labels = (("tier", str(number)), ("store", one.name))
        for name, field in _COUNTED.items():
            found[name, place] = getattr(one, field)
        for reason, count in sorted(one.misses.items()):
            found["store_misses", (*place, ("reason", reason))] = count
    return found
