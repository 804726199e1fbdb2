"""The catalog's file: its connection, its transactions, and its replacement by another file."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from kvrag.errors import IndexFormatError, IndexMismatchError, StoreError
from kvrag.ingest import words
from kvrag.ingest.config import newer_error
from kvrag.ingest.schema import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    STATE_COLUMNS,
    Checksums,
    State,
)
from kvrag.regularfile import open_regular, require_regular
from kvrag.sqlitefile import (
    FileStamp,
    connect,
    file_stamp,
    is_damage,
    library,
    open_connection,
    unlock,
)

_MAX_TRIES = 8  # of a read that another process's writes disturb
_PAGE_BYTES = 4096
_PLAIN = b"SQLite format 3\0"

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
    cipher_key
        The key that encrypts it; None if it is not encrypted.
    on_damage
        Called for every row that is left out because it is damaged.
    num_noted
        Number of those calls.
    """

    def __init__(
        self, path: Path, *, checksum_key: bytes = b"", cipher_key: bytes | None = None
    ) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._checksums = Checksums(checksum_key)
        self._checksum_key = checksum_key
        self.cipher_key = cipher_key
        self._sql = library(cipher_key)
        self._words = self._word_index()
        self.on_damage: Callable[[str], None] = lambda _: None
        self.num_noted = 0
        self._state_now: State | None = None  # while a transaction is open
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
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
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
        cls: type[_T],
        path: Path,
        *,
        checksum_key: bytes = b"",
        cipher_key: bytes | None = None,
        generation: int = 0,
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
                State(generation).write(connection, Checksums(checksum_key))
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                connection.close()
        except (sql.Error, OSError) as error:
            raise catalog_error(path, error) from error
        return cls(path, checksum_key=checksum_key, cipher_key=cipher_key)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._words.close()
            self._connection.close()
            self._stamp = None
            self._inode = None

    @checked
    def write_through(self) -> None:
        """Write what the log beside the file holds into the file, which is then whole without it.

        Closing does so too, but says nothing when the disk is full.
        """
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _word_index(self) -> words.WordIndex:
        path = self.path.with_name(words.FILE_NAME)
        return words.WordIndex(path, self._checksums, self.cipher_key)

    def checksum(self, content: bytes) -> bytes:
        """Return the checksum of content that is stored next to the catalog."""
        return self._checksums.whole([content])

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
        self._connection, self._stamp = connect(self.path, self.cipher_key)
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

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make several calls read one generation; damage on the way is not noted."""
        with self._lock:
            noted, self.on_damage = self.on_damage, lambda _: None
            try:
                with self._snapshot():
                    yield
            except self._sql.Error as error:
                raise catalog_error(self.path, error) from error
            finally:
                self.on_damage = noted

    @contextmanager
    def _transaction(self) -> Iterator[State]:
        """Write everything or nothing; the state is updated in the same transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            # The new generation must be one that no reader has seen.
            self._state_now = self._state() or self._counted(time.time_ns())
            yield self._state_now
            self._state_now.generation += 1
            self._state_now.write(self._connection, self._checksums)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._state_now = None

    def _state(self) -> State | None:
        """Return the state, or None if its row is damaged or missing."""
        rows = self._rows(f"SELECT {STATE_COLUMNS} FROM state")
        is_sound = len(rows) == 1 and self._checksums.is_right("state", rows[0])
        return State.of_row(rows[0]) if is_sound else None

    def _counted(self, generation: int) -> State:
        """Return the state computed from the existing rows."""
        state = State(generation)
        for (checksum,) in self._rows("SELECT seal FROM documents"):
            state.count_document(checksum, 1)
        for (checksum,) in self._rows("SELECT seal FROM files"):
            state.count_file(checksum, 1)
        return state

    def _note(self, what: str) -> None:
        self.num_noted += 1
        self.on_damage(f"{self.path}: {what}")

    def _rows(
        self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Return rows; none, and a note of the damage, if they cannot be read."""
        try:
            return self._connection.execute(statement, values).fetchall()
        except self._sql.DatabaseError as error:
            if self._go_on(error):
                return self._rows(statement, values)
            return []

    def _go_on(self, error: sqlite3.DatabaseError) -> bool:
        """Note an error caused by damage and make the connection usable again; raise others.

        After a page fails authentication, SQLCipher refuses all others. Invalid UTF-8 is decoded
        to other text from now on, and the checksum reveals it: True means that the caller tries
        again.
        """
        if not is_damage(error):
            raise error
        if "Could not decode" in str(error) and self._connection.text_factory is str:
            self._connection.text_factory = _decoded
            return True
        self._note(str(error))
        if self.cipher_key is not None and self._state_now is None:
            self._connect()
        return False

    def write_copy(self, path: Path, cipher_key: bytes | None) -> None:
        """Write the whole catalog into a new file, under a key or none.

        Raises
        ------
        ParameterError
            When SQLCipher is not installed.
        StoreError
            When the folder refuses the write.
        IndexFormatError
            When the catalog is damaged.
        """
        sql = library(cipher_key or self.cipher_key)
        path.unlink(missing_ok=True)
        with self._lock:
            try:
                if sql is sqlite3:
                    self._connection.execute("VACUUM INTO ?", (str(path),))
                    with contextlib.closing(open_connection(path, isolation_level=None)) as copy:
                        copy.execute("PRAGMA journal_mode = WAL")
                    return
                connection = open_connection(self.path, sql=sql, isolation_level=None)
                try:
                    unlock(connection, self.cipher_key)
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

    def make_empty(self: _T, path: Path) -> _T:
        """Return a new catalog with the keys of this one, and the generation after its own."""
        state = self._state()
        return self.create(
            path,
            checksum_key=self._checksum_key,
            cipher_key=self.cipher_key,
            generation=time.time_ns() if state is None else state.generation,
        )

    def use_next(self, cipher_key: bytes | None) -> None:
        """Continue with the file at `next_path`, whose key may be another, the same, or none."""
        with self._lock:
            with contextlib.suppress(self._sql.DatabaseError):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()
            self._words.discard()  # first: no text of an encrypted catalog may stay readable
            put_in_place(self.path)
            self.cipher_key = cipher_key
            self._sql = library(cipher_key)
            self._words = self._word_index()
            try:
                self._connect()
            except (self._sql.Error, OSError) as error:
                raise catalog_error(self.path, error) from error


def catalog_error(path: Path, error: Exception) -> StoreError | IndexFormatError:
    """Return the kvrag error that an error of SQLite or of the system amounts to."""
    text = getattr(error, "strerror", None) or str(error)  # the path may say anything
    if is_damage(error):
        return IndexFormatError(
            f"{path} is damaged or not a catalog ({text}); run 'kvrag verify --repair', and ingest "
            "again what it cannot mend"
        )
    if "full" in text:
        text += "; free some space and ingest again, nothing committed so far is lost"
    elif "readonly" in text or "unable to open" in text:
        text += "; change the folder's permissions, or use another folder"
    return StoreError(f"cannot use {path}: {text}")


def is_lost(path: Path) -> bool:
    """Return whether there is no catalog, or an empty file in its place."""
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def check_encryption(path: Path, is_expected: bool) -> None:
    """Raise IndexMismatchError if a catalog is encrypted and should not be, or the reverse.

    A damaged catalog may pass: without a key, encrypted bytes are known by their randomness alone.
    """
    with open_regular(path) as file:
        page = file.read(_PAGE_BYTES)
    if is_expected and page.startswith(_PLAIN):
        found, expected = "is not encrypted", "is"
    elif not is_expected and not page.startswith(_PLAIN) and _is_random(page):
        found, expected = "is encrypted", "is not"
    else:
        return
    raise IndexMismatchError(
        f"{path} {found}, and index.json beside it says that the index {expected}: one of the two "
        "files is from another index. Put back the right one; if the catalog is lost, move this "
        "one away and ingest all documents again. Nothing was changed"
    )


def _is_random(page: bytes) -> bool:
    """Return whether each byte value is about as frequent as any other."""
    return len(page) == _PAGE_BYTES and max(Counter(page).values()) < 4 * _PAGE_BYTES // 256


def next_path(path: Path) -> Path:
    """Return the path of a rewritten catalog before it is put in place."""
    return path.with_name(f"{path.name}.next")


def put_in_place(path: Path) -> None:
    """Replace the catalog by the rewritten one.

    The old log must never be next to the new file, so it is removed first. Meanwhile the new
    file's name says that it is the valid one: after a crash, `finish_placing` does the rest.
    """
    with contextlib.suppress(FileNotFoundError):
        next_path(path).replace(ready_path(path))
    finish_placing(path)


def ready_path(path: Path) -> Path:
    """Return the path of a rewritten catalog that is valid but not in place yet."""
    return path.with_name(f"{path.name}.ready")


def finish_placing(path: Path) -> None:
    """Do what is left of `put_in_place`; the caller holds the writer's lock."""
    if ready_path(path).is_file():
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        ready_path(path).replace(path)


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")
