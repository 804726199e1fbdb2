"""What a store is: immutable records by chunk key.

A store knows nothing of codecs: records are bytes. Every method may block on I/O; all are
safe to call from several threads. Opening takes at most one round trip, and so does each range
read: whoever wants layer i + 1 while he computes layer i reads its range in another thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError
from kvrag.store.metrics import StoreCounts


class StoredRecord(Protocol):
    """An opened record.

    It stays readable even if the record is deleted or replaced meanwhile; a store that cannot
    keep it for its readers refuses with StoreError. Never are other bytes read.
    """

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on.

        Raises StoreError when the medium refuses, RecordError when the record ends before the
        buffer is full.
        """
        ...

    def close(self) -> None:
        """Let go of the record. A record that is garbage-collected closes itself."""
        ...


class Store(Protocol):
    """Records by key. Raises StoreError for whatever the medium refuses."""

    @property
    def url(self) -> str:
        """What `kvrag.store.registry.open_store` opens this store with, but for its secrets."""
        ...

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record atomically and durably; a key that is present keeps its record."""
        ...

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record atomically and durably in place of the one `key` has, if any.

        Whoever has the old one open goes on reading it.
        """
        ...

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None where there is none."""
        ...

    def contains(self, key: ChunkKey) -> bool: ...

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record; say whether there was one."""
        ...

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over all keys with the bytes of their records, in no particular order.

        What is put or deleted meanwhile may appear or not.
        """
        ...

    def keys(self) -> Iterator[ChunkKey]:
        """Iterate over all keys, as `sizes` does."""
        ...

    def size_bytes(self) -> int:
        """Bytes held by all records."""
        ...

    def note_damage(self, key: ChunkKey) -> None:
        """Be told that what was read of a record was not what had been written.

        It is counted; a store that has other copies of the record gives up the damaged one.
        """
        ...

    def counts(self) -> Sequence[StoreCounts]:
        """What was counted since the store was opened; of tiers, the fastest first."""
        ...

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove what interrupted writes left behind at least that long ago; say how many."""
        ...

    def close(self) -> None: ...


def check_range(key: ChunkKey, size_bytes: int, offset: int, num_bytes: int) -> None:
    """Raise RecordError unless `num_bytes` bytes from `offset` on lie within a record."""
    if offset < 0 or offset + num_bytes > size_bytes:
        raise RecordError(
            f"record {key}: expected bytes {offset} to {offset + num_bytes}, "
            f"found a record of {size_bytes} bytes; ingest its document again"
        )
