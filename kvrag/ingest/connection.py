"""What SQLite says of the catalog, as errors of kvrag."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kvrag.errors import IndexFormatError, StoreError
from kvrag.sqlitefile import FileStamp, connect, file_stamp

__all__ = ["FileStamp", "catalog_error", "connect", "file_stamp"]

_DAMAGE = ("not a database", "malformed", "no such table", "no such column", "Could not decode")


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
