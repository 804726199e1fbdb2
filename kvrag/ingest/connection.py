"""What SQLite says of the catalog, as errors of kvrag."""

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


def next_path(path: Path) -> Path:
    """Return where a catalog that was written anew is, until it is put in place."""
    return path.with_name(f"{path.name}.next")


def put_in_place(path: Path) -> None:
    """Let the catalog that was written anew take the place of the one there was.

    The old log must never lie beside the new file. It goes first, and a name tells meanwhile that
    the new file is the one that counts: who is killed in between has `finish_placing` go on.
    """
    with contextlib.suppress(FileNotFoundError):
        next_path(path).replace(ready_path(path))
    finish_placing(path)


def ready_path(path: Path) -> Path:
    """Return where a catalog written anew is from when it counts until it is in place."""
    return path.with_name(f"{path.name}.ready")


def finish_placing(path: Path) -> None:
    """Do what is left of `put_in_place`; hold the writer's lock."""
    if ready_path(path).is_file():
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        ready_path(path).replace(path)
