"""Files that users name, read so that no pipe or device blocks a reader; written whole; checksums.

Every function raises OSError with the reason in ``strerror``, so callers that translate the
system's errors translate these too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 64 << 20
"""The limit of a file that a person writes, or that holds settings."""

_PIECE_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
# Opening a pipe without a writer would block for ever. Windows has the last flag alone.
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def other_kind(mode: int) -> str:
    """Return what a file with this mode is, such as ``a pipe``; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")


def require_regular(path: str | Path) -> None:
    """Raise OSError unless there is a regular file, for readers that open the path themselves."""
    _check(path, os.stat(path).st_mode)  # noqa: PTH116  (the path may be text)


def require_regular_files(folder: str | Path) -> None:
    """Raise OSError if a folder, or a folder in it, holds a pipe, a device or a socket."""
    for path in (*Path(folder).glob("*"), *Path(folder).glob("*/*")):
        if path.exists() and not path.is_dir():
            require_regular(path)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading."""
    require_regular(path)  # first, since opening a device may act on it
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        _check(path, os.fstat(descriptor).st_mode)  # it may be another file by now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a regular file's bytes; more than `max_bytes` are an error (``errno.EFBIG``)."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        pieces = []
        num_read = 0
        # The file may grow meanwhile, and files in /proc report a size of 0.
        while size <= max_bytes and (piece := file.read(_PIECE_BYTES)):
            pieces.append(piece)
            num_read += len(piece)
            size = max(size, num_read)
    if size > max_bytes:
        raise OSError(
            errno.EFBIG, f"{size:,} bytes or more, and at most {max_bytes:,} are read", str(path)
        )
    return b"".join(pieces)


def replace_file(path: Path, *parts: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check(path: str | Path, mode: int) -> None:
    if kind := other_kind(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"not a regular file but {kind}", str(path))


NAME = "checksum"
"""The name under which a file holds its checksum."""


def checksum(values: Mapping[str, Any]) -> str:
    """Return the digest of all values in a file except the digest itself."""
    said = {name: value for name, value in values.items() if name != NAME}
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
