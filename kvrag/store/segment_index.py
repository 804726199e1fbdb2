"""The index of segments, ``records.sqlite``: which record is where."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError, StoreUnreachableError
from kvrag.sqlitefile import FileStamp, connect, file_stamp
from kvrag.store.files import make_folder, refusal_of, store_error
from kvrag.store.segments import Place

FILE_NAME = "records.sqlite"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x6B765253  # "kvRS"

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS segments (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    end INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments (number),
    offset INTEGER NOT NULL,
    size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_segment ON records (segment);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_PAGE = 10_000
# Retries when another process is creating the file: SQLite then does not wait by itself.
_MAX_TRIES = 100
_WAIT_SECONDS = 0.05


class SegmentIndex:
    """Maps each key to its record's place. Safe to use from several threads and processes.

    Parameters
    ----------
    folder
        The store's folder; it and the file are created when the first record is written.

    Raises
    ------
    StoreError
        When the file exists and cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._lock = threading.RLock()
        self._write_lock = threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._stamp: FileStamp | None = None
        self._writer: sqlite3.Connection | None = None
        with self._reading():
            pass

    def find(self, key: ChunkKey) -> Place | None:
        """Return the place of the record of `key`, or None if there is none."""
        with self._reading() as connection:
            if connection is None:
                return None
            row = connection.execute(
                "SELECT segment, offset, size FROM records WHERE key = ?", (_blob(key),)
            ).fetchone()
        return None if row is None else Place(*row)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and sizes; a long listing never delays readers or writers."""
        last = b""
        while True:
            with self._reading() as connection:
                if connection is None:
                    return
                rows = connection.execute(
                    "SELECT key, size FROM records WHERE key > ? ORDER BY key LIMIT ?",
                    (last, _PAGE),
                ).fetchall()
            if not rows:
                return
            for key, size in rows:
                yield ChunkKey(key.hex()), size
            last = rows[-1][0]

    def size_bytes(self) -> int:
        """Return the total size of all records, in bytes."""
        with self._reading() as connection:
            if connection is None:
                return 0
            return int(
                connection.execute("SELECT COALESCE(SUM(size), 0) FROM records").fetchone()[0]
            )

    @contextlib.contextmanager
    def writing(self, action: str = "write", *, is_durable: bool = True) -> Iterator[IndexWriter]:
        """Change the index in one exclusive transaction.

        All changes are written at the end, or none when the body raises.

        Parameters
        ----------
        action
            The action, for error messages.
        is_durable
            Flush to the medium. If False, a power cut may undo the latest changes.

        Raises
        ------
        StoreError
            When the medium refuses.
        """
        with self._write_lock:
            try:
                connection = self._writable()
                level = "FULL" if is_durable else "NORMAL"
                connection.execute(f"PRAGMA synchronous = {level}")
                connection.execute("BEGIN IMMEDIATE")
            except (sqlite3.Error, OSError) as error:
                raise self._error(action, error) from error
            try:
                yield IndexWriter(connection)
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._error(action, error) from error
            finally:
                if connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file."""
        with self._write_lock, self._lock:
            for connection in (self._writer, self._reader):
                if connection is not None:
                    connection.close()
            self._writer = self._reader = None

    def __del__(self) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Hold the connection for reading; None if there is no file yet."""
        with self._lock:
            try:
                if self._stamp is not None and self._stamp != file_stamp(self.path):
                    assert self._reader is not None
                    self._reader.close()
                    self._reader = None
                if self._reader is None and self.path.is_file():
                    self._reader, self._stamp = connect(self.path)
                    self._check(self._reader)
                yield self._reader
            except (sqlite3.Error, OSError) as error:
                raise self._error("read", error) from error

    def _check(self, connection: sqlite3.Connection) -> None:
        # In one transaction: another process may be creating the tables.
        connection.execute("BEGIN")
        (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.execute("COMMIT")
        if (application, version) == (_APPLICATION_ID, SCHEMA_VERSION):
            return
        connection.close()
        self._reader = None
        # Another process is creating the file, or was killed while it did.
        if (application, version, num_tables) == (0, 0, 0):
            return
        raise StoreError(
            f"{self.path} is not this version's index of records: expected schema "
            f"{SCHEMA_VERSION}, found application {application:#x} schema {version}; use the "
            "kvrag that wrote it, or another folder"
        )

    def _writable(self) -> sqlite3.Connection:
        if self._writer is None:
            make_folder(self.path.parent)
            connection = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=30.0
            )
            try:
                self._make_tables(connection)
            except BaseException:
                connection.close()
                raise
            self._writer = connection
        return self._writer

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        for num_tries in range(_MAX_TRIES):
            try:
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.executescript(_SCHEMA)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or num_tries == _MAX_TRIES - 1:
                    raise
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                time.sleep(_WAIT_SECONDS)
            else:
                return

    def _error(self, action: str, error: Exception) -> StoreError:
        text = str(error)
        if "locked" in text:
            return StoreUnreachableError(
                f"cannot {action} {self.path}: another process has been writing for 30 seconds; "
                "try again when it has finished"
            )
        if "not a database" in text or "malformed" in text:
            remedy = "delete it and the segments beside it, then 'kvrag verify --repair'"
            return StoreError(f"{self.path} is damaged or foreign ({text}); {remedy}")
        refused = error if isinstance(error, OSError) else refusal_of(self.path.parent, text)
        return store_error(action, self.path, refused)


class IndexWriter:
    """One transaction on a `SegmentIndex`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def contains(self, key: ChunkKey) -> bool:
        """Return whether the index knows the record of `key`."""
        query = "SELECT 1 FROM records WHERE key = ?"
        return self._connection.execute(query, (_blob(key),)).fetchone() is not None

    def is_empty(self, segment: int) -> bool:
        """Return whether a segment holds no record."""
        query = "SELECT 1 FROM records WHERE segment = ? LIMIT 1"
        return self._connection.execute(query, (segment,)).fetchone() is None

    def next_segment(self) -> int:
        """Return a segment number that was never used before."""
        row = self._connection.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = 'segments'"
        ).fetchone()
        return 1 + (row[0] if row is not None else 0)

    def last_segment(self) -> tuple[int, int]:
        """Return number and end of the segment being filled; (0, 0) if there is none."""
        row = self._connection.execute(
            "SELECT number, end FROM segments ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return row if row is not None else (0, 0)

    def set(self, key: ChunkKey, place: Place) -> None:
        """Note where a record is, replacing its earlier place."""
        self._connection.execute(
            "INSERT INTO segments VALUES (?1, ?2) ON CONFLICT (number) DO UPDATE SET end = ?2",
            (place.segment, place.end),
        )
        self._connection.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
            (_blob(key), place.segment, place.offset, place.size_bytes),
        )

    def remove(self, key: ChunkKey) -> bool:
        """Forget a record; return whether there was one."""
        return bool(
            self._connection.execute("DELETE FROM records WHERE key = ?", (_blob(key),)).rowcount
        )

    def segments(self) -> list[tuple[int, int, int]]:
        """Return each segment's number, end and bytes still in use, in order."""
        return self._connection.execute(
            "SELECT number, end, (SELECT COALESCE(SUM(size), 0) FROM records "
            "WHERE segment = number) FROM segments ORDER BY number"
        ).fetchall()

    def places(self, segment: int) -> list[tuple[ChunkKey, Place]]:
        """Return the records in a segment, in order."""
        rows = self._connection.execute(
            "SELECT key, segment, offset, size FROM records WHERE segment = ? ORDER BY offset",
            (segment,),
        )
        return [(ChunkKey(key.hex()), Place(*place)) for key, *place in rows]

    def drop_segment(self, segment: int) -> None:
        """Forget a segment that holds no record."""
        self._connection.execute("DELETE FROM segments WHERE number = ?", (segment,))


def _blob(key: ChunkKey) -> bytes:
    return bytes.fromhex(key.digest)
