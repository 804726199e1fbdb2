"""A store with a size limit: it removes the least recently used records first."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreError
from kvrag.store.base import (
    RecordWrapper,
    Store,
    StoredRecord,
    StoreWrapper,
    capability,
    tiers_of,
)
from kvrag.store.metrics import StoreCounts, StoreMetrics

# Use counts are halved after this many uses for each record kept.
_USES_BEFORE_HALVING = 10


class LimitedStore(StoreWrapper):
    """A store that holds at most `limit_bytes` of records.

    It never removes records that are pinned or that this process has open. Each process applies the
    limit to the records that it knows of.

    Parameters
    ----------
    inner
        The store.
    limit_bytes
        Largest total size of all records.

    Raises
    ------
    ParameterError
        When the limit is not above 0.
    """

    def __init__(self, inner: Store, limit_bytes: int) -> None:
        super().__init__(inner)
        if limit_bytes <= 0:
            raise ParameterError(f"{inner.url}: a limit is above 0 bytes, found {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._metrics = StoreMetrics("limit")
        self._lock = threading.RLock()
        self._sizes: OrderedDict[ChunkKey, int] | None = None
        self._total = 0
        self._pins: Counter[ChunkKey] = Counter()
        self._open: Counter[ChunkKey] = Counter()
        self._uses: Counter[ChunkKey] = Counter()
        self._num_uses = 0

    @property
    def url(self) -> str:
        """The inner store's URL with the limit."""
        url = self.inner.url
        return f"{url}{'&' if '?' in url else '?'}limit={self.limit_bytes}"

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record and remove others to make room; an existing record stays.

        Raises
        ------
        StoreError
            When it is larger than the limit, or pinned and open records leave no room.
        """
        if self.inner.contains(key):
            self._use(key, len(record))
            return
        with self._room_for(key, len(record)):
            self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one. Raises as `put` does."""
        with self._room_for(key, len(record)):
            self.inner.replace(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none."""
        with self._lock:
            # Before the lookup: the record must not be removed in between.
            self._open[key] += 1
            self._count_use(key)
        try:
            record = self.inner.open(key)
        except BaseException:
            self.let_go(key)
            raise
        if record is None:
            self.let_go(key)
            self._forget(key)
            return None
        self._use(key, record.size_bytes)
        return _HeldRecord(record, key, self)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""
        self._forget(key)
        return self.inner.delete(key)

    def admits(self, key: ChunkKey, size_bytes: int) -> bool:
        """Return whether a copy of a record is worth the records it would push out.

        It is if there is room, or if the record was requested lately at least as often as each of
        them. A single pass over a large corpus then does not push out what is in use (TinyLFU,
        arXiv 1512.00727, with exact counts).
        """
        if size_bytes > self.limit_bytes:
            return False
        with self._lock:
            victims = self._victims(key, size_bytes)
            most = self._uses[key]
            return victims is not None and all(self._uses[one] <= most for one in victims)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Protect these records from removal until `unpin` is called as often."""
        with self._lock:
            self._pins.update(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Undo one `pin` of these records."""
        with self._lock:
            self._pins.subtract(keys)
            self._pins += Counter()

    def counts(self) -> Sequence[StoreCounts]:
        """Return the counts so far, including evictions."""
        own = self._metrics.counts()
        first, *rest = self.inner.counts()
        return (replace(first, evictions=own.evictions, bytes_evicted=own.bytes_evicted), *rest)

    def let_go(self, key: ChunkKey) -> None:
        """Note that a record opened here was closed, or that one being written is complete."""
        with self._lock:
            self._open[key] -= 1
            if self._open[key] <= 0:
                del self._open[key]

    # -- private -----------------------------------------------------------------------------

    def _known(self) -> OrderedDict[ChunkKey, int]:
        """Return the records, least recently used first; listed at first use."""
        if self._sizes is None:
            self._sizes = OrderedDict(self.inner.sizes())
            self._total = sum(self._sizes.values())
        return self._sizes

    def _use(self, key: ChunkKey, size_bytes: int) -> None:
        with self._lock:
            if self._sizes is None:
                return
            self._total += size_bytes - self._sizes.pop(key, 0)
            self._sizes[key] = size_bytes

    def _count_use(self, key: ChunkKey) -> None:
        self._uses[key] += 1
        self._num_uses += 1
        if self._num_uses > _USES_BEFORE_HALVING * max(len(self._sizes or ()), 100):
            # Forget records used once, so that there are no more counts than records.
            self._uses = Counter({one: n // 2 for one, n in self._uses.items() if n > 1})
            self._num_uses = self._uses.total()

    def _forget(self, key: ChunkKey) -> None:
        with self._lock:
            if self._sizes is not None:
                self._total -= self._sizes.pop(key, 0)

    def _victims(self, key: ChunkKey, more_bytes: int) -> list[ChunkKey] | None:
        """Return the records that would have to go for a larger record; None if they may not."""
        victims = []
        sizes = self._known()
        needed = self._total + more_bytes - self.limit_bytes
        for victim, size in sizes.items():
            if needed <= 0:
                break
            if victim != key and victim not in self._pins and victim not in self._open:
                victims.append(victim)
                needed -= size
        return victims if needed <= 0 else None

    @contextmanager
    def _room_for(self, key: ChunkKey, size_bytes: int) -> Iterator[None]:
        """Reserve room for a record while it is written; other writers see the room as taken."""
        if size_bytes > self.limit_bytes:
            raise StoreError(
                f"record {key} has {size_bytes} bytes, and {self.url} is limited to "
                f"{self.limit_bytes}; raise its limit, or store smaller records (chunk_tokens, "
                "a codec)"
            )
        with self._lock:
            sizes = self._known()
            size_before = sizes.get(key)
            victims = self._victims(key, size_bytes - (size_before or 0))
            if victims is None:
                raise StoreError(
                    f"{self.url} is limited to {self.limit_bytes} bytes, and no record may go for "
                    f"record {key} of {size_bytes}: all are pinned, open or not yet uploaded; "
                    "raise its limit"
                )
            for victim in victims:
                self._metrics.evicted(sizes[victim])
                self.delete(victim)
            self._use(key, size_bytes)
            self._open[key] += 1
        try:
            yield
        except BaseException:
            self._forget(key)
            if size_before is not None:
                self._use(key, size_before)
            raise
        else:
            # A reader that looked for the record before it was there made the list forget it.
            self._use(key, size_bytes)
        finally:
            self.let_go(key)


def limits_of(store: Store) -> list[LimitedStore]:
    """Return those of a store's tiers that keep within a limit, to pin records in them."""
    found = [capability(tier, LimitedStore) for tier in tiers_of(store)]
    return [one for one in found if one is not None]


class _HeldRecord(RecordWrapper):
    """Keeps its record from being removed while it is open."""

    def __init__(self, inner: StoredRecord, key: ChunkKey, store: LimitedStore) -> None:
        super().__init__(inner)
        self._key = key
        self._store: LimitedStore | None = store

    def close(self) -> None:
        super().close()
        store, self._store = self._store, None
        if store is not None:
            store.let_go(self._key)

    def __del__(self) -> None:
        self.close()
