"""Translation of SQLite's errors, and the steps that replace the catalog's file."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

from kvrag.errors import IndexFormatError, IndexMismatchError, StoreError
from kvrag.regularfile import open_regular
from kvrag.sqlitefile import FileStamp, connect, file_stamp, is_damage

__all__ = [
    "FileStamp",
    "catalog_error",
    "check_encryption",
    "connect",
    "file_stamp",
    "finish_placing",
    "is_damage",
    "is_lost",
    "next_path",
    "put_in_place",
    "ready_path",
]

_PAGE_BYTES = 4096
_PLAIN = b"SQLite format 3\0"


def catalog_error(path: Path, error: Exception) -> StoreError | IndexFormatError:
    """Return the kvrag error that an error of SQLite or of the system amounts to."""
    text = getattr(error, "strerror", None) or str(error)  # the path may say anything
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


def is_lost(path: Path) -> bool:
    """Return whether there is no catalog, or an empty file in its place."""
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def check_encryption(path: Path, is_expected: bool) -> None:
    """Raise IndexMismatchError if a catalog is encrypted and should not be, or the reverse.

    A damaged catalog may pass: without a key, encrypted bytes are known by their randomness alone.
    """
    with open_regular(path) as file:
        page = file.read(_PAGE_BYTES)
    if is_expected and page.startswith(_PLAIN):
        found, expected = "is not encrypted", "is"
    elif not is_expected and not page.startswith(_PLAIN) and _is_random(page):
        found, expected = "is encrypted", "is not"
    else:
        return
    raise IndexMismatchError(
        f"{path} {found}, and index.json beside it says that the index {expected}: one of the two "
        "files is from another index. Put back the right one; if the catalog is lost, move this "
        "one away and ingest all documents again. Nothing was changed"
    )


def _is_random(page: bytes) -> bool:
    """Return whether each byte value is about as frequent as any other."""
    return len(page) == _PAGE_BYTES and max(Counter(page).values()) < 4 * _PAGE_BYTES // 256


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
