"""Files and folders that survive a power cut, and remedies for the system's errors."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from kvrag.errors import ParameterError, StoreError
from kvrag.regularfile import read_regular

# A link or a pipe is not one of our files: neither follow it nor wait for it.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Errors of the system that mean "no file": nothing is there, or something that is not a file.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space, or put the index on another disk",
    errno.EDQUOT: "the disk quota is used up: free some space, or ask for a larger quota",
    errno.EFBIG: "the file would pass the allowed file size: raise that limit (ulimit -f)",
    errno.EROFS: "the disk is mounted read-only: mount it writable, or use another folder",
    errno.EACCES: "permission is missing: change the owner or mode, or use another folder",
    errno.EPERM: "permission is missing: change the owner or mode, or use another folder",
    errno.EMFILE: "this process has too many files open: raise its limit (ulimit -n)",
    errno.ENFILE: "the system has too many files open: close some programs",
    errno.EEXIST: "a file is where a folder should be: move it away, or use another folder",
    errno.ENOTDIR: "a file is where a folder should be: move it away, or use another folder",
    errno.ELOOP: "links lead in a circle: remove them, or use another folder",
    errno.ENAMETOOLONG: "a name is too long: use a shorter one",
    errno.EISDIR: "a folder is where a file should be: move it away, or use another folder",
    errno.EIO: "the disk reports a defect: check it, then ingest again elsewhere",
    errno.ESTALE: "the network file system lost the file: mount it again",
}


def store_error(action: str, path: Path, error: OSError) -> StoreError:
    """Return the StoreError for the system's refusal of an action on a path, with a remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and can be used")
    return StoreError(f"cannot {action} {path}: {error.strerror or error}; {remedy}")


def refusal_of(folder: Path, text: str) -> OSError:
    """Return SQLite's message about a folder's file as a system error, as far as possible."""
    code = errno.EIO
    if "full" in text:
        code = errno.ENOSPC
    else:
        with contextlib.suppress(OSError):
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                code = errno.EROFS
            elif not os.access(folder, os.W_OK):
                code = errno.EACCES
    return OSError(code, text)


def check_writable(folder: Path) -> None:
    """Raise StoreError if `folder`, which need not exist yet, could not be written to.

    Nothing is created or written.
    """
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    code = 0
    if not nearest.is_dir():
        code = errno.ENOTDIR
    elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif not os.access(nearest, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        raise store_error("write to", folder, OSError(code, os.strerror(code)))


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries; none if it does not exist. Raises StoreError."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error("list", folder, error) from error


def open_to_read(path: Path) -> tuple[int, int] | None:
    """Return a descriptor and the size of a file, or None if there is no such file.

    Raises StoreError.
    """
    try:
        descriptor = _open(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise store_error("open", path, error) from error
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise store_error("open", path, error) from error
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    return descriptor, status.st_size


def _open(path: Path) -> int:
    """Open a file for reading; each record that a prompt needs is open at the same time."""
    try:
        return os.open(path, READ_FLAGS)
    except OSError as error:
        if error.errno != errno.EMFILE or not _allow_more_files():
            raise
    return os.open(path, READ_FLAGS)


def _allow_more_files() -> bool:
    """Raise this process's limit of open files as far as the system lets it; say whether it did."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return False
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == most or limit == resource.RLIM_INFINITY:
        return False
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return True
    return False


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents so that their names, too, survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the medium."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; there the change is durable anyway.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_secret(path: str | Path, noun: str, form: str = "") -> str:
    """Return the one line of a file with a key or a token.

    Parameters
    ----------
    noun, form
        What it is, and more of it for messages.

    Raises
    ------
    ParameterError
        When the file cannot be read, holds something else than text, or other users may read it.
    """
    try:
        text = read_regular(path).decode("ascii").strip()
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{path} is not a file with a {noun}{form}: "
            f"{getattr(error, 'strerror', None) or 'it holds something else'}; make one with "
            "'openssl rand -hex 32'"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ParameterError(
            f"{path}: other users may read this {noun}; take that right away (chmod 600)"
        )
    return text
