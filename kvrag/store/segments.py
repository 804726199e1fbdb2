"""Records that kvrag 0.2 packed into segments; they are read, and unpacked into a file each.

`docs/format.md` describes both files: ``records.sqlite`` says which record is where in
``segments/00000001.seg``. Nothing is packed any more.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError, StoreUnreachableError
from kvrag.regularfile import other_kind
from kvrag.sqlitefile import FileStamp, connect, file_stamp, is_damage
from kvrag.store.files import ABSENT, refusal_of, store_error

FILE_NAME = "records.sqlite"
FOLDER_NAME = "segments"

_APPLICATION_ID = 0x6B765253  # "kvRS"
_SCHEMA_VERSION = 1
_SEGMENT = re.compile(r"[0-9]{8,12}\.seg")
_PAGE = 10_000
# Which rows say where a record is. SQLite keeps any value in any column.
_IS_PLACE = (
    "(typeof(key) = 'blob' AND length(key) = 20 AND typeof(segment) = 'integer' "
    "AND typeof(offset) = 'integer' AND typeof(size) = 'integer' AND size BETWEEN 0 AND 1 << 48)"
)

logger = logging.getLogger("kvrag")


class Place(NamedTuple):
    """Where a record is."""

    path: Path
    offset: int
    size_bytes: int


class Segments:
    """The packed records of a store's folder. Safe to use from several threads and processes.

    A ``records.sqlite`` that cannot be read names no record: those are computed again.

    Parameters
    ----------
    folder
        The store's folder.

    Raises
    ------
    StoreError
        When a later version of kvrag wrote the file.
    """

    def __init__(self, folder: Path) -> None:
        self._index = folder / FILE_NAME
        self._files = folder / FOLDER_NAME
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._seen: tuple[int | None, FileStamp | None] = None, None
        self._is_damaged = False
        self._rows("SELECT 1 FROM records LIMIT 1")

    def find(self, key: ChunkKey) -> Place | None:
        """Return where the record of `key` is, or None if no sound row says it."""
        rows = self._rows(
            f"SELECT segment, offset, size FROM records WHERE key = ? AND {_IS_PLACE}",
            [bytes.fromhex(key.digest)],
        )
        for segment, offset, size_bytes in rows:
            return Place(self._files / f"{segment:08d}.seg", offset, size_bytes)
        return None

    def contains(self, key: ChunkKey) -> bool:
        """Return whether the record of `key` is in a segment's file."""
        place = self.find(key)
        if place is None:
            return False
        try:
            end = place.path.lstat().st_size
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise store_error("look for", place.path, error) from error
        return 0 <= place.offset <= place.offset + place.size_bytes <= end

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and sizes."""
        last = b""
        while rows := self._rows(
            f"SELECT key, size FROM records WHERE key > ? AND {_IS_PLACE} ORDER BY key LIMIT ?",
            [last, _PAGE],
        ):
            for key, size in rows:
                yield ChunkKey(key.hex()), size
            last = rows[-1][0]

    def forget(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one; `unpack` gives its room back."""
        row = [bytes.fromhex(key.digest)]
        return bool(self._rows("SELECT 1 FROM records WHERE key = ?", row)) and bool(
            self._rows("DELETE FROM records WHERE key = ? RETURNING 1", row, "delete from")
        )

    def unpack(self, write: Callable[[ChunkKey], None]) -> None:
        """Unpack all records, and remove the segments and ``records.sqlite``.

        Parameters
        ----------
        write
            Gives the record of a key its own file, durably.

        Raises
        ------
        StoreError
            When the medium refuses; no record is lost.
        """
        for number in [row[0] for row in self._rows("SELECT DISTINCT segment FROM records")]:
            # A writer of 0.2 waits meanwhile, as another process that unpacks does.
            with self._writing():
                rows = self._rows(
                    f"SELECT key FROM records WHERE segment = ? AND {_IS_PLACE}", [number]
                )
                for (key,) in rows:
                    write(ChunkKey(key.hex()))
                self._rows("DELETE FROM records WHERE segment = ?", [number])
        with self._lock:
            is_done = not self._rows("SELECT 1 FROM records LIMIT 1")
            self.close()
            if is_done:
                self._remove()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # -- private -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold SQLite's write transaction; what the block did not finish is undone."""
        with self._lock:
            self._rows("BEGIN IMMEDIATE", action="write")
            try:
                yield
                self._rows("COMMIT", action="write")
            finally:
                if self._connection is not None and self._connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")

    def _remove(self) -> None:
        """Remove files that name no record any more, or none that can be read."""
        logs = [self._index.with_name(FILE_NAME + end) for end in ("-wal", "-shm", "-journal")]
        segments = [one for one in self._files.glob("*.seg") if _SEGMENT.fullmatch(one.name)]
        for path in [self._index, *logs, *segments]:
            try:
                if path == self._index and self._is_damaged:
                    path.rename(path.with_name(f"{FILE_NAME}.damaged"))
                elif path.is_file():
                    path.unlink()
            except FileNotFoundError:  # it was removed already
                continue
            except OSError as error:
                raise store_error("remove", path, error) from error
        with contextlib.suppress(OSError):  # there is none, or other files are in it
            self._files.rmdir()

    def _rows(
        self, statement: str, values: Sequence[Any] = (), action: str = "read"
    ) -> list[tuple[Any, ...]]:
        """Return rows; none, and a note of the damage, if they cannot be read."""
        with self._lock:
            try:
                connection = self._open()
                return (
                    [] if connection is None else connection.execute(statement, values).fetchall()
                )
            except (sqlite3.Error, OSError) as error:
                text = str(error)
                if is_damage(error):
                    self._note(text)
                    return []
                if "locked" in text:
                    raise StoreUnreachableError(
                        f"cannot {action} {self._index}: another process has been writing for 30 "
                        "seconds; try again when it has finished"
                    ) from error
                refused = (
                    error if isinstance(error, OSError) else refusal_of(self._index.parent, text)
                )
                raise store_error(action, self._index, refused) from error

    def _open(self) -> sqlite3.Connection | None:
        """Return a connection to the file that is there now; None if there is none."""
        try:
            status = self._index.stat()
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            self.close()
            return None
        inode, stamp = self._seen
        if inode != status.st_ino or (stamp is not None and stamp != file_stamp(self._index)):
            self.close()
        if self._connection is None:
            if kind := other_kind(status.st_mode):
                raise sqlite3.DatabaseError(f"file is not a database but {kind}")
            connection, stamp = connect(self._index)
            try:
                self._check(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._seen = connection, (status.st_ino, stamp)
        return self._connection

    def _check(self, connection: sqlite3.Connection) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application == _APPLICATION_ID and version > _SCHEMA_VERSION:
            raise StoreError(
                f"{self._index} is not this version's index of records: expected schema "
                f"{_SCHEMA_VERSION}, found schema {version}; use the kvrag that wrote it, or "
                "another folder"
            )
        if (application, version) != (_APPLICATION_ID, _SCHEMA_VERSION):
            raise sqlite3.DatabaseError(
                f"file is not a database of records: application {application:#x} schema {version}"
            )

    def _note(self, text: str) -> None:
        if not self._is_damaged:
            self._is_damaged = True
            logger.warning(
                "%s is damaged (%s): the records that it named are computed again when they are "
                "needed, or by 'kvrag verify --repair'",
                self._index,
                text,
            )
