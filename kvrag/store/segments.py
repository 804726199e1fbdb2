"""Records that kvrag 0.2 packed into segments: each gets a file, once.

`docs/format.md` describes both files: ``records.sqlite`` says which record is where in
``segments/00000001.seg``. Nothing is packed any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreUnreachableError
from kvrag.sqlitefile import connect, is_damage
from kvrag.store.files import ABSENT, check_writable, open_to_read, refusal_of, store_error

FILE_NAME = "records.sqlite"
FOLDER_NAME = "segments"

_APPLICATION_ID = 0x6B765253  # "kvRS"
_SEGMENT = re.compile(r"[0-9]{8,12}\.seg")
# Which rows say where a record is. SQLite keeps any value in any column.
_IS_PLACE = (
    "(typeof(key) = 'blob' AND length(key) = 20 AND typeof(segment) = 'integer' "
    "AND typeof(offset) = 'integer' AND typeof(size) = 'integer' AND size BETWEEN 0 AND 1 << 48)"
)

logger = logging.getLogger("kvrag")


def unpack(
    folder: Path, has: Callable[[ChunkKey], bool], write: Callable[[ChunkKey, bytes], None]
) -> None:
    """Give each packed record of a store's folder its own file, and remove the segments.

    What cannot be read is passed over: it is computed again when it is needed. A process that is
    killed meanwhile leaves the rest for the next one.

    Parameters
    ----------
    folder
        The store's folder.
    has, write
        Say whether a record has its own file, and write it durably.

    Raises
    ------
    StoreError
        When the medium refuses; no record is lost.
    """
    index = folder / FILE_NAME
    if _kind(index) is None:
        return
    check_writable(folder)
    logger.warning("%s: records of kvrag 0.2 get a file each, once; many take minutes", folder)
    with _alone(folder):
        if (mode := _kind(index)) is not None:  # no other process has done it meanwhile
            _unpack_all(folder, index, has, write, is_file=stat.S_ISREG(mode))


def remove_unnamed(folder: Path) -> None:
    """Remove segments whose list was lost or set aside. Raises StoreError."""
    if _kind(folder / FILE_NAME) is None:
        for path in (folder / FOLDER_NAME).glob("*.seg"):
            if _SEGMENT.fullmatch(path.name) and path.is_file():
                _remove(path, Path.unlink)
        with contextlib.suppress(OSError):  # there is none, or other files are in it
            (folder / FOLDER_NAME).rmdir()


def _kind(index: Path) -> int | None:
    """Return the mode of `records.sqlite`; None if there is none. Raises StoreError."""
    try:
        return index.lstat().st_mode
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise store_error("read", index, error) from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process or thread unpacks a folder, however long it takes."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _unpack_all(
    folder: Path,
    index: Path,
    has: Callable[[ChunkKey], bool],
    write: Callable[[ChunkKey, bytes], None],
    *,
    is_file: bool,
) -> None:
    is_damaged = False
    try:
        if not is_file:
            raise sqlite3.DatabaseError("file is not a database")
        with closing(connect(index)[0]) as connection:
            connection.execute("PRAGMA foreign_keys = OFF")  # its other table may be damaged
            ((application,),) = connection.execute("PRAGMA application_id")
            if application != _APPLICATION_ID:
                raise sqlite3.DatabaseError("file is not a database of records")
            query = "SELECT DISTINCT segment FROM records WHERE typeof(segment) = 'integer'"
            for (number,) in connection.execute(query).fetchall():
                _unpack(connection, folder / FOLDER_NAME / f"{number:08d}.seg", number, has, write)
    except (sqlite3.Error, OSError) as error:
        if "locked" in str(error):
            raise StoreUnreachableError(
                f"cannot unpack {index}: another process has been writing for 30 seconds; try "
                "again when it has finished"
            ) from error
        if not is_damage(error):
            refused = error if isinstance(error, OSError) else refusal_of(folder, str(error))
            raise store_error("unpack", index, refused) from error
        logger.warning(
            "%s is damaged (%s): the records that it named are computed again when they are "
            "needed, or by 'kvrag verify --repair'",
            index,
            error,
        )
        is_damaged = True
        _remove(index, lambda path: path.rename(path.with_name(f"{FILE_NAME}.damaged")))
    for end in ("", "-wal", "-shm", "-journal"):
        _remove(index.with_name(FILE_NAME + end), Path.unlink)
    if not is_damaged:  # else they stay until garbage is collected
        remove_unnamed(folder)


def _unpack(
    connection: sqlite3.Connection,
    segment: Path,
    number: int,
    has: Callable[[ChunkKey], bool],
    write: Callable[[ChunkKey, bytes], None],
) -> None:
    """Unpack a segment, and remove it. A writer of 0.2 waits meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    rows = connection.execute(
        f"SELECT key, offset, size FROM records WHERE segment = ? AND {_IS_PLACE}", [number]
    ).fetchall()
    if rows and (opened := open_to_read(segment)) is not None:
        descriptor, end = opened
        with os.fdopen(descriptor, "rb") as file:
            for key, offset, size in rows:
                name = ChunkKey(key.hex())
                if 0 <= offset <= offset + size <= end and not has(name):
                    file.seek(offset)
                    write(name, file.read(size))
    connection.execute("DELETE FROM records WHERE segment = ?", [number])
    connection.execute("COMMIT")
    _remove(segment, Path.unlink)


def _remove(path: Path, remove: Callable[[Path], object]) -> None:
    """Remove a file, or rename it, if it is there. Raises StoreError."""
    try:
        remove(path)
    except OSError as error:
        if error.errno not in ABSENT:
            raise store_error("remove", path, error) from error
