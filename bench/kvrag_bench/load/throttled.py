"""A store with a limited number of bytes per second."""

from __future__ import annotations

import threading
import time

from kvrag.chunk import ChunkKey
from kvrag.store.base import RecordWrapper, Store, StoredRecord, StoreWrapper

# Sleeps are no shorter than this machine's timers can tell: little is delivered at once.
_LEAST_SLEEP_SECONDS = 0.0005


class Line:
    """What all readers of a store share: its bytes a second.

    Parameters
    ----------
    bytes_per_second
        Its speed.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, num_bytes: int) -> None:
        """Wait until these bytes have been carried, after those of earlier callers."""
        with self._lock:
            begin = max(self._free_at, time.perf_counter())
            self._free_at = until = begin + num_bytes / self._bytes_per_second
        left = until - time.perf_counter()
        if left > _LEAST_SLEEP_SECONDS:
            time.sleep(left)


class ThrottledStore(StoreWrapper):
    """Hands on what `inner` reads, at the speed of a line."""

    def __init__(self, inner: Store, bytes_per_second: float) -> None:
        super().__init__(inner)
        self._line = Line(bytes_per_second)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record whose bytes come over the line."""
        record = self.inner.open(key)
        return None if record is None else _ThrottledRecord(record, self._line)


class _ThrottledRecord(RecordWrapper):
    def __init__(self, inner: StoredRecord, line: Line) -> None:
        super().__init__(inner)
        self._line = line

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, and return when the line has carried it."""
        self.inner.read_into(offset, buffer)
        self._line.carry(buffer.nbytes)
