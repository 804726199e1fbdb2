"""The catalog's file: its connection, its rows and transactions, and its replacement."""

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
from kvrag.ingest import schema as s
from kvrag.ingest.config import WORDS_NAME, newer_error
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

_BATCH = 500  # below SQLite's limit on the parameters of a statement
_MAX_TRIES = 8  # of a read that another process's writes disturb
_PAGE_BYTES = 4096
_PLAIN = b"SQLite format 3\0"
# What is no UTF-8 becomes other text, and the row's checksum tells it.
_TEXT = functools.partial(str, encoding="utf-8", errors="replace")

_T = TypeVar("_T")
_F = TypeVar("_F", bound="CatalogFile")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """Hold the connection during a method, keep it up to date, and translate SQLite's errors.

    The method is that of a `CatalogFile`, or of what has one as its `_catalog`; a function of one
    is as good.
    """

    @functools.wraps(method)
    def call(self: _T, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        file: CatalogFile = self if isinstance(self, CatalogFile) else self._catalog  # type: ignore[attr-defined]
        with file._lock:
            try:
                file._reopen_if_changed()
                for _ in range(_MAX_TRIES):
                    try:
                        result = method(self, *args, **kwargs)
                    except (file._sql.Error, IndexFormatError):
                        # The read may have mixed old and new content.
                        if not file._reopen_if_changed():
                            raise
                    else:
                        if not file._reopen_if_changed():
                            return result
            except (file._sql.Error, OSError) as error:
                raise catalog_error(file.path, error) from error
            raise StoreError(f"{file.path} changes faster than it can be read; try again later")

    return cast("Callable[Concatenate[_T, _P], _R]", call)


class CatalogFile:
    """A catalog's file, kept open while other processes change it, and its rows.

    Safe to use from several threads by functions that are `checked`.

    Attributes
    ----------
    path
        The catalog's file.
    checksums, checksum_key
        What makes the rows' checksums, and what these begin with.
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
        self.checksums = s.Checksums(checksum_key)
        self.checksum_key = checksum_key
        self.cipher_key = cipher_key
        self._sql = library(cipher_key)
        self.on_damage: Callable[[str], None] = lambda _: None
        self.num_noted = 0
        self._state_now: s.State | None = None  # while a transaction is open
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
        if (application, version) != (s.APPLICATION_ID, s.SCHEMA_VERSION):
            self._connection.close()
            if application == s.APPLICATION_ID and version > s.SCHEMA_VERSION:
                raise newer_error(path, f"at most schema {s.SCHEMA_VERSION}", version)
            raise IndexFormatError(
                f"{path} is not a catalog of this version of kvrag: expected schema "
                f"{s.SCHEMA_VERSION}, found application {application:#x} schema {version}; "
                "ingest into a new folder"
            )

    @classmethod
    def create(
        cls: type[_F],
        path: Path,
        *,
        checksum_key: bytes = b"",
        cipher_key: bytes | None = None,
        generation: int = 0,
    ) -> _F:
        """Create an empty catalog; replaces an unfinished one that a killed process left."""
        sql = library(cipher_key)
        try:
            for name in (*(path.name + end for end in ("", "-wal", "-shm")), WORDS_NAME):
                path.with_name(name).unlink(missing_ok=True)
            connection = sql.connect(path, isolation_level=None)
            try:
                unlock(connection, cipher_key)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN;{s.SCHEMA}COMMIT;")
                s.State(generation).write(connection, s.Checksums(checksum_key))
                connection.execute(f"PRAGMA application_id = {s.APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {s.SCHEMA_VERSION}")
            finally:
                connection.close()
        except (sql.Error, OSError) as error:
            raise catalog_error(path, error) from error
        return cls(path, checksum_key=checksum_key, cipher_key=cipher_key)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
            self._stamp = None
            self._inode = None

    @checked
    def version(self) -> tuple[int, bytes]:
        """Return how many transactions have changed the catalog, and a digest of the documents'
        contents; -1 and nothing if that row is damaged.
        """
        state = self.state()
        return (s.NO_GENERATION, b"") if state is None else state.version

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
        self._connection.text_factory = _TEXT
        self._inode = inode
        if former is not None:
            former.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
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
                with self.snapshot():
                    yield
            except self._sql.Error as error:
                raise catalog_error(self.path, error) from error
            finally:
                self.on_damage = noted

    @contextmanager
    def _transaction(self) -> Iterator[s.State]:
        """Write everything or nothing; the state is updated in the same transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            # The new generation must be one that no reader has seen.
            self._state_now = self.state() or counted_state(self, time.time_ns())
            yield self._state_now
            self._state_now.generation += 1
            self._state_now.write(self._connection, self.checksums)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._state_now = None

    def state(self) -> s.State | None:
        """Return the state, or None if its row is damaged or missing."""
        rows = self.rows(f"SELECT {s.STATE_COLUMNS} FROM state")
        is_sound = len(rows) == 1 and self.checksums.is_right("state", rows[0])
        return s.State.of_row(rows[0]) if is_sound else None

    def note(self, what: str) -> None:
        """Count damage, and report it."""
        self.num_noted += 1
        self.on_damage(f"{self.path}: {what}")

    def rows(
        self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Return rows; none, and a note of the damage, if they cannot be read."""
        try:
            return self._connection.execute(statement, values).fetchall()
        except self._sql.DatabaseError as error:
            self._note_error(error)
            return []

    def select_in(
        self, columns: str, column: str, values: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the readable chunk rows that have one of some values in a column."""
        for begin in range(0, len(values), _BATCH):
            batch = values[begin : begin + _BATCH]
            marks = ",".join("?" * len(batch))
            statement = f"SELECT {columns} FROM chunks WHERE {column} IN "
            try:
                yield from self._connection.execute(f"{statement}({marks})", batch).fetchall()
            except self._sql.DatabaseError as error:
                self._note_error(error)
                for value in batch:
                    yield from self.rows(f"{statement}(?)", (value,))

    def scan(self, columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield all readable chunk rows, in order; `columns` begin with row."""
        last = -1
        try:
            for values in self._connection.execute(f"SELECT {columns} FROM chunks ORDER BY row"):
                last = values[0]
                yield values
        except self._sql.DatabaseError as error:
            self._note_error(error)
            yield from self.select_in(columns, "row", self._rows_behind(last))

    def _rows_behind(self, last: int) -> Sequence[int]:
        """Return the row numbers after the one at which reading the table in order failed."""
        found = self.rows(
            "SELECT row FROM chunks INDEXED BY chunks_by_source WHERE row > ? ORDER BY row", (last,)
        )
        if found:
            return [row for (row,) in found]
        highest = self.rows("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'")
        number = highest[0][0] if highest and isinstance(highest[0][0], int) else 0
        return range(last + 1, min(number, last + 10_000_000) + 1)

    def readable(self, statement: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a statement up to the first unreadable one."""
        try:
            yield from self._connection.execute(statement)
        except self._sql.DatabaseError as error:
            self._note_error(error)

    def _note_error(self, error: sqlite3.DatabaseError) -> None:
        """Note an error caused by damage and make the connection usable again; raise others.

        After a page fails authentication, SQLCipher refuses all others.
        """
        if not is_damage(error):
            raise error
        self.note(str(error))
        if self.cipher_key is not None and self._state_now is None:
            self._connect()

    def use_next(self, cipher_key: bytes | None) -> None:
        """Continue with the file at `next_path`, whose key may be another, the same, or none."""
        with self._lock:
            with contextlib.suppress(self._sql.DatabaseError):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()
            put_in_place(self.path)
            self.cipher_key = cipher_key
            self._sql = library(cipher_key)
            try:
                self._connect()
            except (self._sql.Error, OSError) as error:
                raise catalog_error(self.path, error) from error


@checked
def write_through(catalog: CatalogFile) -> None:
    """Write what the log beside the file holds into the file, which is then whole without it.

    Closing does so too, but says nothing when the disk is full.
    """
    catalog._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@checked
def damage_of(catalog: CatalogFile) -> list[str]:
    """Return the problems that SQLite's own check finds in the file; empty if it is sound."""
    try:
        there = {name for (name,) in catalog._connection.execute("SELECT name FROM sqlite_master")}
        if missing := [name for name in s.NAMES if name not in there]:
            return [f"it has no {name}" for name in missing]
        for statement in s.NO_ROWS:
            catalog._connection.execute(statement)
        rows = catalog._connection.execute("PRAGMA integrity_check(10)").fetchall()
    except catalog._sql.DatabaseError as error:  # too damaged for the check itself
        catalog._note_error(error)
        return [str(error)]
    return [str(text) for (text,) in rows if text != "ok"]


def counted_state(catalog: CatalogFile, generation: int) -> s.State:
    """Return the state computed from the existing rows."""
    state = s.State(generation)
    for (checksum,) in catalog.rows("SELECT seal FROM documents"):
        state.count_document(checksum, 1)
    for (checksum,) in catalog.rows("SELECT seal FROM files"):
        state.count_file(checksum, 1)
    return state


def write_copy(catalog: CatalogFile, path: Path, cipher_key: bytes | None) -> None:
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
    sql = library(cipher_key or catalog.cipher_key)
    path.unlink(missing_ok=True)
    with catalog._lock:
        try:
            if sql is sqlite3:
                catalog._connection.execute("VACUUM INTO ?", (str(path),))
                with contextlib.closing(open_connection(path, isolation_level=None)) as copy:
                    copy.execute("PRAGMA journal_mode = WAL")
                return
            connection = open_connection(catalog.path, sql=sql, isolation_level=None)
            try:
                unlock(connection, catalog.cipher_key)
                key = "" if cipher_key is None else f"x'{cipher_key.hex()}'"
                connection.execute("ATTACH DATABASE ? AS fresh KEY ?", (str(path), key))
                connection.execute("SELECT sqlcipher_export('fresh')").fetchall()
                connection.execute(f"PRAGMA fresh.application_id = {s.APPLICATION_ID}")
                connection.execute(f"PRAGMA fresh.user_version = {s.SCHEMA_VERSION}")
                connection.execute("PRAGMA fresh.journal_mode = WAL")
            finally:
                connection.close()
        except sql.Error as error:
            raise catalog_error(path, error) from error


def catalog_error(path: Path, error: Exception) -> StoreError | IndexFormatError:
    """Return the kvrag error that an error of SQLite or of the system amounts to."""
    text = getattr(error, "strerror", None) or str(error)  # the path may say anything
    if is_damage(error):
        return IndexFormatError(
            f"{path} is damaged, encrypted with another key, or not a catalog ({text}): put the "
            "right file there, or run 'kvrag verify --repair', and ingest again what it cannot mend"
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
