"""Records in this process's memory: for tests and demonstrations, and as the fastest tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError
from kvrag.store.base import CountedStore, check_range
from kvrag.store.metrics import MISS_ABSENT, StoreMetrics


class MemoryRecord:
    """An opened record of a `MemoryStore`."""

    def __init__(self, key: ChunkKey, record: bytes, metrics: StoreMetrics | None = None) -> None:
        self._key = key
        self._size_bytes = len(record)
        self._bytes: memoryview | None = memoryview(record)
        self._metrics = metrics

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` starting at `offset`. Raises RecordError past the end of the record."""
        if self._bytes is None:
            raise StoreError(f"record {self._key} in memory: it was closed; open it again")
        check_range(self._key, self._size_bytes, offset, buffer.nbytes)
        with nullcontext() if self._metrics is None else self._metrics.timing():
            buffer[:] = self._bytes[offset : offset + buffer.nbytes]
        if self._metrics is not None:
            self._metrics.read(buffer.nbytes)

    def close(self) -> None:
        """Release the bytes."""
        self._bytes = None


class MemoryStore(CountedStore):
    """Records in a dictionary. They are gone when the process ends."""

    url = "memory:"
    is_in_memory = True

    def __init__(self) -> None:
        self._records: dict[ChunkKey, bytes] = {}
        self._lock = threading.Lock()
        self.metrics = StoreMetrics("memory")

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Keep a record; an existing record stays."""
        with self._lock:
            self._records.setdefault(key, bytes(record))
        self.metrics.wrote(len(record))

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Keep a record in place of the existing one, if any."""
        with self._lock:
            self._records[key] = bytes(record)
        self.metrics.wrote(len(record))

    def open(self, key: ChunkKey) -> MemoryRecord | None:
        """Open a record for reading, or return None if there is none."""
        with self._lock:
            record = self._records.get(key)
        if record is None:
            self.metrics.miss(MISS_ABSENT)
            return None
        self.metrics.hit()
        return MemoryRecord(key, record, self.metrics)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        with self._lock:
            return key in self._records

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""
        with self._lock:
            return self._records.pop(key, None) is not None

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over the keys present at the time of the call, with their records' sizes."""
        with self._lock:
            return iter([(key, len(record)) for key, record in self._records.items()])

    def close(self) -> None:
        """Drop all records; those opened before stay readable."""
        with self._lock:
            self._records.clear()
