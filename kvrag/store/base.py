"""What a store is: immutable records by chunk key.

A store knows nothing of codecs: records are bytes. Every method may block on I/O; all are
safe to call from several threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvrag.chunk import ChunkKey


class StoredRecord(Protocol):
    """An opened record. It stays readable even if the record is deleted meanwhile."""

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. Raises StoreError when the bytes cannot be had."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """Records by key. Raises StoreError for whatever the medium refuses."""

    url: str

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record atomically and durably; a key that is present keeps its record."""
        ...

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None where there is none."""
        ...

    def contains(self, key: ChunkKey) -> bool: ...

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record; say whether there was one."""
        ...

    def keys(self) -> Iterator[ChunkKey]: ...

    def size_bytes(self) -> int:
        """Bytes held by all records."""
        ...

    def close(self) -> None: ...
