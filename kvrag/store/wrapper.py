"""Base of stores around another store: it passes on every call that it does not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError
from kvrag.store.base import Listing, Store, StoredRecord
from kvrag.store.metrics import StoreCounts


class StoreWrapper(Listing):
    """Passes every call on to `inner`; subclasses override what they change.

    Attributes
    ----------
    inner
        The wrapped store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The inner store's URL."""
        return self.inner.url

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays."""
        self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one."""
        self.inner.replace(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none."""
        return self.inner.open(key)

    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is a record for `key`."""
        return self.inner.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""
        return self.inner.delete(key)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and their records' sizes."""
        return self.inner.sizes()

    def note_damage(self, key: ChunkKey) -> None:
        """Report a damaged record to the inner store."""
        self.inner.note_damage(key)

    def counts(self) -> Sequence[StoreCounts]:
        """Return the counts so far."""
        return self.inner.counts()

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove leftovers of interrupted writes; return their number."""
        return self.inner.collect_garbage(min_age_seconds)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()


class RecordWrapper:
    """Passes every call on to `inner`, an opened record."""

    def __init__(self, inner: StoredRecord) -> None:
        self.inner = inner

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self.inner.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` starting at `offset`."""
        self.inner.read_into(offset, buffer)

    def cancel(self) -> None:
        """Abort reads under way, if the store can."""
        cancel_reading(self.inner)

    def close(self) -> None:
        """Close the record."""
        self.inner.close()


def cancel_reading(record: object) -> None:
    """Abort other threads' reads of an opened record, if its store can; they raise StoreError."""
    cancel = getattr(record, "cancel", None)
    if cancel is not None:
        cancel()


def read_whole(record: StoredRecord) -> bytes:
    """Return all bytes of an opened record. Raises as `StoredRecord.read_into` does."""
    content = room_for(record)
    record.read_into(0, memoryview(content))
    return bytes(content)


def room_for(record: StoredRecord) -> bytearray:
    """Return a buffer for all bytes of an opened record.

    Raises
    ------
    RecordError
        When the record's stated size, which may be wrong, is larger than memory.
    """
    try:
        return bytearray(record.size_bytes)
    except (MemoryError, OverflowError) as error:
        raise RecordError(
            f"a record says that it has {record.size_bytes} bytes, which memory has no room for; "
            "delete it and ingest its document again"
        ) from error
