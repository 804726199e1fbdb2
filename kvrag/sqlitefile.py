"""SQLite files in write-ahead mode, plain or encrypted, also in read-only folders."""

from __future__ import annotations

import functools
import importlib
import sqlite3
from pathlib import Path
from typing import Any

from kvrag.errors import ParameterError

FileStamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and modification time of a file and of its write-ahead log; None for a missing one.
"""

_DAMAGE = (
    "not a database",
    "malformed",
    "no such table",
    "no such column",
    "no such index",
    "Could not decode",
    "too big",
    "unsupported file format",
)


def is_damage(error: Exception) -> bool:
    """Return whether an SQLite error reports wrong bytes rather than a failing disk."""
    return any(part in str(error) for part in _DAMAGE)


def library(key: bytes | None) -> Any:
    """Return the module that opens a file: `sqlite3`, or SQLCipher's if there is a key.

    Both have the same interface, but separate exceptions: catch ``library(key).Error``.

    Raises
    ------
    ParameterError
        If there is a key and SQLCipher is not installed.
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


@functools.cache
def _connection_class(sql: Any) -> Any:
    """Return the connection of `library` that reports a schema that is no text as damage.

    Python cannot decode SQLite's message about such a schema, and raises UnicodeDecodeError, which
    is no error of the library.
    """

    def told(method: Any) -> Any:
        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except UnicodeDecodeError as error:
                said = f"malformed database schema: not text ({error})"
                raise sql.DatabaseError(said) from error

        return call

    names = ("execute", "executemany", "executescript")
    return type(
        "Connection", (sql.Connection,), {n: told(getattr(sql.Connection, n)) for n in names}
    )


def open_connection(database: str | Path, *, sql: Any = sqlite3, **options: Any) -> Any:
    """Open a file that may be damaged: every damage is an error of the library.

    Parameters
    ----------
    database, options
        Arguments of ``connect``.
    sql
        The module that opens it (`library`).
    """
    return sql.connect(database, factory=_connection_class(sql), **options)


def unlock(connection: Any, key: bytes | None) -> None:
    """Set the file's key of 32 bytes on a new connection; None for a file without encryption."""
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
        The 32 bytes that it is encrypted with (SQLCipher 4); None for a file without encryption.

    Returns
    -------
    connection, stamp
        `stamp` is None for a connection that sees what others write. Otherwise SQLite reads the
        file as if it never changed, and the connection is valid as long as `file_stamp` is equal.
    """
    sql = library(key)
    connection = open_connection(
        path, sql=sql, isolation_level=None, check_same_thread=False, timeout=30.0
    )
    stamp: FileStamp | None = None
    try:
        unlock(connection, key)
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sql.OperationalError:
        # In a read-only folder, SQLite cannot create the WAL's shared memory. If that is missing,
        # no process has the file open now, but one may open it at any later moment.
        connection.close()
        stamp = file_stamp(path)
        connection = open_connection(
            f"{path.absolute().as_uri()}?mode=ro&immutable=1",
            sql=sql,
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
    """Return a stamp that changes whenever another process writes to the file."""
    return tuple(map(_stamp, (path, path.with_name(path.name + "-wal"))))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
