"""What a store counts while it is used."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass

from kvrag.chunk import ChunkKey

MISS_ABSENT = "absent"
MISS_UNREADABLE = "unreadable"
MISS_DAMAGED = "damaged"


@dataclass(frozen=True)
class StoreCounts:
    """Counts of one store since it was opened by this process.

    Attributes
    ----------
    name
        The store, such as ``file`` or ``redis``.
    hits
        Records that were opened.
    misses
        Those that could not be had, or turned out to be of no use: reason to number. Reasons are
        ``absent``, ``unreadable`` (the medium refused) and ``damaged`` (other bytes than were
        written).
    bytes_read, bytes_written
        Bytes of records.
    evictions, bytes_evicted
        Records removed to keep within a limit, and their bytes.
    """

    name: str
    hits: int
    misses: dict[str, int]
    bytes_read: int
    bytes_written: int
    evictions: int
    bytes_evicted: int

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return asdict(self)


class StoreMetrics:
    """Counts events of one store; safe to use from several threads.

    Parameters
    ----------
    name
        What the store is called in reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._hits = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._evictions = 0
        self._bytes_evicted = 0

    def hit(self) -> None:
        """Count a record that was opened."""
        with self._lock:
            self._hits += 1

    def miss(self, reason: str) -> None:
        """Count a record that could not be had."""
        with self._lock:
            self._misses[reason] += 1

    def read(self, num_bytes: int) -> None:
        """Count bytes read."""
        with self._lock:
            self._bytes_read += num_bytes

    def wrote(self, num_bytes: int) -> None:
        """Count bytes written."""
        with self._lock:
            self._bytes_written += num_bytes

    def evicted(self, num_bytes: int) -> None:
        """Count a record removed to keep within a limit."""
        with self._lock:
            self._evictions += 1
            self._bytes_evicted += num_bytes

    def counts(self) -> StoreCounts:
        """Return the counts so far."""
        with self._lock:
            return StoreCounts(
                name=self.name,
                hits=self._hits,
                misses=dict(self._misses),
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                evictions=self._evictions,
                bytes_evicted=self._bytes_evicted,
            )


class CountedStore:
    """What a store with counts of its own says of them.

    Attributes
    ----------
    metrics
        The counts; set by the store.
    """

    metrics: StoreMetrics

    def note_damage(self, key: ChunkKey) -> None:
        """Count a record that was not what had been written."""
        del key
        self.metrics.miss(MISS_DAMAGED)

    def counts(self) -> tuple[StoreCounts]:
        """Return what was counted so far."""
        return (self.metrics.counts(),)
