"""One fetch of a record, shared by all readers that want it at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError
from kvrag.store.base import StoredRecord, check_range
from kvrag.store.wrapper import room_for

# The least read at once: a request costs as much as some hundred kilobytes.
_GRANULE_BYTES = 256 << 10
_MISSING, _COMING, _HERE = range(3)


class Fetch:
    """A record on its way from a slow tier into memory; each byte is requested once.

    Readers ask for ranges, as for any record. If another reader is fetching a range, this one waits
    for it; if that reader fails, this one tries.

    Parameters
    ----------
    key
        The record's key.
    source
        The slow tier's opened record.
    on_complete
        Called once with all bytes, by the thread that reads the last of them.

    Raises
    ------
    RecordError
        When the record's stated size is larger than memory.
    """

    def __init__(
        self, key: ChunkKey, source: StoredRecord, on_complete: Callable[[Fetch, bytearray], None]
    ) -> None:
        self.key = key
        self._source = source
        self._on_complete = on_complete
        self._content = room_for(source)
        num_granules = -(-source.size_bytes // _GRANULE_BYTES)
        self._states = bytearray(num_granules)
        self._changed = threading.Condition()
        self._num_left = num_granules
        self._num_readers = 0

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return len(self._content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; raises as `StoredRecord.read_into` does."""
        check_range(self.key, self.size_bytes, offset, buffer.nbytes)
        end = offset + buffer.nbytes
        granules = range(offset // _GRANULE_BYTES, -(-end // _GRANULE_BYTES))
        while (run := self._claim(granules)) is not None:
            self._bring(run)
        buffer[:] = memoryview(self._content)[offset:end]

    def join(self) -> None:
        """Add a reader."""
        with self._changed:
            self._num_readers += 1

    def leave(self) -> bool:
        """Remove a reader; the last one closes the record. Return whether this was the last."""
        with self._changed:
            self._num_readers -= 1
            is_last = not self._num_readers
        if is_last:
            self._source.close()
        return is_last

    def _claim(self, granules: range) -> range | None:
        """Claim the next run of missing granules for this thread; None when all are here."""
        with self._changed:
            while True:
                states = self._states[granules.start : granules.stop]
                first = states.find(_MISSING)
                if first >= 0:
                    begin = granules.start + first
                    stop = begin
                    while stop < granules.stop and self._states[stop] == _MISSING:
                        self._states[stop] = _COMING
                        stop += 1
                    return range(begin, stop)
                if states.find(_COMING) < 0:
                    return None
                self._changed.wait()

    def _bring(self, run: range) -> None:
        begin, stop = run.start * _GRANULE_BYTES, min(run.stop * _GRANULE_BYTES, self.size_bytes)
        state = _MISSING
        try:
            self._source.read_into(begin, memoryview(self._content)[begin:stop])
            state = _HERE
        finally:
            with self._changed:
                self._states[run.start : run.stop] = bytes([state]) * len(run)
                if state == _HERE:
                    self._num_left -= len(run)
                is_complete = state == _HERE and not self._num_left
                self._changed.notify_all()
        if is_complete:
            self._on_complete(self, self._content)


class FetchReader:
    """One reader of a `Fetch`."""

    def __init__(self, fetch: Fetch, on_close: Callable[[Fetch], None]) -> None:
        self._fetch: Fetch | None = fetch
        self._on_close = on_close
        self._size_bytes = fetch.size_bytes

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; raises as `StoredRecord.read_into` does."""
        fetch = self._fetch
        if fetch is None:
            raise StoreError("cannot read the record: it was closed; open it again")
        fetch.read_into(offset, buffer)

    def close(self) -> None:
        """Leave the fetch."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._on_close(fetch)

    def __del__(self) -> None:
        self.close()
