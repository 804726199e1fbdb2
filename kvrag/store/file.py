"""Records in a folder, a file for each: ``FOLDER/ab/abcd...ef.kv``.

Segments of kvrag 0.2 are read once, and a file is written for each of their records.

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
import resource
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from kvrag import arguments
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError
from kvrag.regularfile import read_regular
from kvrag.sqlitefile import connect, is_damage
from kvrag.store.base import CountedStore, counted
from kvrag.store.metrics import StoreMetrics
from kvrag.store.remote import HeadedRecord

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


@contextlib.contextmanager
def store_errors(action: str, path: Path, *, may_lack: bool = False) -> Iterator[None]:
    """Turn refusals of the system into StoreError with a remedy.

    With `may_lack`, pass over a missing path.
    """
    try:
        yield
    except OSError as error:
        if not (may_lack and error.errno in ABSENT):
            remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and can be used")
            text = f"cannot {action} {path}: {error.strerror or error}; {remedy}"
            raise StoreError(text) from error


def check_writable(folder: Path) -> None:
    """Raise StoreError if `folder`, which need not exist yet, could not be written to.

    Nothing is created or written.
    """
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    with store_errors("write to", folder):
        if not nearest.is_dir():
            raise _refusal(errno.ENOTDIR)
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            raise _refusal(errno.EROFS)
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _refusal(errno.EACCES)


def _refusal(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries; none if it does not exist. Raises StoreError."""
    missing = contextlib.suppress(FileNotFoundError)
    with store_errors("list", folder), missing, os.scandir(folder) as found:
        return list(found)
    return []


def open_to_read(path: Path) -> tuple[int, int] | None:
    """Return a descriptor and the size of a file, or None if there is no such file.

    Raises StoreError.
    """
    with store_errors("open", path, may_lack=True), contextlib.ExitStack() as closing_again:
        descriptor = _open(path)
        closing_again.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            closing_again.pop_all()
            return descriptor, status.st_size
    return None


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
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ParameterError(
            f"{path}: other users may read this {noun}; take that right away (chmod 600)"
        )
    return text


FILE_NAME = "records.sqlite"
FOLDER_NAME = "segments"

_APPLICATION_ID = 0x6B765253  # "kvRS"
_SEGMENT = re.compile(r"[0-9]{8,12}\.seg")
# Which rows say where a record is. SQLite keeps any value in any column.
_IS_PLACE = (
    "(typeof(key) = 'blob' AND length(key) = 20 AND typeof(segment) = 'integer' "
    "AND typeof(offset) = 'integer' AND typeof(size) = 'integer' AND size BETWEEN 0 AND 1 << 48)"
)

logger = logging.getLogger("kvrag")


def unpack(store: FileStore) -> None:
    """Give each packed record of a store its own file, and remove the segments.

    What cannot be read is passed over: it is computed again when it is needed. A process that is
    killed meanwhile leaves the rest for the next one. Raises StoreError when the medium refuses; no
    record is lost.
    """
    folder = store.path
    index = folder / FILE_NAME
    if _kind(index) is None:
        return
    check_writable(folder)
    logger.warning("%s: records of kvrag 0.2 get a file each, once; many take minutes", folder)
    with contextlib.ExitStack() as stack:
        # No other process or thread unpacks the folder meanwhile.
        with contextlib.suppress(OSError):  # a file system without locks
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if (mode := _kind(index)) is not None:  # no other process has done it
            _unpack_all(store, index, is_file=stat.S_ISREG(mode))


def remove_unnamed(folder: Path) -> None:
    """Remove segments whose list was lost or set aside. Raises StoreError."""
    if _kind(folder / FILE_NAME) is None:
        for path in (folder / FOLDER_NAME).glob("*.seg"):
            if _SEGMENT.fullmatch(path.name) and path.is_file():
                _remove(path)
        with contextlib.suppress(OSError):  # there is none, or other files are in it
            (folder / FOLDER_NAME).rmdir()


def _kind(index: Path) -> int | None:
    """Return the mode of `records.sqlite`; None if there is none. Raises StoreError."""
    with store_errors("read", index, may_lack=True):
        return index.lstat().st_mode
    return None


def _unpack_all(store: FileStore, index: Path, *, is_file: bool) -> None:
    is_damaged = False
    try:
        if not is_file:
            raise sqlite3.DatabaseError("file is not a database")
        with closing(connect(index)[0]) as connection:
            connection.execute("PRAGMA foreign_keys = OFF")  # its other table may be damaged
            ((application,),) = connection.execute("PRAGMA application_id")
            if application != _APPLICATION_ID:
                raise sqlite3.DatabaseError("file is not a database of records")
            query = "SELECT DISTINCT segment FROM records WHERE typeof(segment) = 'integer'"
            for (number,) in connection.execute(query).fetchall():
                _unpack(store, connection, number)
    except (sqlite3.Error, OSError) as error:
        if not is_damage(error):
            busy = "another process has been writing for 30 seconds; try again when it has finished"
            other = "free some space, or mend the folder's permissions"
            raise StoreError(
                f"cannot unpack {index}: {error}; {busy if 'locked' in str(error) else other}"
            ) from error
        is_damaged = True
        logger.warning(
            "%s is damaged (%s): the records that it named are computed again when they are "
            "needed, or by 'kvrag verify --repair'",
            index,
            error,
        )
        with store_errors("remove", index, may_lack=True):
            index.rename(index.with_name(f"{FILE_NAME}.damaged"))
    for end in ("", "-wal", "-shm", "-journal"):
        _remove(index.with_name(FILE_NAME + end))
    if not is_damaged:  # else they stay until garbage is collected
        remove_unnamed(store.path)


def _unpack(store: FileStore, connection: sqlite3.Connection, number: int) -> None:
    """Unpack a segment, and remove it. A writer of 0.2 waits meanwhile."""
    segment = store.path / FOLDER_NAME / f"{number:08d}.seg"
    connection.execute("BEGIN IMMEDIATE")
    rows = connection.execute(
        f"SELECT key, offset, size FROM records WHERE segment = ? AND {_IS_PLACE}", [number]
    ).fetchall()
    if rows and (opened := open_to_read(segment)) is not None:
        descriptor, end = opened
        with os.fdopen(descriptor, "rb") as file:
            for key, offset, size in rows:
                name = ChunkKey(key.hex())
                if 0 <= offset <= offset + size <= end and not store.contains(name):
                    file.seek(offset)
                    store.replace(name, file.read(size))
    connection.execute("DELETE FROM records WHERE segment = ?", [number])
    connection.execute("COMMIT")
    _remove(segment)


def _remove(path: Path) -> None:
    """Remove a file if it is there. Raises StoreError."""
    with store_errors("remove", path, may_lack=True):
        path.unlink()


_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"([0-9a-f]{40})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")


class FileRecord(HeadedRecord):
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
        super().__init__(key, size_bytes, b"", metrics)
        self._file: _OpenFile | None = file
        self._path = file.path

    def _fetch(self, first: int, buffer: memoryview) -> None:
        file = self._file  # this reference keeps it open even if another thread closes the record
        if file is None:
            raise StoreError(f"cannot read {self._path}: the record was closed; open it again")
        with self._metrics.timing():
            file.read_into(self._key, first, buffer)

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
            with store_errors("read", self.path):
                count = os.preadv(self._descriptor, [buffer], offset)
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
        with store_errors("use", self.path):
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        self.metrics = StoreMetrics("file")
        try:
            unpack(self)
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
        path = self._path_of(key)
        with store_errors("write", path):
            make_folder(path.parent)
            descriptor, temporary = _create_beside(path)
            try:
                _write_durably(descriptor, temporary, record, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            sync_folder(path.parent)
        self.metrics.wrote(len(record))

    @counted
    def open(self, key: ChunkKey) -> FileRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        StoreError
            When the record exists but cannot be opened.
        """
        path = self._path_of(key)
        with self.metrics.timing():
            found = open_to_read(path)
        if found is None:
            return None
        descriptor, size_bytes = found
        return FileRecord(key, _OpenFile(path, descriptor), size_bytes, self.metrics)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        path = self._path_of(key)
        with store_errors("look for", path, may_lack=True):
            return stat.S_ISREG(path.lstat().st_mode)
        return False

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Readers that have it open keep it."""
        # A power cut may bring the record back, which does no harm: the record is intact.
        path = self._path_of(key)
        if self.contains(key):
            with store_errors("delete", path, may_lack=True):
                path.unlink()
                return True
        return False

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
            path = Path(entry.path)
            if _TEMPORARY.fullmatch(entry.name):
                with store_errors("remove", path), contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime <= newest:
                        num_removed += _remove_leftover(path)
        remove_unnamed(self.path)
        return num_removed

    def close(self) -> None:
        """Do nothing; opened records stay readable."""

    # -- private -----------------------------------------------------------------------------

    def _path_of(self, key: ChunkKey) -> Path:
        return self.path / key.digest[:2] / f"{key.digest}.kv"

    def _files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the files in the folders of records, each with its folder's name."""
        for folder in _entries(self.path):
            if _FAN_OUT.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in _entries(Path(folder.path)):
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
