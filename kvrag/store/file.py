"""Records as files: ``FOLDER/ab/abcd...ef.kv``, one file a record, 256 folders.

A record is written to a temporary file in its own folder, flushed to the medium, and renamed
to its name: a process killed at any moment leaves whole records and, at worst, temporary
files that nobody reads and `FileStore.collect_garbage` removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.base import check_range

_SUFFIX = ".kv"
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"([0-9a-f]{40})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")

# A name that is a link or a pipe is no record of ours: neither follow it nor wait for it.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

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
    errno.EISDIR: "a folder is where a file should be: move it away, or use another folder",
    errno.EIO: "the disk reports a defect: check it, then ingest again elsewhere",
    errno.ESTALE: "the network file system lost the file: mount it again",
}
# What the system answers where there is no record: nothing, or something that is not one.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


def _store_error(action: str, path: Path, error: OSError) -> StoreError:
    remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and can be used")
    return StoreError(f"cannot {action} {path}: {error.strerror or error}; {remedy}")


class FileRecord:
    """An opened record of a `FileStore`: one file descriptor, read at any offset by any thread.

    It is closed by `close`, or when the last reference to it goes.
    """

    def __init__(self, key: ChunkKey, path: Path, descriptor: int, size_bytes: int) -> None:
        self._key = key
        self._path = path
        self._descriptor = descriptor
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """Length of the record when it was opened."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on.

        Raises
        ------
        StoreError
            When the medium refuses, or the record was closed.
        RecordError
            When the record ends before the buffer is full.
        """
        check_range(self._key, self._size_bytes, offset, buffer.nbytes)
        if self._descriptor < 0:
            raise StoreError(f"cannot read {self._path}: the record was closed; open it again")
        while buffer.nbytes:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise _store_error("read", self._path, error) from error
            if count == 0:
                raise RecordError(
                    f"record {self._key}: expected {self._size_bytes} bytes in {self._path}, "
                    f"found {offset}; it was cut short after it was opened: ingest again"
                )
            offset += count
            buffer = buffer[count:]

    def close(self) -> None:
        """Close the file. Not while another thread reads from it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class FileStore:
    """Records in a folder, which is made when the first record is put.

    Files that are not records are left alone. Several processes may share the folder.

    Parameters
    ----------
    path
        The folder.

    Raises
    ------
    StoreError
        When there is something at `path` that is not a folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        self.url = f"file:{self._path}"
        if self._path.exists() and not self._path.is_dir():
            raise _store_error("use", self._path, NotADirectoryError(errno.ENOTDIR, "not a folder"))

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; when this returns, it has reached the medium.

        A key that is present keeps its record. Of several puts of one key at the same time
        one stays, whole.

        Raises
        ------
        StoreError
            When it cannot be written; nothing of it is then visible.
        """
        if not _is_record(self._path_of(key)):
            self.replace(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the one `key` has, if any; readers keep the one they opened.

        Raises
        ------
        StoreError
            When it cannot be written; the old one then stays.
        """
        path = self._path_of(key)
        try:
            _make_folder(path.parent)
            temporary = path.with_name(f".{key}.{secrets.token_hex(8)}.tmp")
            try:
                _write_file(temporary, record)
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            _sync_folder(path.parent)
        except OSError as error:
            raise _store_error("write", path, error) from error

    def open(self, key: ChunkKey) -> FileRecord | None:
        """Open a record for reading, or return None where there is none.

        Raises
        ------
        StoreError
            When there is one that cannot be opened.
        """
        path = self._path_of(key)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise _store_error("open", path, error) from error
        try:
            status = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _store_error("open", path, error) from error
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        return FileRecord(key, path, descriptor, status.st_size)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        return _is_record(self._path_of(key))

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record; say whether there was one. Those who have it open keep it."""
        path = self._path_of(key)
        if not _is_record(path):
            return False
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _store_error("delete", path, error) from error
        return True

    def keys(self) -> Iterator[ChunkKey]:
        """Iterate over the keys, in no particular order."""
        for entry in self._files():
            match = _RECORD.fullmatch(entry.name)
            if match and entry.name[:2] == Path(entry.path).parent.name:
                yield ChunkKey(match[1])

    def size_bytes(self) -> int:
        """Bytes held by all records."""
        total = 0
        for key in self.keys():
            with contextlib.suppress(FileNotFoundError):
                total += self._path_of(key).stat().st_size
        return total

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove temporary files left behind by processes that were killed.

        Parameters
        ----------
        min_age_seconds
            Younger ones stay: another process may still be writing them.

        Returns
        -------
        int
            How many were removed.

        Raises
        ------
        StoreError
            When one cannot be removed.
        """
        newest = time.time() - min_age_seconds
        num_removed = 0
        for entry in self._files():
            if not _TEMPORARY.fullmatch(entry.name):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime <= newest:
                    Path(entry.path).unlink()
                    num_removed += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _store_error("remove", Path(entry.path), error) from error
        return num_removed

    def close(self) -> None:
        """Do nothing: only opened records hold anything."""

    def _path_of(self, key: ChunkKey) -> Path:
        return self._path / key.digest[:2] / (key.digest + _SUFFIX)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for folder in _entries(self._path):
            if _FAN_OUT.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in _entries(Path(folder.path)):
                    if entry.is_file(follow_symlinks=False):
                        yield entry


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _store_error("list", folder, error) from error


def _is_record(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise _store_error("look for", path, error) from error


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents so that their names, too, survive a power cut."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, _WRITE_FLAGS, 0o666)
    try:
        rest = memoryview(content)
        while rest.nbytes:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; there the rename itself is durable.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
