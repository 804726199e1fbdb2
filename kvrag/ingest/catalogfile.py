"""The catalog's file: its connection, its snapshots, and its replacement by another file."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

from kvrag.errors import IndexFormatError, StoreError
from kvrag.ingest import words
from kvrag.ingest.config import newer_error
from kvrag.ingest.connection import (
    FileStamp,
    catalog_error,
    check_encryption,
    connect,
    file_stamp,
    is_damage,
    is_lost,
    put_in_place,
)
from kvrag.ingest.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION, State, write_state
from kvrag.ingest.seals import Seals
from kvrag.regularfile import require_regular
from kvrag.sqlitefile import library, open_connection, unlock

_MAX_TRIES = 8  # of a read that another process's writes disturb

_T = TypeVar("_T", bound="CatalogFile")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """Hold the connection during a method, keep it up to date, and translate SQLite's errors."""

    @functools.wraps(method)
    def call(self: _T, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            try:
                self._reopen_if_changed()
                for _ in range(_MAX_TRIES):
                    try:
                        result = method(self, *args, **kwargs)
                    except (self._sql.Error, IndexFormatError):
                        # The read may have mixed old and new content.
                        if not self._reopen_if_changed():
                            raise
                    else:
                        if not self._reopen_if_changed():
                            return result
            except self._sql.Error as error:
                raise catalog_error(self.path, error) from error
            raise StoreError(f"{self.path} changes faster than it can be read; try again later")

    return cast("Callable[Concatenate[_T, _P], _R]", call)


class CatalogFile:
    """The part of `Catalog` that keeps its file open while other processes change it.

    Safe to use from several threads.

    Attributes
    ----------
    path
        The catalog's file.
    is_old
        Whether the rows have no seals yet.
    """

    def __init__(
        self, path: Path, *, seal_key: bytes = b"", cipher_key: bytes | None = None
    ) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._seals = Seals(seal_key)
        self._cipher_key = cipher_key
        self._sql = library(cipher_key)
        self._words = self._word_index()
        self._connection: sqlite3.Connection
        self._stamp: FileStamp | None
        self._inode: int | None
        try:
            if is_lost(path):
                raise IndexFormatError(
                    f"{path} is {'empty' if path.exists() else 'missing'}: the index in "
                    f"{path.parent} has lost the list of its documents; ingest all of them again "
                    f"with 'kvrag ingest PATH... --index {path.parent}', which finds their KV in "
                    "the store"
                )
            require_regular(path)
            try:
                self._connect()
                application = self._connection.execute("PRAGMA application_id").fetchone()[0]
                version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            except self._sql.Error:
                # Only now: closing the file ends all locks on it that this process has (POSIX).
                check_encryption(path, cipher_key is not None)
                raise
        except (self._sql.Error, OSError) as error:
            raise catalog_error(path, error) from error
        self.is_old = (application, version) == (APPLICATION_ID, 2)
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION) and not self.is_old:
            self._connection.close()
            if application == APPLICATION_ID and version > SCHEMA_VERSION:
                raise newer_error(path, f"at most schema {SCHEMA_VERSION}", version)
            raise IndexFormatError(
                f"{path} is not a catalog of this version of kvrag: expected schema "
                f"{SCHEMA_VERSION}, found application {application:#x} schema {version}; "
                "ingest into a new folder"
            )

    @classmethod
    def create(
        cls: type[_T], path: Path, *, seal_key: bytes = b"", cipher_key: bytes | None = None
    ) -> _T:
        """Create an empty catalog; replaces an unfinished one that a killed process left."""
        sql = library(cipher_key)
        try:
            for name in (*(path.name + end for end in ("", "-wal", "-shm")), words.FILE_NAME):
                path.with_name(name).unlink(missing_ok=True)
            connection = sql.connect(path, isolation_level=None)
            try:
                unlock(connection, cipher_key)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN;{SCHEMA}COMMIT;")
                write_state(connection, Seals(seal_key), State(0))
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                connection.close()
        except (sql.Error, OSError) as error:
            raise catalog_error(path, error) from error
        return cls(path, seal_key=seal_key, cipher_key=cipher_key)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._words.close()
            self._connection.close()
            self._stamp = None
            self._inode = None

    def _word_index(self) -> words.WordIndex:
        path = self.path.with_name(words.FILE_NAME)
        return words.WordIndex(path, self._seals, self._cipher_key)

    def seal(self, content: bytes) -> bytes:
        """Return a seal for content that is stored next to the catalog."""
        return self._seals.whole([content])

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is encrypted."""
        return self._cipher_key is not None

    def _reopen_if_changed(self) -> bool:
        """Reopen the file if this connection cannot see what other processes have written."""
        if self._connection.in_transaction:
            return False
        if self._stamp is None:
            # Another file is in its place: another process has encrypted it.
            with contextlib.suppress(OSError):
                if self._inode not in (None, self.path.stat().st_ino):
                    self._reopen()
                    return True
            return False
        if self._stamp == file_stamp(self.path):
            return False
        self._reopen()
        return True

    def _reopen(self) -> None:
        try:
            self._connect()
        except OSError as error:
            raise catalog_error(self.path, error) from error
        except self._sql.DatabaseError as error:
            if not is_damage(error):
                raise
            raise IndexFormatError(
                f"{self.path} was replaced by another file while it was open (encrypted, perhaps, "
                "or moved to another key); open the index again"
            ) from error

    def _connect(self) -> None:
        """Open the file; close the previous connection only then, so that a failure can retry."""
        inode = self.path.stat().st_ino
        former = getattr(self, "_connection", None)
        self._connection, self._stamp = connect(self.path, self._cipher_key)
        self._inode = inode
        if former is not None:
            former.close()

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Run several reads on one generation, while other processes may write."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            # Nothing was written; damage found on the way is recorded already.
            with contextlib.suppress(self._sql.Error):
                self._connection.execute("ROLLBACK")

    def write_copy(self, path: Path, cipher_key: bytes | None) -> None:
        """Write the whole catalog into a new file, under another key or none.

        Raises
        ------
        ParameterError
            When SQLCipher is not installed.
        StoreError
            When the folder refuses the write.
        """
        sql = library(cipher_key or self._cipher_key)
        path.unlink(missing_ok=True)
        with self._lock:
            try:
                connection = open_connection(self.path, sql=sql, isolation_level=None)
                try:
                    unlock(connection, self._cipher_key)
                    key = "" if cipher_key is None else f"x'{cipher_key.hex()}'"
                    connection.execute("ATTACH DATABASE ? AS fresh KEY ?", (str(path), key))
                    connection.execute("SELECT sqlcipher_export('fresh')").fetchall()
                    connection.execute(f"PRAGMA fresh.application_id = {APPLICATION_ID}")
                    connection.execute(f"PRAGMA fresh.user_version = {SCHEMA_VERSION}")
                    connection.execute("PRAGMA fresh.journal_mode = WAL")
                finally:
                    connection.close()
            except sql.Error as error:
                raise catalog_error(path, error) from error

    def write_snapshot(self, path: Path) -> None:
        """Write the whole catalog into a new file, under the same key.

        Raises
        ------
        StoreError
            When the folder refuses the write.
        IndexFormatError
            When the catalog is damaged.
        """
        if self._cipher_key is not None:
            self.write_copy(path, self._cipher_key)
            return
        with self._lock:
            try:
                self._connection.execute("VACUUM INTO ?", (str(path),))
                with contextlib.closing(open_connection(path, isolation_level=None)) as copy:
                    copy.execute("PRAGMA journal_mode = WAL")
            except self._sql.Error as error:
                raise catalog_error(path, error) from error

    def replace_file(self) -> None:
        """Continue with the file at `next_path`, which has the same key."""
        self.use_next(self._cipher_key)

    def use_next(self, cipher_key: bytes | None) -> None:
        """Continue with the file at `next_path`, whose key may be another, the same, or none."""
        with self._lock:
            with contextlib.suppress(self._sql.DatabaseError):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()
            self._words.discard()  # first: no text of an encrypted catalog may stay readable
            put_in_place(self.path)
            self._cipher_key = cipher_key
            self._sql = library(cipher_key)
            self._words = self._word_index()
            try:
                self._connect()
            except (self._sql.Error, OSError) as error:
                raise catalog_error(self.path, error) from error
