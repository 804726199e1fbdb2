"""SQLite files in write-ahead mode, also where their folder cannot be written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

FileStamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of a file and of its write-ahead log, None where there is none."""


def connect(path: Path) -> tuple[sqlite3.Connection, FileStamp | None]:
    """Open a file.

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
        # nobody has the file open at the moment; somebody else may at any later one.
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
    """Return what changes whenever another process writes to the file."""
    return tuple(map(_stamp, (path, path.with_name(path.name + "-wal"))))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
