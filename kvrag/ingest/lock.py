"""The writer's lock of an index: an advisory lock that ends with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvrag.errors import IndexLockedError, StoreError
from kvrag.regularfile import other_kind

FILE_NAME = "writer.lock"


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the right to write to the index in `folder`.

    The kernel releases the lock when the process ends, for whatever reason; the file stays.

    Raises
    ------
    IndexLockedError
        Immediately, when another process or thread holds the lock; names the process.
    StoreError
        When the folder cannot be written.
    """
    path = folder / FILE_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise StoreError(
            f"cannot write to the index in {folder}: {error.strerror or error}; change the "
            "folder's permissions, or make the index elsewhere"
        ) from error
    try:
        if kind := other_kind(os.fstat(descriptor).st_mode):
            raise StoreError(f"cannot lock {path}: it is not a regular file but {kind}; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreError(f"cannot lock {path}: {error.strerror or error}") from error
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            raise IndexLockedError(
                f"the index in {folder} is being written to by process {holder or 'unknown'}; "
                "wait until it has finished, or end it (nothing done so far is lost)"
            ) from error
        with contextlib.suppress(OSError):  # a full disk must not stop gc, which makes room
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
