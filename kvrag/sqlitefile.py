"""SQLite files in write-ahead mode, also encrypted, also where their folder cannot be written."""

from __future__ import annotations

import importlib
import sqlite3
from pathlib import Path
from typing import Any

from kvrag.errors import ParameterError

FileStamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of a file and of its write-ahead log, None where there is none."""


def library(key: bytes | None) -> Any:
    """Return the module that opens a file: `sqlite3`, or with a key SQLCipher's, of equal use.

    Its errors are its own: catch ``library(key).Error``.

    Raises
    ------
    ParameterError
        When there is a key and SQLCipher is not installed.
    """
    if key is None:
        return sqlite3
    try:
        return importlib.import_module("sqlcipher3.dbapi2")
    except ImportError as error:
        raise ParameterError(
            "an encrypted index needs the library 'sqlcipher3', which is not installed: "
            "pip install 'kvrag[encryption]'"
        ) from error


def unlock(connection: Any, key: bytes | None) -> None:
    """Give a new connection its file's key of 32 bytes; None for a file that is not encrypted."""
    if key is not None:
        connection.execute("PRAGMA cipher_log_level = NONE")  # errors are raised
        connection.execute(f"PRAGMA key = \"x'{key.hex()}'\"")


def connect(path: Path, key: bytes | None = None) -> tuple[sqlite3.Connection, FileStamp | None]:
    """Open a file.

    Parameters
    ----------
    path
        The file.
    key
        32 bytes with which it is encrypted (SQLCipher 4); None where it is not.

    Returns
    -------
    connection, stamp
        `stamp` is None for a connection that sees what others write. Otherwise SQLite reads the
        file as if it never changed, and the connection is good as long as `file_stamp` is equal.
    """
    sql = library(key)
    connection = sql.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    stamp: FileStamp | None = None
    try:
        unlock(connection, key)
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sql.OperationalError:
        # Who may not write the folder cannot make the WAL's shared memory. Where it is missing,
        # nobody has the file open at the moment; somebody else may at any later one.
        connection.close()
        stamp = file_stamp(path)
        connection = sql.connect(
            f"{path.absolute().as_uri()}?mode=ro&immutable=1",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        unlock(connection, key)
    except BaseException:
        connection.close()
        raise
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
