"""What SQLite says of the catalog, as errors of kvrag."""

from __future__ import annotations

from pathlib import Path

from kvrag.errors import IndexFormatError, StoreError
from kvrag.sqlitefile import FileStamp, connect, file_stamp

__all__ = ["FileStamp", "catalog_error", "connect", "file_stamp", "is_damage"]

_DAMAGE = (
    "not a database",
    "malformed",
    "no such table",
    "no such column",
    "too big",
    "unsupported file format",
)


def is_damage(error: Exception) -> bool:
    """Say whether an error of SQLite tells of wrong bytes, not of a medium that refuses."""
    return any(part in str(error) for part in _DAMAGE)


def catalog_error(path: Path, error: Exception) -> StoreError | IndexFormatError:
    """Return what an error of SQLite or of the system means for an index."""
    text = str(error)
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
