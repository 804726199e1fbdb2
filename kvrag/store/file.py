"""Records in a folder, packed into segments; the space of deleted ones is reclaimed.

A million chunks are a few hundred files.

A record is appended to the last segment and flushed; then one transaction notes its place in
``records.sqlite``. A process killed at any moment leaves whole records and, at worst, bytes that
nothing points to.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvrag import arguments
from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.files import check_writable, store_error
from kvrag.store.loose import LooseRecords
from kvrag.store.metrics import (
    MISS_ABSENT,
    MISS_UNREADABLE,
    CountedStore,
    StoreMetrics,
)
from kvrag.store.segment_index import DamagedIndexError, SegmentIndex
from kvrag.store.segment_writer import IndexWriter, is_end
from kvrag.store.segments import (
    FOLDER_NAME,
    SEGMENT_BYTES,
    FileRecord,
    OpenFile,
    Place,
    SegmentFiles,
)
from kvrag.store.wrapper import read_whole

# Share of a segment in use below which its records are moved so that it can be removed.
_LEAST_USED = 0.5
# Most bytes written between two flushes, when many records are put at once.
_BATCH_BYTES = 32 << 20
# Look-ups of a record that is being moved while its place is read from the index.
_MAX_TRIES = 5


class FileStore(CountedStore):
    """Records in a folder, which is created when the first record is put.

    The store leaves other files alone. Several processes may share the folder.

    Parameters
    ----------
    path
        The folder.
    segment_bytes
        Size after which a segment takes no more records; None means 256 MiB.

    Raises
    ------
    StoreError
        When `path` is not a folder, or holds an index of records that this version cannot read.
    ParameterError
        When `path` is not a path.
    """

    def __init__(self, path: str | Path, *, segment_bytes: int | None = None) -> None:
        self.path = arguments.path(path, "path").absolute()
        self.url = f"file:{self.path}"
        try:
            is_other = self.path.exists() and not self.path.is_dir()
        except OSError as error:
            raise store_error("use", self.path, error) from error
        if is_other:
            raise store_error("use", self.path, NotADirectoryError(errno.ENOTDIR, "not a folder"))
        self._loose = LooseRecords(self.path)
        self._segments = SegmentFiles(self.path / FOLDER_NAME)
        self._index = SegmentIndex(self.path)
        self._segment_bytes = SEGMENT_BYTES if segment_bytes is None else segment_bytes
        self.metrics = StoreMetrics("file")

    def check_writable(self) -> None:
        """Raise StoreError if no record could be written; this writes nothing to find out."""
        check_writable(self.path)

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; when this returns, the record is on the medium.

        An existing record stays. When several threads or processes put one key at the same time,
        one of the records stays, whole.

        Raises
        ------
        StoreError
            When the record cannot be written; no part of it is then visible.
        """
        if not self.contains(key):
            self._write([(key, record)])

    def put_many(self, records: Iterable[tuple[ChunkKey, bytes]]) -> None:
        """Write records as `put` does, many between two flushes of the medium.

        Raises
        ------
        StoreError
            When one cannot be written; some of those before it may be there.
        """
        for batch in _batches((key, one) for key, one in records if not self._loose.contains(key)):
            self._write(batch)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; readers keep the one they opened.

        Raises
        ------
        StoreError
            When it cannot be written; the old record then stays.
        """
        self._write([(key, record)], is_replacing=True)
        # The new record is found first; the old one must not come back when the new one is deleted.
        self._loose.delete(key)

    def open(self, key: ChunkKey) -> FileRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        StoreError
            When the record exists but cannot be opened.
        """
        try:
            with self.metrics.timing():
                record = self._open_packed(key) or self._open_loose(key)
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
        return self._is_there(self._index.find(key)) or self._loose.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Readers that have it open keep it.

        Its room is reclaimed when its segment has no record left, or by `collect_garbage`.
        """
        was_loose = self._loose.delete(key)
        place = self._index.find(key)
        if place is None:
            return was_loose
        # A power cut may bring the record back, which does no harm: the record is intact.
        with self._index.writing("delete from", is_durable=False) as writer:
            was_packed = writer.remove(key)
            is_last = self._is_done_with(writer, place.segment)
        if is_last:
            # Before its bytes go the deletion must be durable: the record must not come back.
            with self._index.writing("delete from") as writer:
                is_last = self._is_done_with(writer, place.segment)
                if is_last:
                    writer.drop_segment(place.segment)
            if is_last:
                self._segments.remove(place.segment)
        return was_packed or was_loose

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        yield from self._index.sizes()
        for key, size_bytes in self._loose.sizes():
            if self._index.find(key) is None:
                yield key, size_bytes

    def keys(self) -> Iterator[ChunkKey]:
        """Iterate over the keys, in no particular order."""
        return (key for key, _ in self.sizes())

    def size_bytes(self) -> int:
        """Total size of all records, in bytes."""
        loose = sum(size for key, size in self._loose.sizes() if self._index.find(key) is None)
        return self._index.size_bytes() + loose

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove leftovers of killed processes, and reclaim the room of deleted records.

        Records in separate files are moved into segments. Segments that are more than half unused
        are rewritten without the deleted records. Readers that have a record open keep it.

        Parameters
        ----------
        min_age_seconds
            Younger temporary files stay: another process may still be writing them.

        Returns
        -------
        int
            Number of leftover files removed.

        Raises
        ------
        StoreError
            When something cannot be moved or removed.
        """
        num_removed = self._loose.collect_garbage(min_age_seconds)
        self._pack_loose()
        if not self._index.path.is_file():
            return num_removed
        self.compact()
        with self._index.writing() as writer:
            # A segment is made only in this transaction: a file not in the index is garbage.
            known = writer.named()
            for number in self._segments.numbers():
                if number not in known and self._segments.length(number) is not None:
                    self._segments.remove(number)
                    num_removed += 1
        return num_removed

    def compact(self) -> int:
        """Rewrite segments that are more than half unused; return how many were removed.

        Raises
        ------
        StoreError
            When the medium refuses; no record is lost.
        """
        with self._index.writing() as writer:
            # The last segment is being filled: leave it alone unless nothing in it is needed.
            *full, (last, last_used) = writer.segments() or [(0, 1)]
            wasteful = [
                number
                for number, used in full
                if used < _LEAST_USED * (self._segments.length(number) or 1)
            ]
            if last_used == 0:
                wasteful.append(last)
        return sum(map(self._move_out_of, wasteful))

    def damage(self) -> list[str]:
        """Return what is wrong with the index of records, as lines of text.

        Raises
        ------
        StoreError
            When the medium refuses.
        """
        if found := self._index.damage():
            return found
        for number, end, last in self._index.ends():
            length = self._segments.length(number)
            if length is not None and not is_end(end, last, length):
                found.append(
                    f"{self._index.path}: segment {number} is said to be in use up to byte {end}, "
                    f"its records end at {last or 0} and its file at {length}"
                )
        return found

    def mend(self) -> None:
        """Mend the index of records; those that it cannot name any more are missing then.

        An index that cannot be mended is set aside as ``records.sqlite.damaged``.

        Raises
        ------
        StoreError
            When the medium refuses.
        """
        self._index.close()
        try:
            with self._index.writing() as writer:
                numbers = self._segments.numbers()
                lengths = {number: self._segments.length(number) for number in numbers}
                writer.mend({number: one for number, one in lengths.items() if one is not None})
        except DamagedIndexError:
            self._index.begin_again()
        if self._index.damage():
            self._index.begin_again()

    def close(self) -> None:
        """Close the index of records; opened records stay readable."""
        self._index.close()

    # -- private -----------------------------------------------------------------------------

    def _write(self, records: list[tuple[ChunkKey, bytes]], *, is_replacing: bool = False) -> None:
        try:
            written = self._write_new(records, is_replacing)
        except DamagedIndexError:
            self._index.begin_again()
            written = self._write_new(records, is_replacing)
        if written:
            self.metrics.wrote(written)

    def _write_new(self, records: list[tuple[ChunkKey, bytes]], is_replacing: bool) -> int:
        """Write records in one transaction; return how many bytes those were that it wrote."""
        with self._index.writing() as writer:
            if not is_replacing:
                records = [
                    (key, record)
                    for key, record in dict(reversed(records)).items()
                    if not self._is_there(writer.find(key))
                ]
            if records:
                self._append(writer, records)
        return sum(len(record) for _, record in records)

    def _is_there(self, place: Place | None) -> bool:
        """Return whether the file of a record's segment reaches to the record's end."""
        if place is None or place.offset < 0:
            return False
        return place.offset + place.size_bytes <= (self._segments.length(place.segment) or 0)

    def _append(
        self, writer: IndexWriter, records: list[tuple[ChunkKey, bytes]], avoiding: int = 0
    ) -> None:
        segment, end, last = writer.last_segment()
        length = self._segments.length(segment) if segment not in (0, avoiding) else None
        if end is None or length is None or not last <= end <= length or end >= self._segment_bytes:
            # A segment whose noted end cannot be right stays as it is. Skip the number of a file
            # that a killed process, or a lost index, left in the folder.
            numbers = self._segments.numbers()
            segment, end = max(writer.next_segment(), *(number + 1 for number in numbers), 1), 0
        places = self._segments.append(segment, end, [record for _, record in records])
        for (key, _), place in zip(records, places, strict=True):
            writer.set(key, place)

    def _is_done_with(self, writer: IndexWriter, segment: int) -> bool:
        """Return whether a segment is full and holds no records any more."""
        return segment != writer.last_segment()[0] and writer.is_empty(segment)

    def _open_packed(self, key: ChunkKey) -> FileRecord | None:
        for _ in range(_MAX_TRIES):
            place = self._index.find(key)
            if place is None:
                return None
            file = self._segments.open(place.segment)
            if file is not None:
                file.require(key, place.offset, place.size_bytes)
                return FileRecord(key, file, place.offset, place.size_bytes, self.metrics)
            if self._index.find(key) == place:
                # Not moved: another process removed the file meanwhile.
                return None
        return None

    def _open_loose(self, key: ChunkKey) -> FileRecord | None:
        found = self._loose.open(key)
        if found is None:
            return None
        descriptor, size_bytes = found
        file = OpenFile(self._loose.path_of(key), descriptor)
        return FileRecord(key, file, 0, size_bytes, self.metrics)

    def _pack_loose(self) -> None:
        for batch in _batches(self._loose_records()):
            self._write(batch)
            for key, _ in batch:
                self._loose.delete(key)

    def _loose_records(self) -> Iterator[tuple[ChunkKey, bytes]]:
        for key, _ in self._loose.sizes():
            record = self._open_loose(key)
            if record is not None:
                with contextlib.closing(record):
                    yield key, read_whole(record)

    def _move_out_of(self, segment: int) -> bool:
        with self._index.writing() as writer:
            for batch in _batches(self._needed_of(writer, segment)):
                # New records may have made it the segment that is being filled.
                self._append(writer, batch, avoiding=segment)
            writer.drop_segment(segment)
        self._segments.remove(segment)
        return True

    def _needed_of(self, writer: IndexWriter, segment: int) -> Iterator[tuple[ChunkKey, bytes]]:
        """Yield the records in a segment that are still readable."""
        file = self._segments.open(segment)
        for key, place in writer.places(segment):
            try:
                if file is None:
                    raise RecordError(f"record {key}: its segment is gone")
                file.require(key, place.offset, place.size_bytes)
                content = bytearray(place.size_bytes)
                file.read_into(key, place.offset, memoryview(content))
            except RecordError:
                writer.remove(key)
            else:
                yield key, bytes(content)


def _batches(
    records: Iterable[tuple[ChunkKey, bytes]],
) -> Iterator[list[tuple[ChunkKey, bytes]]]:
    """Group records to be written between two flushes."""
    batch: list[tuple[ChunkKey, bytes]] = []
    num_bytes = 0
    for key, record in records:
        batch.append((key, record))
        num_bytes += len(record)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
