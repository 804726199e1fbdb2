"""Records in this process's memory: for tests and demonstrations, and as the fastest tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError
from kvrag.store.base import CountedStore, InMemory, counted
from kvrag.store.metrics import StoreMetrics
from kvrag.store.remote import HeadedRecord


class MemoryRecord(HeadedRecord):
    """An opened record of a `MemoryStore`; its head is all of it until it is closed."""

    def __init__(self, key: ChunkKey, record: bytes, metrics: StoreMetrics | None = None) -> None:
        super().__init__(key, len(record), memoryview(record), metrics or StoreMetrics("memory"))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` starting at `offset`. Raises RecordError past the end of the record."""
        with self._metrics.timing():
            super().read_into(offset, buffer)

    def _fetch(self, first: int, buffer: memoryview) -> None:  # noqa: ARG002
        raise StoreError(f"record {self._key} in memory: it was closed; open it again")

    def close(self) -> None:
        """Release the bytes."""
        self._head = b""


class MemoryStore(CountedStore, InMemory):
    """Records in a dictionary. They are gone when the process ends."""

    url = "memory:"

    def __init__(self) -> None:
        self._records: dict[ChunkKey, bytes] = {}
        self._lock = threading.Lock()
        self.metrics = StoreMetrics("memory")

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Keep a record in place of the existing one, if any."""
        with self._lock:
            self._records[key] = bytes(record)
        self.metrics.wrote(len(record))

    @counted
    def open(self, key: ChunkKey) -> MemoryRecord | None:
        """Open a record for reading, or return None if there is none."""
        with self._lock:
            record = self._records.get(key)
        return None if record is None else MemoryRecord(key, record, self.metrics)

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
