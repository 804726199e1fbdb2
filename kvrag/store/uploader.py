"""Background uploads of records from the disk tier to a slower store, by a list that lasts."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.sqlitefile import open_connection
from kvrag.store.base import Pins, Store, capability, read_whole
from kvrag.store.file import make_folder

FILE_NAME = "outbox.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pending (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    replaces INTEGER NOT NULL,
    listed REAL NOT NULL
)
"""

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
# Age after which a listed record that is not on disk is given up.
_ABANDONED_SECONDS = 3600.0


Check = Callable[[ChunkKey, bytes], None]
"""Raises RecordError unless the bytes are a key's whole record."""


@dataclass(frozen=True)
class _Entry:
    """A record to be uploaded.

    Attributes
    ----------
    number
        Rises from entry to entry.
    key
        The record's key.
    replaces
        Whether the record replaces another one.
    age_seconds
        Time since it was listed.
    """

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
        self._rows("SELECT COUNT(*) FROM pending")

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
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute(
                "DELETE FROM pending WHERE key = ? RETURNING replaces", (key.digest,)
            ).fetchone()
            connection.execute(
                "INSERT INTO pending (key, replaces, listed) VALUES (?, ?, ?)",
                (key.digest, int(replaces or (row is not None and row[0])), time.time()),
            )
            connection.execute("COMMIT")
        return row is None

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
        return bool(self._rows("SELECT 1 FROM pending WHERE key = ?", key.digest))

    def after(self, number: int) -> _Entry | None:
        """Return the oldest entry with a higher number, if there is one."""
        rows = self._rows(
            "SELECT number, key, replaces, listed FROM pending WHERE number > ? "
            "ORDER BY number LIMIT 1",
            number,
        )
        for found, digest, replaces, listed in rows:
            return _Entry(found, ChunkKey(digest), bool(replaces), time.time() - listed)
        return None

    def keys(self) -> list[ChunkKey]:
        """Return all keys."""
        rows = self._rows("SELECT key FROM pending ORDER BY number")
        return [ChunkKey(digest) for (digest,) in rows]

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
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.rollback()
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

    def __init__(self, disk: Store, home: Store, folder: Path, check: Check) -> None:
        self._disk = disk
        self._home = home
        self._pins = capability(disk, Pins)
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

    @property
    def num_pending(self) -> int:
        """Number of records that are yet to be uploaded."""
        return len(self._outbox.keys())

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
            except StoreError:
                has_failed = True
            else:
                has_failed = num_refused > 0
                number = num_refused = 0
            with self._wake:
                self._has_failed, self._is_idle = has_failed, not has_failed
                self._wake.notify_all()
                if version == self._version and not self._is_closing:
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
            record = self._disk.open(entry.key)
            if record is not None:
                with contextlib.closing(record):
                    content = read_whole(record)
                self._check(entry.key, content)
        except RecordError:
            # Damaged, so there is nothing to upload: the next reader computes it again.
            self._disk.note_damage(entry.key)
            self._disk.delete(entry.key)
        else:
            if record is not None:
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


def write_to(store: Store, key: ChunkKey, record: bytes, is_replacing: bool) -> None:
    """Put a record into a store, or replace the one there."""
    if is_replacing:
        store.replace(key, record)
    else:
        store.put(key, record)
