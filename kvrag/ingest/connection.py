"""Translation of SQLite's errors, and the steps that replace the catalog's file."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvrag.errors import IndexFormatError, StoreError
from kvrag.sqlitefile import FileStamp, connect, file_stamp

__all__ = [
    "FileStamp",
    "catalog_error",
    "connect",
    "file_stamp",
    "finish_placing",
    "is_damage",
    "next_path",
    "put_in_place",
    "ready_path",
]

_DAMAGE = (
    "not a database",
    "malformed",
    "no such table",
    "no such column",
    "Could not decode",
    "too big",
    "unsupported file format",
)


def is_damage(error: Exception) -> bool:
    """Return whether an SQLite error reports wrong bytes rather than a failing disk."""
    return any(part in str(error) for part in _DAMAGE)


def catalog_error(path: Path, error: Exception) -> StoreError | IndexFormatError:
    """Return the kvrag error that an error of SQLite or of the system amounts to."""
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
