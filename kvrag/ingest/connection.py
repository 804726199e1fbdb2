"""The catalog's SQLite connection, also where the folder cannot be written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kvrag.errors import IndexFormatError, StoreError

FileStamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of the catalog and of its write-ahead log, None where there is none."""

_DAMAGE = ("not a database", "malformed", "no such table", "no such column", "Could not decode")


def connect(path: Path) -> tuple[sqlite3.Connection, FileStamp | None]:
    """Open a catalog.

    Returns
    -------
    connection, stamp
        `stamp` is None for a connection that sees what others write. Otherwise SQLite reads the
        file as if it never changed, and the connection is good as long as `file_stamp` is equal.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    stamp: FileStamp | None = None
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # Who may not write the folder cannot make the WAL's shared memory. Where it is missing,
        # nobody has the catalog open at the moment; somebody else may at any later one.
        connection.close()
        stamp = file_stamp(path)
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro&immutable=1",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    return connection, stamp


def file_stamp(path: Path) -> FileStamp:
    """Return what changes whenever another process writes to the catalog."""
    return tuple(map(_stamp, (path, path.with_name(path.name + "-wal"))))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def catalog_error(path: Path, error: Exception) -> StoreError | IndexFormatError:
    """Return what an error of SQLite or of the system means for an index."""
    text = str(error)
    if isinstance(error, sqlite3.DatabaseError) and any(part in text for part in _DAMAGE):
        return IndexFormatError(f"{path} is damaged or not a catalog ({text}); ingest again")
    if "full" in text:
        text += "; free some space and ingest again, nothing committed so far is lost"
    elif "readonly" in text or "unable to open" in text:
        text += "; change the folder's permissions, or use another folder"
    return StoreError(f"cannot use {path}: {text}")
