"""What a store is: immutable records by chunk key.

A store knows nothing of codecs: records are bytes. Every method may block on I/O, and all are safe
to call from several threads. Opening a record takes at most one round trip, and so reads each
range. To read layer i + 1 while layer i is computed, read its range in another thread.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.metrics import (
    MISS_ABSENT,
    MISS_DAMAGED,
    MISS_UNREADABLE,
    StoreCounts,
    StoreMetrics,
)


class StoredRecord(Protocol):
    """An opened record.

    It stays readable even if the record is deleted or replaced meanwhile. A store that cannot keep
    it for its readers raises StoreError. Readers never see another record's bytes.
    """

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` to its end.

        Raises StoreError when the medium refuses, RecordError when the record ends before the
        buffer is full.
        """

    def close(self) -> None:
        """Close the record. A record that is garbage-collected closes itself."""


class Store(Protocol):
    """Records by key. Raises StoreError when the medium refuses an operation."""

    @property
    def url(self) -> str:
        """URL with which `kvrag.store.registry.open_store` opens this store, without secrets."""

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record atomically and durably; an existing record stays.

        When several threads or processes put one key at the same time, one of the records stays,
        whole.
        """
        if not self.contains(key):
            self.replace(key, record)

    @abstractmethod
    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record atomically and durably in place of the existing one, if any.

        Readers that have the old record open can still read it.
        """

    @abstractmethod
    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none."""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is a record for `key`."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""

    @abstractmethod
    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over all keys with the bytes of their records, in no particular order.

        Records that are put or deleted meanwhile may or may not appear.
        """

    def keys(self) -> Iterator[ChunkKey]:
        """Iterate over all keys, as `sizes` does."""
        return (key for key, _ in self.sizes())

    @abstractmethod
    def note_damage(self, key: ChunkKey) -> None:
        """Report a damaged record: the bytes read are not the bytes written.

        The store counts it. A store that has other copies of the record drops the damaged one.
        """

    @abstractmethod
    def counts(self) -> Sequence[StoreCounts]:
        """Counts since the store was opened; for tiers, the fastest first."""

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:  # noqa: ARG002
        """Remove leftovers of interrupted writes of at least that age; return their number.

        A store that has nothing to clean up returns 0.
        """
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the store. Opened records need not stay readable."""


class CountedStore(Store):
    """Base of stores that keep counts.

    Attributes
    ----------
    url, metrics
        The store's URL and its counts; the store sets them.
    """

    url: str = ""
    metrics: StoreMetrics

    def note_damage(self, key: ChunkKey) -> None:
        del key
        self.metrics.miss(MISS_DAMAGED)

    def counts(self) -> tuple[StoreCounts]:
        return (self.metrics.counts(),)


_Store = TypeVar("_Store", bound=CountedStore)
_Record = TypeVar("_Record")


def counted(
    open_record: Callable[[_Store, ChunkKey], _Record | None],
) -> Callable[[_Store, ChunkKey], _Record | None]:
    """Decorate a store's `open`: count what is found, missing or unreadable."""

    @functools.wraps(open_record)
    def opened(self: _Store, key: ChunkKey) -> _Record | None:
        try:
            record = open_record(self, key)
        except StoreError:
            self.metrics.miss(MISS_UNREADABLE)
            raise
        if record is None:
            self.metrics.miss(MISS_ABSENT)
        else:
            self.metrics.hit()
        return record

    return opened


def check_range(key: ChunkKey, size_bytes: int, offset: int, num_bytes: int) -> None:
    """Raise RecordError unless `num_bytes` bytes starting at `offset` lie within a record."""
    if offset < 0 or offset + num_bytes > size_bytes:
        raise RecordError(
            f"record {key}: expected bytes {offset} to {offset + num_bytes}, "
            f"found a record of {size_bytes} bytes; ingest its document again"
        )


class StoreWrapper(Store):
    """Base of stores around another store: it passes every call on to `inner`.

    Attributes
    ----------
    inner
        The wrapped store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: ChunkKey, record: bytes) -> None:
        self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        self.inner.replace(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        return self.inner.open(key)

    def contains(self, key: ChunkKey) -> bool:
        return self.inner.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        return self.inner.delete(key)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        return self.inner.sizes()

    def note_damage(self, key: ChunkKey) -> None:
        self.inner.note_damage(key)

    def counts(self) -> Sequence[StoreCounts]:
        return self.inner.counts()

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        return self.inner.collect_garbage(min_age_seconds)

    def close(self) -> None:
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


def content_of(store: Store, key: ChunkKey) -> bytes | None:
    """Return all bytes of a record, or None if there is none. Raises as reading it does."""
    record = store.open(key)
    if record is None:
        return None
    with contextlib.closing(record):
        return read_whole(record)


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


_Kind = TypeVar("_Kind")


class InMemory:
    """Base of stores in this process: fast to write, and gone when the process ends."""


class HasTiers:
    """Base of stores that consist of several, the fastest first."""

    tiers: Sequence[Store]


def capability(store: Store, kind: type[_Kind]) -> _Kind | None:
    """Return the outermost of a store and the stores it wraps that is of a class.

    This does not look into tiers: a capability of one tier need not be a capability of the whole.
    Ask each store of `tiers_of`.

    Parameters
    ----------
    kind
        `InMemory`, `HasTiers`, or the class of a store.
    """
    while not isinstance(store, kind):
        if not isinstance(store, StoreWrapper):
            return None
        store = store.inner
    return store


def is_in_memory(store: Store) -> bool:
    """Return whether a store's records end with this process."""
    return capability(store, InMemory) is not None


def tiers_of(store: Store) -> Sequence[Store]:
    """Return the tiers of a store, the fastest first; a store without tiers is its only one."""
    found = capability(store, HasTiers)
    return (store,) if found is None else found.tiers


def tier_of(store: Store, key: ChunkKey) -> int:
    """Return the number of the tier that would deliver a record, without reading it.

    The last tier is not asked: a record in none of the others is there or nowhere.
    """
    tiers = tiers_of(store)
    for number, tier in enumerate(tiers[:-1]):
        with contextlib.suppress(StoreError):
            if tier.contains(key):
                return number
    return len(tiers) - 1
