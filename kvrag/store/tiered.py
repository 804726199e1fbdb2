"""Tiers of stores, the fastest first: memory over disk over a remote store.

A read asks one tier after another. A record from a lower tier is copied to the tiers above it, once
all of it has been read and its checksums match. A write goes to the disk tier, durably, and to a
list of records to upload; a thread uploads them in the background. After a process is killed, the
next one that opens the tiers continues with the list.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError
from kvrag.recordformat import check_record
from kvrag.store.base import (
    Admits,
    Store,
    StoredRecord,
    capability,
    check_range,
    is_in_memory,
    read_whole,
    room_for,
)
from kvrag.store.metrics import StoreCounts
from kvrag.store.uploader import Check, Uploader, write_to

# One fetch of a record, shared by all readers that want it at the same time.


# The least read at once: a request costs as much as some hundred kilobytes.
_GRANULE_BYTES = 256 << 10
_MISSING, _COMING, _HERE = range(3)


class Fetch:
    """A record on its way from a slow tier into memory; each byte is requested once.

    Readers ask for ranges, as for any record. If another reader is fetching a range, this one waits
    for it; if that reader fails, this one tries.

    Parameters
    ----------
    key
        The record's key.
    source
        The slow tier's opened record.
    on_complete
        Called once with all bytes, by the thread that reads the last of them.

    Raises
    ------
    RecordError
        When the record's stated size is larger than memory.
    """

    def __init__(
        self, key: ChunkKey, source: StoredRecord, on_complete: Callable[[Fetch, bytearray], None]
    ) -> None:
        self.key = key
        self._source = source
        self._on_complete = on_complete
        self._content = room_for(source)
        num_granules = -(-source.size_bytes // _GRANULE_BYTES)
        self._states = bytearray(num_granules)
        self._changed = threading.Condition()
        self._num_left = num_granules
        self._num_readers = 0

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return len(self._content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; raises as `StoredRecord.read_into` does."""
        check_range(self.key, self.size_bytes, offset, buffer.nbytes)
        end = offset + buffer.nbytes
        granules = range(offset // _GRANULE_BYTES, -(-end // _GRANULE_BYTES))
        while (run := self._claim(granules)) is not None:
            self._bring(run)
        buffer[:] = memoryview(self._content)[offset:end]

    def join(self) -> None:
        """Add a reader."""
        with self._changed:
            self._num_readers += 1

    def leave(self) -> bool:
        """Remove a reader; the last one closes the record. Return whether this was the last."""
        with self._changed:
            self._num_readers -= 1
            is_last = not self._num_readers
        if is_last:
            self._source.close()
        return is_last

    def _claim(self, granules: range) -> range | None:
        """Claim the next run of missing granules for this thread; None when all are here."""
        with self._changed:
            while True:
                states = self._states[granules.start : granules.stop]
                first = states.find(_MISSING)
                if first >= 0:
                    begin = granules.start + first
                    stop = begin
                    while stop < granules.stop and self._states[stop] == _MISSING:
                        self._states[stop] = _COMING
                        stop += 1
                    return range(begin, stop)
                if states.find(_COMING) < 0:
                    return None
                self._changed.wait()

    def _bring(self, run: range) -> None:
        begin, stop = run.start * _GRANULE_BYTES, min(run.stop * _GRANULE_BYTES, self.size_bytes)
        state = _MISSING
        try:
            self._source.read_into(begin, memoryview(self._content)[begin:stop])
            state = _HERE
        finally:
            with self._changed:
                self._states[run.start : run.stop] = bytes([state]) * len(run)
                if state == _HERE:
                    self._num_left -= len(run)
                is_complete = state == _HERE and not self._num_left
                self._changed.notify_all()
        if is_complete:
            self._on_complete(self, self._content)


class FetchReader:
    """One reader of a `Fetch`."""

    def __init__(self, fetch: Fetch, on_close: Callable[[Fetch], None]) -> None:
        self._fetch: Fetch | None = fetch
        self._on_close = on_close
        self._size_bytes = fetch.size_bytes

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; raises as `StoredRecord.read_into` does."""
        fetch = self._fetch
        if fetch is None:
            raise StoreError("cannot read the record: it was closed; open it again")
        fetch.read_into(offset, buffer)

    def close(self) -> None:
        """Leave the fetch."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._on_close(fetch)

    def __del__(self) -> None:
        self.close()


# Copies wait in memory for the disk tier: a few, and none if the tier cannot keep up.
_MAX_COPIES_WAITING = 8


@dataclass(frozen=True, eq=False)
class _Copy:
    """A record on its way to slower tiers."""

    key: ChunkKey
    content: bytes
    tiers: Sequence[Store]


class TieredStore(Store):
    """Several stores as one.

    Parameters
    ----------
    tiers
        At least one store, the fastest first. The last one is the records' home.
    outbox_folder
        Folder of the disk tier right above the last tier, where the list of records to upload is
        kept. None writes to the last tier before `put` returns.
    check
        Check that a record must pass before it is copied from tier to tier.

    Attributes
    ----------
    uploader
        What writes to the last tier in the background; None if nothing does.

    Raises
    ------
    ParameterError
        When there is no tier.
    StoreError
        When the list cannot be used.
    """

    def __init__(
        self,
        tiers: Sequence[Store],
        *,
        outbox_folder: Path | None = None,
        check: Check = check_record,
    ) -> None:
        if not tiers or (outbox_folder is not None and len(tiers) < 2):
            raise ParameterError("tiers are at least one store, and two to upload to the last")
        self.tiers = tuple(tiers)
        self._check = check
        # Looked up once: `admits` is called for every record that is opened.
        self._admits = [capability(tier, Admits) for tier in self.tiers]
        # Held while the faster tiers' copies of a record change, never while a slow tier is read.
        self._changing = threading.Condition()
        self._fetches: dict[ChunkKey, Fetch] = {}
        self.uploader: Uploader | None = None
        if outbox_folder is not None:
            self.uploader = Uploader(self.tiers[-2], self.tiers[-1], outbox_folder, check)
        self._is_closed = False
        self._copies: queue.Queue[_Copy | None] = queue.Queue(_MAX_COPIES_WAITING)
        self._wanted: dict[ChunkKey, _Copy] = {}
        self._copied_now: ChunkKey | None = None
        self._copier = threading.Thread(target=self._copy_all, name="kvrag-copy", daemon=True)
        self._copier.start()

    @property
    def url(self) -> str:
        """``tiered:`` and the tiers' own URLs, with ``|`` between them."""
        return "tiered:" + "|".join(tier.url for tier in self.tiers)

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record durably; an existing record stays. Raises StoreError."""
        if not self.contains(key):
            self._write(key, record, is_replacing=False)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; no tier keeps the old one."""
        self._write(key, record, is_replacing=True)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        StoreError, RecordError
            When no tier has the record and at least one tier could not be read.
        """
        refusal: StoreError | RecordError | None = None
        for number, tier in enumerate(self.tiers):
            if number == 1:
                joined = self._join(key)
                if joined is not None:
                    return joined
            try:
                record = tier.open(key)
                if record is not None:
                    return self._shared(key, record, number)
            except StoreError as error:
                refusal = error
            except RecordError as error:
                refusal = error
                if tier is not self.tiers[-1]:
                    self._give_up(tier, key)
        if refusal is not None:
            raise refusal
        return None

    def contains(self, key: ChunkKey) -> bool:
        """Return whether a tier has the record; an unreachable tier counts as without it."""
        for tier in self.tiers:
            with contextlib.suppress(StoreError):
                if tier.contains(key):
                    return True
        return False

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record from every tier; return whether there was one."""
        self._outdate(key)
        if self.uploader is not None:
            self.uploader.forget_deleted(key)
        was_there = [tier.delete(key) for tier in self.tiers]
        return any(was_there)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over the keys of all tiers and the bytes of their records."""
        seen: set[ChunkKey] = set()
        for tier in reversed(self.tiers):
            for key, size_bytes in tier.sizes():
                if key not in seen:
                    seen.add(key)
                    yield key, size_bytes

    def note_damage(self, key: ChunkKey) -> None:
        """Drop the damaged copies of a record; the tiers below have others."""
        for tier in self.tiers[:-1]:
            with contextlib.suppress(StoreError):
                try:
                    record = tier.open(key)
                    if record is None:
                        continue
                    with contextlib.closing(record):
                        self._check(key, read_whole(record))
                except RecordError:
                    self._give_up(tier, key)
                    return
        self.tiers[-1].note_damage(key)

    def counts(self) -> Sequence[StoreCounts]:
        """Return the counts so far, the fastest tier first."""
        return tuple(counts for tier in self.tiers for counts in tier.counts())

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove leftovers of interrupted writes from every tier; return their number."""
        return sum(tier.collect_garbage(min_age_seconds) for tier in self.tiers)

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is uploaded; return whether it is. Stops when an upload fails."""
        return self.uploader is None or self.uploader.flush(timeout_seconds)

    def close(self) -> None:
        """Upload as much as possible, and close all tiers; the rest stays listed."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.uploader is not None:
            self.uploader.close()
        self._copies.put(None)
        self._copier.join()
        for tier in self.tiers:
            tier.close()

    # -- reading -----------------------------------------------------------------------------

    def _join(self, key: ChunkKey) -> StoredRecord | None:
        """Return a reader of the fetch under way, if there is one."""
        with self._changing:
            fetch = self._fetches.get(key)
            if fetch is None:
                return None
            fetch.join()
        return FetchReader(fetch, self._leave)

    def _shared(self, key: ChunkKey, record: StoredRecord, number: int) -> StoredRecord:
        """Return a record whose other readers wait for the same bytes."""
        above = zip(self.tiers[:number], self._admits[:number], strict=True)
        wanting = [
            tier
            for tier, chooses in above
            if chooses is None or chooses.admits(key, record.size_bytes)
        ]
        is_remote = number > 0 and number == len(self.tiers) - 1
        if not wanting and not is_remote:
            return record

        def keep(fetch: Fetch, content: bytearray) -> None:
            self._keep(fetch, bytes(content), wanting)

        with self._changing:
            fetch = self._fetches.get(key)
            if fetch is None:
                try:
                    fetch = self._fetches[key] = Fetch(key, record, keep)
                except RecordError:
                    record.close()
                    raise
            else:
                record.close()
            fetch.join()
        return FetchReader(fetch, self._leave)

    def _leave(self, fetch: Fetch) -> None:
        with self._changing:
            if fetch.leave() and self._fetches.get(fetch.key) is fetch:
                del self._fetches[fetch.key]

    def _give_up(self, tier: Store, key: ChunkKey) -> None:
        """Remove a tier's damaged copy of a record; the tiers below have others."""
        tier.note_damage(key)
        with contextlib.suppress(StoreError, RecordError):
            tier.delete(key)

    def _outdate(self, key: ChunkKey) -> None:
        """Discard the result of a fetch under way; its readers can finish reading."""
        with self._changing:
            self._fetches.pop(key, None)
            self._wanted.pop(key, None)
            # A copy being written would arrive after the change the caller is about to make.
            self._changing.wait_for(lambda: self._copied_now != key)

    def _keep(self, fetch: Fetch, content: bytes, tiers: Sequence[Store]) -> None:
        """Copy a record that has been read whole to faster tiers."""
        try:
            self._check(fetch.key, content)
        except RecordError:
            return  # the reader finds the same damage and reports it
        at_once = [tier for tier in tiers if is_in_memory(tier)]
        copy = _Copy(fetch.key, content, [tier for tier in tiers if tier not in at_once])
        with self._changing:
            if self._fetches.get(fetch.key) is not fetch:
                return
            for tier in at_once:
                with contextlib.suppress(StoreError):
                    tier.put(fetch.key, content)
            if copy.tiers:
                # A copy is optional: if its tier cannot keep up, a later read copies the record.
                with contextlib.suppress(queue.Full):
                    self._copies.put_nowait(copy)
                    self._wanted[fetch.key] = copy

    def _copy_all(self) -> None:
        while (copy := self._copies.get()) is not None:
            with self._changing:
                if self._wanted.get(copy.key) is not copy:
                    continue  # deleted or replaced since
                del self._wanted[copy.key]
                self._copied_now = copy.key
            try:
                for tier in copy.tiers:
                    # Whatever happens with this copy, the thread must serve the others.
                    with contextlib.suppress(Exception):
                        tier.put(copy.key, copy.content)
            finally:
                with self._changing:
                    self._copied_now = None
                    self._changing.notify_all()

    # -- writing -----------------------------------------------------------------------------

    def _write(self, key: ChunkKey, record: bytes, *, is_replacing: bool) -> None:
        self._outdate(key)
        written = self.tiers[-1:] if self.uploader is None else self.tiers[-2:]
        if is_replacing:
            for tier in self.tiers[: -len(written)]:
                tier.delete(key)
        if self.uploader is None:
            write_to(self.tiers[-1], key, record, is_replacing)
        else:
            self.uploader.write(key, record, is_replacing=is_replacing)
