"""Tiers of stores, the fastest first: memory over disk over a remote store.

A read asks one tier after another. A record from a lower tier is copied to the tiers above it, once
all of it has been read and its checksums match. A write goes to the disk tier, durably, and to a
list of records to upload; a thread uploads them in the background. After a process is killed, the
next one that opens the tiers continues with the list.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.recordformat import check_record
from kvrag.sqlitefile import open_connection
from kvrag.store import base as b
from kvrag.store.file import make_folder
from kvrag.store.limited import LimitedStore
from kvrag.store.metrics import StoreCounts

# -- uploading -----------------------------------------------------------------------------------

FILE_NAME = "outbox.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pending (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    replaces INTEGER NOT NULL,
    listed REAL NOT NULL
)
"""

_FIND = "SELECT 1 FROM pending WHERE key = ?"
_NEXT = """
SELECT number, key, replaces, listed FROM pending WHERE number > ? ORDER BY number LIMIT 1
"""
# Once more for a listed record: an upload under way has the number of the entry before.
_ADD = """
INSERT OR REPLACE INTO pending (key, replaces, listed)
VALUES (?1, MAX(?2, COALESCE((SELECT replaces FROM pending WHERE key = ?1), 0)), ?3)
"""

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
# Age after which a listed record that is not on disk is given up.
_ABANDONED_SECONDS = 3600.0


Check = Callable[[ChunkKey, bytes], None]
"""Raises RecordError unless the bytes are a key's whole record."""


class _Entry(NamedTuple):
    """A record to be uploaded; its number rises from entry to entry."""

    number: int
    key: ChunkKey
    replaces: bool
    age_seconds: float


class _Outbox:
    """Keys of records to be uploaded, the oldest first. Safe to use from several threads.

    Parameters
    ----------
    folder
        Where the list is kept, beside the records; created with the first entry.

    Raises
    ------
    StoreError
        When the list cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._path = folder / FILE_NAME
        self.after(0)  # a list that cannot be used is refused now

    def add(self, key: ChunkKey, *, replaces: bool) -> bool:
        """Note durably that a record is to be uploaded; return whether it was not listed yet.

        Parameters
        ----------
        key
            The record's key. If it is listed already, the upload under way is no longer enough.
        replaces
            Whether the record replaces another one.
        """
        with self._using() as connection:
            is_listed = connection.execute(_FIND, [key.digest]).fetchone() is not None
            connection.execute(_ADD, [key.digest, int(replaces), time.time()])
        return not is_listed

    def remove(self, key: ChunkKey, number: int | None = None) -> bool:
        """Forget a record that has been uploaded or deleted; return whether it was listed.

        Parameters
        ----------
        key
            The record's key.
        number
            Number of the uploaded entry: a newer entry stays. None means any.
        """
        query = "DELETE FROM pending WHERE key = ? AND number = COALESCE(?, number) RETURNING 1"
        return bool(self._rows(query, key.digest, number))

    def contains(self, key: ChunkKey) -> bool:
        """Return whether a record is listed."""
        return bool(self._rows(_FIND, key.digest))

    def after(self, number: int) -> _Entry | None:
        """Return the oldest entry with a higher number, if there is one."""
        for found, digest, replaces, listed in self._rows(_NEXT, number):
            return _Entry(found, ChunkKey(digest), bool(replaces), time.time() - listed)
        return None

    def keys(self) -> list[ChunkKey]:
        """Return all keys."""
        return [ChunkKey(digest) for (digest,) in self._rows("SELECT key FROM pending")]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __del__(self) -> None:
        self.close()

    def _rows(self, query: str, *values: object) -> list[Any]:
        """Return what a query finds; nothing if there is no list yet."""
        if not self._path.exists():
            return []
        with self._using() as connection:
            return connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    make_folder(self._path.parent)
                    connection = open_connection(
                        self._path, isolation_level=None, check_same_thread=False, timeout=30.0
                    )
                    # No write-ahead log: there are few changes, and each of them must last.
                    connection.execute("PRAGMA synchronous = FULL")
                    connection.execute(_SCHEMA)
                    self._connection = connection
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                raise StoreError(
                    f"cannot use {self._path}: {error}; free some space or mend the folder's "
                    "permissions; delete the file if it is damaged, then 'kvrag verify --repair'"
                ) from error


class Uploader:
    """Writes records to a disk tier, and uploads them from there in a thread.

    Parameters
    ----------
    disk, home
        The disk tier, and the store to upload to.
    folder
        Where the list of records to upload is kept.
    check
        Check that a record must pass before it is uploaded.

    Raises
    ------
    StoreError
        When the list cannot be used.
    """

    def __init__(self, disk: b.Store, home: b.Store, folder: Path, check: Check) -> None:
        self._disk = disk
        self._home = home
        self._pins = b.capability(disk, LimitedStore)
        self._check = check
        self._outbox = _Outbox(folder)
        self._wake = threading.Condition()
        self._is_closing = False
        self._has_failed = False
        self._is_idle = False
        self._version = 1
        self._uploading: ChunkKey | None = None
        self._is_deleted = False  # the one that is being uploaded
        # A record that has not been uploaded is nowhere but on disk.
        self._pin(*self._outbox.keys())
        self._thread = threading.Thread(target=self._run, name="kvrag-upload", daemon=True)
        self._thread.start()

    def write(self, key: ChunkKey, record: bytes, *, is_replacing: bool) -> None:
        """Write a record to the disk tier, durably, and list it for upload.

        A record for which there is no room on disk is uploaded at once.

        Raises
        ------
        StoreError
            When neither store takes the record.
        """
        # Listed first: a record that is not listed would never be uploaded.
        self._list(key, is_replacing)
        try:
            write_to(self._disk, key, record, is_replacing)
        except StoreError:
            try:
                write_to(self._home, key, record, is_replacing)
                if is_replacing:
                    self._disk.delete(key)  # the old one would be found before the new one
            finally:
                self.forget(key)
            return
        if not self._outbox.contains(key):
            # Uploaded already, or given up as lost because a clock jumped.
            self._list(key, is_replacing)
        with self._wake:
            self._version += 1
            self._is_idle = False
            self._wake.notify_all()

    def forget(self, key: ChunkKey, number: int | None = None) -> None:
        """Remove a record from the list: any entry, or only the one with `number`."""
        if self._outbox.remove(key, number) and self._pins is not None:
            self._pins.unpin([key])

    def forget_deleted(self, key: ChunkKey) -> None:
        """Forget a record that is deleted from all stores next; take back an upload under way."""
        self.forget(key)
        with self._wake:
            self._is_deleted |= self._uploading == key

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all is uploaded; say whether it is. Stops at once when an upload fails."""
        with self._wake:
            self._has_failed = self._is_idle = False
            self._version += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._is_idle or self._has_failed, timeout_seconds)
            return self._is_idle

    def close(self) -> None:
        """Upload as much as possible; the rest stays listed."""
        self.flush()
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join()
        self._outbox.close()

    # -- private -----------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_RETRY_SECONDS
        number = version = num_refused = 0
        while True:
            with self._wake:
                if self._is_closing:
                    return
                if version != self._version:
                    # Something was written: look again at all entries, also those skipped before.
                    number, version, num_refused = 0, self._version, 0
            try:
                entry = self._outbox.after(number)
                if entry is not None:
                    num_refused += not self._is_done_with(entry)
                    number = entry.number
                    continue
                has_failed = num_refused > 0
                number = num_refused = 0
            except StoreError:
                has_failed = True
            with self._wake:
                if version != self._version:
                    continue
                self._has_failed, self._is_idle = has_failed, not has_failed
                self._wake.notify_all()
                if not self._is_closing:
                    self._wake.wait(pause if has_failed else None)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS) if has_failed else _FIRST_RETRY_SECONDS

    def _is_done_with(self, entry: _Entry) -> bool:
        """Upload a record; return False if it was refused. Raises StoreError if all would be."""
        try:
            self._upload(entry)
        except StoreUnreachableError:
            raise
        except Exception:
            # Whatever happens with this record, the thread must serve the others.
            return False
        return True

    def _upload(self, entry: _Entry) -> None:
        try:
            content = b.content_of(self._disk, entry.key)
            if content is not None:
                self._check(entry.key, content)
        except RecordError:
            # Damaged, so there is nothing to upload: the next reader computes it again.
            self._disk.note_damage(entry.key)
            self._disk.delete(entry.key)
        else:
            if content is not None:
                self._send(entry, content)
            elif entry.age_seconds < _ABANDONED_SECONDS:
                return  # it is being written, or its writer was killed before it was
        self.forget(entry.key, entry.number)

    def _send(self, entry: _Entry, content: bytes) -> None:
        """Write a record to the home, unless it is deleted before or meanwhile."""
        with self._wake:
            self._uploading, self._is_deleted = entry.key, False
        try:
            if self._outbox.contains(entry.key):
                write_to(self._home, entry.key, content, entry.replaces)
        finally:
            with self._wake:
                self._uploading, is_deleted = None, self._is_deleted
        if is_deleted:
            self._home.delete(entry.key)

    def _list(self, key: ChunkKey, replaces: bool) -> None:
        if self._outbox.add(key, replaces=replaces):
            self._pin(key)

    def _pin(self, *keys: ChunkKey) -> None:
        if self._pins is not None:
            self._pins.pin(keys)


def write_to(store: b.Store, key: ChunkKey, record: bytes, is_replacing: bool) -> None:
    """Put a record into a store, or replace the one there."""
    if is_replacing:
        store.replace(key, record)
    else:
        store.put(key, record)


# -- tiers ---------------------------------------------------------------------------------------

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
        self, key: ChunkKey, source: b.StoredRecord, on_complete: Callable[[Fetch, bytearray], None]
    ) -> None:
        self.key = key
        self._source = source
        self._on_complete = on_complete
        self._content = b.room_for(source)
        num_granules = -(-source.size_bytes // _GRANULE_BYTES)
        self._states = bytearray(num_granules)
        self._changed = threading.Condition()
        self._num_left = num_granules

    def __del__(self) -> None:
        self._source.close()

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return len(self._content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; raises as `StoredRecord.read_into` does."""
        b.check_range(self.key, self.size_bytes, offset, buffer.nbytes)
        end = offset + buffer.nbytes
        granules = range(offset // _GRANULE_BYTES, -(-end // _GRANULE_BYTES))
        while (run := self._claim(granules)) is not None:
            self._bring(run)
        buffer[:] = memoryview(self._content)[offset:end]

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
    """One reader of a `Fetch`, which ends with the last of them."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch: Fetch | None = fetch
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
        self._fetch = None


# Copies wait in memory for the disk tier: a few, and none if the tier cannot keep up.
_MAX_COPIES_WAITING = 8


class TieredStore(b.Store, b.HasTiers):
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
        tiers: Sequence[b.Store],
        *,
        outbox_folder: Path | None = None,
        check: Check = check_record,
    ) -> None:
        if not tiers or (outbox_folder is not None and len(tiers) < 2):
            raise ParameterError("tiers are at least one store, and two to upload to the last")
        self.tiers = tuple(tiers)
        self._check = check
        # Looked up once: `admits` is called for every record that is opened.
        self._admits = [b.capability(tier, LimitedStore) for tier in self.tiers]
        # Held while the faster tiers' copies of a record change, never while a slow tier is read.
        self._changing = threading.Condition()
        self._fetches: WeakValueDictionary[ChunkKey, Fetch] = WeakValueDictionary()
        self.uploader: Uploader | None = None
        if outbox_folder is not None:
            self.uploader = Uploader(self.tiers[-2], self.tiers[-1], outbox_folder, check)
        self._is_closed = False
        self._wanted: dict[ChunkKey, tuple[bytes, Sequence[b.Store]]] = {}
        self._copied_now: ChunkKey | None = None
        # The end of the process does not wait for copies.
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

    def open(self, key: ChunkKey) -> b.StoredRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        StoreError, RecordError
            When no tier has the record and at least one tier could not be read.
        """
        refusal: StoreError | RecordError | None = None
        for number, tier in enumerate(self.tiers):
            if number == 1:
                with self._changing:
                    fetch = self._fetches.get(key)
                if fetch is not None:
                    return FetchReader(fetch)
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
                    content = b.content_of(tier, key)
                    if content is not None:
                        self._check(key, content)
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
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
            self._changing.notify_all()
        if self.uploader is not None:
            self.uploader.close()
        self._copier.join()
        for tier in self.tiers:
            tier.close()

    # -- reading -----------------------------------------------------------------------------

    def _shared(self, key: ChunkKey, record: b.StoredRecord, number: int) -> b.StoredRecord:
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
                fetch = self._fetches[key] = Fetch(key, record, keep)
            else:
                record.close()
        return FetchReader(fetch)

    def _give_up(self, tier: b.Store, key: ChunkKey) -> None:
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

    def _keep(self, fetch: Fetch, content: bytes, tiers: Sequence[b.Store]) -> None:
        """Copy a record that has been read whole to faster tiers."""
        try:
            self._check(fetch.key, content)
        except RecordError:
            return  # the reader finds the same damage and reports it
        at_once = [tier for tier in tiers if b.is_in_memory(tier)]
        others = [tier for tier in tiers if tier not in at_once]
        with self._changing:
            if self._fetches.get(fetch.key) is not fetch:
                return
            for tier in at_once:
                with contextlib.suppress(StoreError):
                    tier.put(fetch.key, content)
            # A copy is optional: if its tier cannot keep up, a later read copies the record.
            is_full = self._is_closed or len(self._wanted) == _MAX_COPIES_WAITING
            if others and not is_full:
                self._wanted[fetch.key] = content, others
                self._changing.notify_all()

    def _copy_all(self) -> None:
        while True:
            with self._changing:
                self._copied_now = None
                self._changing.notify_all()
                self._changing.wait_for(lambda: self._wanted or self._is_closed)
                if not self._wanted:
                    return
                self._copied_now = key = next(iter(self._wanted))
                content, tiers = self._wanted.pop(key)
            for tier in tiers:
                # Whatever happens with this copy, the thread must serve the others.
                with contextlib.suppress(Exception):
                    tier.put(key, content)

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
