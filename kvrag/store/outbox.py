"""The list of records that are yet to be uploaded; it survives the process."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError
from kvrag.sqlitefile import open_connection
from kvrag.store.files import make_folder

FILE_NAME = "outbox.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pending (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    replaces INTEGER NOT NULL,
    listed REAL NOT NULL
)
"""


@dataclass(frozen=True)
class Entry:
    """A record to be uploaded.

    Attributes
    ----------
    number
        Rises from entry to entry.
    key
        The record's key.
    replaces
        Whether the record replaces another one.
    age_seconds
        Time since it was listed.
    """

    number: int
    key: ChunkKey
    replaces: bool
    age_seconds: float


class Outbox:
    """Keys of records to be uploaded, the oldest first. Safe to use from several threads.

    Parameters
    ----------
    folder
        Where the list is kept, beside the records; created with the first entry.

    Raises
    ------
    StoreError
        When the list cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._path = folder / FILE_NAME
        if self._path.exists():
            with self._using() as connection:
                connection.execute("SELECT COUNT(*) FROM pending").fetchone()

    def add(self, key: ChunkKey, *, replaces: bool) -> bool:
        """Note durably that a record is to be uploaded; return whether it was not listed yet.

        Parameters
        ----------
        key
            The record's key. If it is listed already, the upload under way is no longer enough.
        replaces
            Whether the record replaces another one.
        """
        with self._using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute(
                "DELETE FROM pending WHERE key = ? RETURNING replaces", (key.digest,)
            ).fetchone()
            connection.execute(
                "INSERT INTO pending (key, replaces, listed) VALUES (?, ?, ?)",
                (key.digest, int(replaces or (row is not None and row[0])), time.time()),
            )
            connection.execute("COMMIT")
        return row is None

    def remove(self, key: ChunkKey, number: int | None = None) -> bool:
        """Forget a record that has been uploaded or deleted; return whether it was listed.

        Parameters
        ----------
        key
            The record's key.
        number
            Number of the uploaded entry: a newer entry stays. None means any.
        """
        if not self._path.exists():
            return False
        with self._using() as connection:
            done = connection.execute(
                "DELETE FROM pending WHERE key = ? AND number = COALESCE(?, number)",
                (key.digest, number),
            )
            return done.rowcount > 0

    def contains(self, key: ChunkKey) -> bool:
        """Return whether a record is listed."""
        if not self._path.exists():
            return False
        with self._using() as connection:
            query = "SELECT 1 FROM pending WHERE key = ?"
            return connection.execute(query, (key.digest,)).fetchone() is not None

    def after(self, number: int) -> Entry | None:
        """Return the oldest entry with a higher number, if there is one."""
        if not self._path.exists():
            return None
        with self._using() as connection:
            row = connection.execute(
                "SELECT number, key, replaces, listed FROM pending WHERE number > ? "
                "ORDER BY number LIMIT 1",
                (number,),
            ).fetchone()
        if row is None:
            return None
        return Entry(row[0], ChunkKey(row[1]), bool(row[2]), time.time() - row[3])

    def keys(self) -> list[ChunkKey]:
        """Return all keys."""
        if not self._path.exists():
            return []
        with self._using() as connection:
            rows = connection.execute("SELECT key FROM pending ORDER BY number").fetchall()
        return [ChunkKey(key) for (key,) in rows]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __del__(self) -> None:
        self.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    make_folder(self._path.parent)
                    connection = open_connection(
                        self._path, isolation_level=None, check_same_thread=False, timeout=30.0
                    )
                    # No write-ahead log: there are few changes, and each of them must last.
                    connection.execute("PRAGMA synchronous = FULL")
                    connection.execute(_SCHEMA)
                    self._connection = connection
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.rollback()
                raise StoreError(
                    f"cannot use {self._path}: {error}; free some space or mend the folder's "
                    "permissions; delete the file if it is damaged, then 'kvrag verify --repair'"
                ) from error
