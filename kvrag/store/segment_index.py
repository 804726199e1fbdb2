"""The index of segments, ``records.sqlite``: which record is where."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError, StoreUnreachableError
from kvrag.regularfile import other_kind
from kvrag.sqlitefile import FileStamp, connect, file_stamp, is_damage, open_connection
from kvrag.store.files import ABSENT, make_folder, refusal_of, store_error
from kvrag.store.segment_writer import ENDS, IS_PLACE, IndexWriter, blob
from kvrag.store.segments import Place

FILE_NAME = "records.sqlite"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x6B765253  # "kvRS"

logger = logging.getLogger("kvrag")

_TABLES = """
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
"""
_SCHEMA = f"""
BEGIN IMMEDIATE;
{_TABLES}
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_NUM_TABLES = (
    "SELECT COUNT(*), COALESCE(SUM(name IN ('segments', 'records', 'records_by_segment')), 0) "
    "FROM sqlite_master"
)
_PAGE = 10_000
# Retries when another process is creating the file: SQLite then does not wait by itself.
_MAX_TRIES = 100
_WAIT_SECONDS = 0.05


class DamagedIndexError(StoreError):
    """The index of segments cannot be written as it is; `SegmentIndex.begin_again` helps."""


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
        self._write_lock = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        self._stamp: FileStamp | None = None
        self._inode: int | None = None
        self._writer: sqlite3.Connection | None = None
        self._writer_inode: int | None = None
        self._damaged = ""
        with self._reading():
            pass

    def find(self, key: ChunkKey) -> Place | None:
        """Return the place of the record of `key`, or None if no sound row names one."""
        rows = self._rows(
            f"SELECT segment, offset, size FROM records WHERE key = ? AND {IS_PLACE}",
            (blob(key),),
        )
        return Place(*rows[0]) if rows else None

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and sizes; a long listing never delays readers or writers."""
        last = b""
        while rows := self._rows(
            f"SELECT key, size FROM records WHERE key > ? AND {IS_PLACE} ORDER BY key LIMIT ?",
            (last, _PAGE),
        ):
            for key, size in rows:
                yield ChunkKey(key.hex()), size
            last = rows[-1][0]

    def size_bytes(self) -> int:
        """Return the total size of all records, in bytes."""
        rows = self._rows(f"SELECT TOTAL(size) FROM records WHERE {IS_PLACE}")
        return int(rows[0][0]) if rows else 0

    def damage(self) -> list[str]:
        """Return what is wrong with the file; records that it does not name are only missing.

        Raises
        ------
        StoreError
            When the medium refuses.
        """
        with self._reading() as connection:
            if connection is None:
                return [self._damaged] if self._damaged else []
            try:
                found = [
                    f"{self.path}: {text}"
                    for (text,) in connection.execute("PRAGMA integrity_check(10)")
                    if text != "ok"
                ]
                (num_bad,) = connection.execute(
                    f"SELECT COUNT(*) FROM records WHERE {IS_PLACE} IS NOT 1"
                ).fetchone()
                connection.execute("SELECT number, end FROM segments LIMIT 1").fetchall()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                return [self._note(error)]
        if num_bad:
            found.append(f"{self.path}: {num_bad:,} rows of its table of records name no place")
        return found

    def ends(self) -> list[tuple[int, int | None, int | None]]:
        """Return each segment's number, its noted end, and where its last record ends."""
        return self._rows(ENDS)

    def begin_again(self) -> None:
        """Set the file aside as ``records.sqlite.damaged``, for an empty one to take its place.

        Raises
        ------
        StoreError
            When the folder refuses.
        """
        with self._write_lock, self._lock:
            seen = {self._inode, self._writer_inode}
            self._close()
            folder = self.path.parent
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    # Otherwise another process has begun again already.
                    if _inode_of(self.path) in seen:
                        for end in ("-wal", "-shm", ""):
                            with contextlib.suppress(FileNotFoundError):
                                damaged = folder / f"{FILE_NAME}.damaged{end}"
                                self.path.with_name(FILE_NAME + end).replace(damaged)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise store_error("set aside", self.path, error) from error
            self._damaged = ""

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
            connection = self._begin(action, is_durable)
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
            self._close()

    def __del__(self) -> None:
        self.close()

    def _close(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                connection.close()
        self._writer = self._reader = None

    def _begin(self, action: str, is_durable: bool) -> sqlite3.Connection:
        """Begin a transaction in the file, or in an empty one in place of a damaged one."""
        level = "FULL" if is_durable else "NORMAL"
        for _ in range(_MAX_TRIES):
            try:
                connection = self._writable()
                connection.execute(f"PRAGMA synchronous = {level}")
                connection.execute("BEGIN IMMEDIATE")
                if self._writer_inode == _inode_of(self.path):
                    return connection
                # Another process has begun again meanwhile.
                connection.execute("ROLLBACK")
            except (sqlite3.Error, OSError) as error:
                if not is_damage(error):
                    raise self._error(action, error) from error
                self._note(error)
                self.begin_again()
        raise StoreError(f"{self.path} changes faster than it can be written; try again later")

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return rows; none, and a note of the damage, if they cannot be read."""
        with self._reading() as connection:
            if connection is None:
                return []
            try:
                return connection.execute(statement, values).fetchall()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._note(error)
                return []

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Hold the connection for reading; None if there is no file yet, or no readable one."""
        with self._lock:
            try:
                try:
                    connection = self._readable()
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    self._note(error)
                    connection = None
                yield connection
            except (sqlite3.Error, OSError) as error:
                raise self._error("read", error) from error

    def _readable(self) -> sqlite3.Connection | None:
        inode = _inode_of(self.path)
        is_old = self._stamp is not None and self._stamp != file_stamp(self.path)
        if self._reader is not None and (is_old or inode != self._inode):
            self._reader.close()
            self._reader = None
        if self._reader is None and inode is not None:
            self._inode = inode
            if kind := other_kind(self.path.stat().st_mode):
                raise sqlite3.DatabaseError(f"file is not a database but {kind}")
            self._reader, self._stamp = connect(self.path)
            try:
                self._check(self._reader)
            except sqlite3.Error:
                if self._reader is not None:
                    self._reader.close()
                    self._reader = None
                raise
        return self._reader

    def _note(self, error: Exception) -> str:
        """Return what damage an error reports, and log it once."""
        found = f"{self.path} is damaged ({error})"
        if not self._damaged:
            logger.warning(
                "%s: the records that it named are computed again until 'kvrag verify --repair' or "
                "'kvrag ingest' repairs it",
                found,
            )
        self._damaged = found
        return found

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
        self._refuse(application, version)
        raise sqlite3.DatabaseError(
            f"file is not a database of records: application {application:#x} schema {version}"
        )

    def _refuse(self, application: int, version: int) -> None:
        """Raise StoreError if a later version of kvrag wrote the file."""
        if application == _APPLICATION_ID and version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} is not this version's index of records: expected schema "
                f"{SCHEMA_VERSION}, found schema {version}; use the kvrag that wrote it, or "
                "another folder"
            )

    def _writable(self) -> sqlite3.Connection:
        if self._writer is not None and self._writer_inode != _inode_of(self.path):
            self._writer.close()
            self._writer = None
        if self._writer is None:
            make_folder(self.path.parent)
            self._writer_inode = _inode_of(self.path)
            if self._writer_inode is not None and (kind := other_kind(self.path.stat().st_mode)):
                raise sqlite3.DatabaseError(f"file is not a database but {kind}")
            connection = open_connection(
                self.path, isolation_level=None, check_same_thread=False, timeout=30.0
            )
            try:
                self._make_tables(connection)
            except BaseException:
                connection.close()
                raise
            self._writer = connection
            self._writer_inode = self._writer_inode or _inode_of(self.path)
        return self._writer

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        for num_tries in range(_MAX_TRIES):
            try:
                application = connection.execute("PRAGMA application_id").fetchone()[0]
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                num_all, num_ours = connection.execute(_NUM_TABLES).fetchone()
                self._refuse(application, version)
                if num_all and not num_ours:
                    raise sqlite3.DatabaseError("file is not a database of records")
                if (application, version, num_ours) != (_APPLICATION_ID, SCHEMA_VERSION, 3):
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
        if is_damage(error):
            return DamagedIndexError(f"{self._note(error)}; run 'kvrag verify --repair'")
        refused = error if isinstance(error, OSError) else refusal_of(self.path.parent, text)
        return store_error(action, self.path, refused)


def _inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
