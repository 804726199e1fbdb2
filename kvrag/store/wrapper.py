"""A store around another one: what it does not change, it hands on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError
from kvrag.store.base import Store, StoredRecord
from kvrag.store.metrics import StoreCounts


class StoreWrapper:
    """Hands every call on to `inner`; subclasses override what they change.

    Attributes
    ----------
    inner
        The store around which this one is.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The inner store's."""
        return self.inner.url

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; a key that is present keeps its record."""
        self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the one `key` has."""
        self.inner.replace(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None where there is none."""
        return self.inner.open(key)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        return self.inner.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record; say whether there was one."""
        return self.inner.delete(key)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records."""
        return self.inner.sizes()

    def keys(self) -> Iterator[ChunkKey]:
        """Iterate over the keys."""
        return self.inner.keys()

    def size_bytes(self) -> int:
        """Bytes held by all records."""
        return self.inner.size_bytes()

    def note_damage(self, key: ChunkKey) -> None:
        """Hand on that a record was not what had been written."""
        self.inner.note_damage(key)

    def counts(self) -> Sequence[StoreCounts]:
        """Return what was counted so far."""
        return self.inner.counts()

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove what interrupted writes left behind."""
        return self.inner.collect_garbage(min_age_seconds)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()


class RecordWrapper:
    """Hands every call on to `inner`, an opened record."""

    def __init__(self, inner: StoredRecord) -> None:
        self.inner = inner

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self.inner.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on."""
        self.inner.read_into(offset, buffer)

    def cancel(self) -> None:
        """Break off what is being read, where the store can."""
        cancel_reading(self.inner)

    def close(self) -> None:
        """Let go of the record."""
        self.inner.close()


def cancel_reading(record: object) -> None:
    """Break off what other threads read of an opened record, where its store can; they fail."""
    cancel = getattr(record, "cancel", None)
    if cancel is not None:
        cancel()


def read_whole(record: StoredRecord) -> bytes:
    """Return all bytes of an opened record. Raises as `StoredRecord.read_into` does."""
    content = room_for(record)
    record.read_into(0, memoryview(content))
    return bytes(content)


def room_for(record: StoredRecord) -> bytearray:
    """Return room for all bytes of an opened record.

    Raises
    ------
    RecordError
        When it says that it is larger than memory: what is stored may say anything.
    """
    try:
        return bytearray(record.size_bytes)
    except (MemoryError, OverflowError) as error:
        raise RecordError(
            f"a record says that it has {record.size_bytes} bytes, which memory has no room for; "
            "delete it and ingest its document again"
        ) from error
