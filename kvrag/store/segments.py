"""Segment files: many records one after another, each written once and never moved in place."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.base import check_range
from kvrag.store.files import ABSENT, READ_FLAGS, entries, make_folder, store_error, sync_folder
from kvrag.store.metrics import StoreMetrics

FOLDER_NAME = "segments"
ALIGNMENT_BYTES = 64
# Records are appended to a segment until it has this many bytes.
SEGMENT_BYTES = 256 << 20

_MAGIC = b"\x89KVSEG\r\n\x01".ljust(ALIGNMENT_BYTES, b"\0")
_NAME = re.compile(r"([0-9]{8,12})\.seg")
# Opening a pipe must not wait for its reader.
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Place:
    """A record's place: bytes `offset` to `offset + size_bytes` of a segment."""

    segment: int
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """First byte after the record."""
        return -(-(self.offset + self.size_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class OpenFile:
    """A file open for reading, shared by its readers and closed by the last of them.

    Reads use `os.preadv`, not a memory mapping. A copy costs the same (`kvrag bench store`), but
    when the file is cut short or the disk has a defect, the system kills a process that touches the
    mapping, while `os.preadv` returns an error.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = _Descriptor(descriptor)

    def require(self, key: ChunkKey, offset: int, size_bytes: int) -> None:
        """Raise unless the file has `size_bytes` bytes at `offset`; this allocates nothing.

        Raises
        ------
        StoreError
            When the medium refuses.
        RecordError
            When the file is shorter.
        """
        try:
            found = os.fstat(self._descriptor.number).st_size
        except OSError as error:
            raise store_error("read", self.path, error) from error
        if not 0 <= offset <= offset + size_bytes <= found:
            raise RecordError(
                f"record {key}: expected {size_bytes} bytes from {offset} on in {self.path}, found "
                f"its end at {found}; the file was cut short: ingest the document again"
            )

    def read_into(self, key: ChunkKey, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with a record's bytes starting at `offset` of the file.

        Raises
        ------
        StoreError
            When the medium refuses.
        RecordError
            When the file ends before the buffer is full.
        """
        while buffer.nbytes:
            try:
                count = os.preadv(self._descriptor.number, [buffer], offset)
            except OSError as error:
                raise store_error("read", self.path, error) from error
            if count == 0:
                raise RecordError(
                    f"record {key}: expected {buffer.nbytes} bytes more in {self.path}, found its "
                    f"end at {offset}; the file was cut short: ingest the document again"
                )
            offset += count
            buffer = buffer[count:]


class _Descriptor:
    """Closes a file descriptor when its last reference goes.

    Separate from `OpenFile`, since weak references to an object still find it during finalisation.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class FileRecord:
    """An opened record of a `FileStore`, read at any offset by any thread.

    `close` closes it, or the end of its last reference.
    """

    def __init__(
        self, key: ChunkKey, file: OpenFile, offset: int, size_bytes: int, metrics: StoreMetrics
    ) -> None:
        self._key = key
        self._file: OpenFile | None = file
        self._path = file.path
        self._offset = offset
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
        with self._metrics.timing():
            file.read_into(self._key, self._offset + offset, buffer)
        self._metrics.read(buffer.nbytes)

    def close(self) -> None:
        """Release the file."""
        self._file = None


class SegmentFiles:
    """A folder's segments. Writers hold the index's write transaction.

    Parameters
    ----------
    folder
        The folder, created with the first segment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: weakref.WeakValueDictionary[int, OpenFile] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def path_of(self, segment: int) -> Path:
        """Return the path of a segment's file."""
        return self.folder / f"{segment:08d}.seg"

    def open(self, segment: int) -> OpenFile | None:
        """Return a segment open for reading, or None if it is gone. Raises StoreError."""
        with self._lock:
            found = self._open.get(segment)
            if found is None:
                path = self.path_of(segment)
                if self.length(segment) is None:
                    return None
                try:
                    found = OpenFile(path, os.open(path, READ_FLAGS))
                except OSError as error:
                    if error.errno in ABSENT:
                        return None
                    raise store_error("open", path, error) from error
                self._open[segment] = found
            return found

    def length(self, segment: int) -> int | None:
        """Return a segment's length in bytes; None if it is gone or no file. Raises StoreError."""
        path = self.path_of(segment)
        try:
            status = path.lstat()
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise store_error("look for", path, error) from error
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def append(self, segment: int, end: int, records: list[bytes]) -> list[Place]:
        """Write records at byte `end` of a segment, and flush them to the medium.

        Parameters
        ----------
        segment
            The segment's number. The segment is created if `end` is 0.
        end
            Bytes in use. Whatever follows them is garbage and is overwritten.

        Raises
        ------
        StoreError
            When the medium refuses; the segment is then unchanged.
        """
        path = self.path_of(segment)
        try:
            if end == 0:
                make_folder(self.folder)
            descriptor = os.open(path, _WRITE_FLAGS, 0o666)
            try:
                places = _write_all(descriptor, segment, end, records)
                os.fsync(descriptor)
            except BaseException:
                with contextlib.suppress(OSError):  # reclaim the room of half a record
                    os.ftruncate(descriptor, end)
                    if end == 0:
                        path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            if end == 0:
                sync_folder(self.folder)
        except OSError as error:
            raise store_error("write", path, error) from error
        return places

    def remove(self, segment: int) -> None:
        """Remove a segment's file; its readers keep it. Raises StoreError."""
        path = self.path_of(segment)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise store_error("remove", path, error) from error

    def numbers(self) -> Iterator[int]:
        """Iterate over the numbers that are taken, by files or by anything else of such a name."""
        for entry in entries(self.folder):
            if match := _NAME.fullmatch(entry.name):
                yield int(match[1])


def _write_all(descriptor: int, segment: int, end: int, records: list[bytes]) -> list[Place]:
    if end == 0:
        _write_at(descriptor, 0, _MAGIC)
        end = len(_MAGIC)
    places = []
    for record in records:
        place = Place(segment, end, len(record))
        _write_at(descriptor, end, record)
        places.append(place)
        end = place.end
    # Aligned up to the last byte, so that no record's read ever reaches the end of the file.
    os.ftruncate(descriptor, end)
    return places


def _write_at(descriptor: int, offset: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest.nbytes:
        count = os.pwrite(descriptor, rest, offset)
        offset += count
        rest = rest[count:]
