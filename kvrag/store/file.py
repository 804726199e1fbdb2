"""Records in a folder, a file for each: ``FOLDER/ab/abcd...ef.kv``.

A record is written beside its place, flushed, and renamed: it is there whole or not at all, however
a process ends. A bucket has the same names (`kvrag.store.objects`), and a web server can hand them
out (`kvrag.store.objects`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvrag import arguments
from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.base import CountedStore, check_range
from kvrag.store.files import (
    ABSENT,
    READ_FLAGS,
    check_writable,
    entries,
    make_folder,
    open_to_read,
    store_error,
    sync_folder,
)
from kvrag.store.metrics import MISS_ABSENT, MISS_UNREADABLE, StoreMetrics
from kvrag.store.segments import remove_unnamed, unpack

logger = logging.getLogger("kvrag")

_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"([0-9a-f]{40})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")


class FileRecord:
    """An opened record of a `FileStore`, read at any offset by any thread.

    `close` closes it, or the end of its last reference. Reads use `os.preadv`, not a memory
    mapping. A copy costs the same (`kvrag bench store`), but when the file is cut short or the disk
    has a defect, the system kills a process that touches the mapping, while `os.preadv` returns an
    error.

    Parameters
    ----------
    key
        The record's key.
    file
        The file that holds it.
    size_bytes
        Its length.
    metrics
        Counts what is read.
    """

    def __init__(
        self, key: ChunkKey, file: _OpenFile, size_bytes: int, metrics: StoreMetrics
    ) -> None:
        self._key = key
        self._file: _OpenFile | None = file
        self._path = file.path
        self._size_bytes = size_bytes
        self._metrics = metrics

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` starting at `offset`.

        Raises
        ------
        StoreError
            When the medium refuses, or the record was closed.
        RecordError
            When the record ends before the buffer is full.
        """
        check_range(self._key, self._size_bytes, offset, buffer.nbytes)
        file = self._file  # this reference keeps it open even if another thread closes the record
        if file is None:
            raise StoreError(f"cannot read {self._path}: the record was closed; open it again")
        num_bytes = buffer.nbytes
        with self._metrics.timing():
            file.read_into(self._key, offset, buffer)
        self._metrics.read(num_bytes)

    def close(self) -> None:
        """Release the file."""
        self._file = None


class _OpenFile:
    """A file open for reading, which the end of its last reference closes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def read_into(self, key: ChunkKey, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a place in the file. Raises as `FileRecord.read_into` does."""
        while buffer.nbytes:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise store_error("read", self.path, error) from error
            if count == 0:
                raise RecordError(
                    f"record {key}: expected {buffer.nbytes} bytes more in {self.path}, found its "
                    f"end at {offset}; the file was cut short: ingest the document again"
                )
            offset += count
            buffer = buffer[count:]


class FileStore(CountedStore):
    """Records in a folder, which is created when the first record is put.

    The store leaves other files alone. Several processes may share the folder. Records that kvrag
    0.2 packed into segments get a file each when the folder is opened; where it cannot be written
    to, they are missing.

    Parameters
    ----------
    path
        The folder.

    Raises
    ------
    StoreError
        When `path` is not a folder.
    ParameterError
        When `path` is not a path.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = arguments.path(path, "path").absolute()
        self.url = f"file:{self.path}"
        try:
            is_other = self.path.exists() and not self.path.is_dir()
        except OSError as error:
            raise store_error("use", self.path, error) from error
        if is_other:
            raise store_error("use", self.path, NotADirectoryError(errno.ENOTDIR, "not a folder"))
        self.metrics = StoreMetrics("file")
        try:
            unpack(self.path, self._is_file, self._write)
        except StoreError as error:
            logger.warning("%s. Until then, records of kvrag 0.2 are computed again", error)

    def check_writable(self) -> None:
        """Raise StoreError if no record could be written; this writes nothing to find out."""
        check_writable(self.path)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; readers keep the one they opened.

        When this returns, the record is on the medium.

        Raises
        ------
        StoreError
            When it cannot be written; the old record then stays.
        """
        self._write(key, record)

    def open(self, key: ChunkKey) -> FileRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        StoreError
            When the record exists but cannot be opened.
        """
        try:
            with self.metrics.timing():
                record = self._open_file(key)
        except StoreError:
            self.metrics.miss(MISS_UNREADABLE)
            raise
        if record is None:
            self.metrics.miss(MISS_ABSENT)
        else:
            self.metrics.hit()
        return record

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        return self._is_file(key)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Readers that have it open keep it."""
        # A power cut may bring the record back, which does no harm: the record is intact.
        if not self._is_file(key):
            return False
        path = self._path_of(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error("delete", path, error) from error
        return True

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        for folder_name, entry in self._files():
            match = _RECORD.fullmatch(entry.name)
            if match and entry.name.startswith(folder_name):
                with contextlib.suppress(FileNotFoundError):
                    yield ChunkKey(match[1]), entry.stat(follow_symlinks=False).st_size

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove leftovers of killed processes, and segments of 0.2 whose list was damaged.

        Parameters
        ----------
        min_age_seconds
            Younger temporary files stay. Those that a process is writing stay at any age.

        Returns
        -------
        int
            Number of leftover files removed.

        Raises
        ------
        StoreError
            When something cannot be written or removed.
        """
        newest = time.time() - min_age_seconds
        num_removed = 0
        for _, entry in self._files():
            if not _TEMPORARY.fullmatch(entry.name):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime <= newest:
                    num_removed += _remove_leftover(Path(entry.path))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise store_error("remove", Path(entry.path), error) from error
        remove_unnamed(self.path)
        return num_removed

    def close(self) -> None:
        """Do nothing; opened records stay readable."""

    # -- private -----------------------------------------------------------------------------

    def _path_of(self, key: ChunkKey) -> Path:
        return self.path / key.digest[:2] / f"{key.digest}.kv"

    def _is_file(self, key: ChunkKey) -> bool:
        path = self._path_of(key)
        try:
            return stat.S_ISREG(path.lstat().st_mode)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise store_error("look for", path, error) from error

    def _write(self, key: ChunkKey, record: bytes) -> None:
        path = self._path_of(key)
        try:
            make_folder(path.parent)
            descriptor, temporary = _create_beside(path)
            try:
                _write_durably(descriptor, temporary, record, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            sync_folder(path.parent)
        except OSError as error:
            raise store_error("write", path, error) from error
        self.metrics.wrote(len(record))

    def _open_file(self, key: ChunkKey) -> FileRecord | None:
        path = self._path_of(key)
        found = open_to_read(path)
        if found is None:
            return None
        descriptor, size_bytes = found
        return FileRecord(key, _OpenFile(path, descriptor), size_bytes, self.metrics)

    def _files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the files in the folders of records, each with its folder's name."""
        for folder in entries(self.path):
            if _FAN_OUT.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in entries(Path(folder.path)):
                    if entry.is_file(follow_symlinks=False):
                        yield folder.name, entry


def _create_beside(path: Path) -> tuple[int, Path]:
    """Create a temporary file, locked so that nobody takes it for a leftover. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, flags, 0o666)
        # Somebody may have found it before it was locked, and then removes it.
        if _lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)


def _write_durably(descriptor: int, temporary: Path, content: bytes, path: Path) -> None:
    """Write into a new file, flush it to the medium, and give it its name. Raises OSError."""
    try:
        rest = memoryview(content)
        while rest.nbytes:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        temporary.rename(path)
    finally:
        os.close(descriptor)


def _remove_leftover(path: Path) -> bool:
    """Remove a temporary file whose writer has ended; say whether it was. Raises OSError."""
    descriptor = os.open(path, READ_FLAGS)
    try:
        if is_over := _lock(descriptor):
            path.unlink()
        return is_over
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the file's age must do
        pass
    return True
