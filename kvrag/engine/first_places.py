"""Records of chunks that may stand first in a prompt, made while nobody asks.

Without them, the first prompt that begins with a chunk computes it for that place
(`kvrag.ingest.on_demand`), and takes about three times as long as its repetition.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Iterator

from kvrag.ingest.index import Index
from kvrag.store.capabilities import ChecksWritable, Limits, capability

logger = logging.getLogger("kvrag")

_IDLE_SECONDS = 0.5
# Each record takes as much room as the chunk's other one.
_MOST_BYTES = 1 << 30
_LEAST_FREE_BYTES = 2 << 30


class _InterruptedError(Exception):
    """Somebody asks, or the end has come."""


class FirstPlaces:
    """Makes the first places of an index's chunks in a thread, from `with` to its end.

    Chunks that searches found most often come first. It writes at most 1 GiB, and nothing where
    that would push other records out of the store, or fill the disk.

    Parameters
    ----------
    index
        The index.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._changed = threading.Condition()
        self._num_asking = 0
        self._num_asked = 0
        self._is_stopped = False
        self._done: set[str] = set()
        self._room = _MOST_BYTES
        self._thread = threading.Thread(target=self._run, name="kvrag-first-places", daemon=True)

    def __enter__(self) -> FirstPlaces:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()  # at most a layer of one chunk

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts, nothing is made: what was begun is dropped at its next layer."""
        with self._changed:
            self._num_asking += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_asking -= 1
                self._num_asked += 1
                self._changed.notify_all()

    def make(self) -> None:
        """Make what is missing, as far as there is room. Raises as `OnDemand.make` does."""
        for chunk_id in self._wanted():
            if self._room <= 0 or shutil.disk_usage(self._index.path).free < _LEAST_FREE_BYTES:
                return
            self._room -= self._index.on_demand.make(chunk_id, self._check)
            self._done.add(chunk_id)

    def _run(self) -> None:
        try:
            if not self._may_write():
                return
            while (num_asked := self._idle()) is not None:
                with contextlib.suppress(_InterruptedError):
                    self.make()
                    self._wait_for_another(num_asked)
        except Exception as error:  # no answer depends on it, and nobody waits for it
            logger.warning("first places of prompts are not prepared: %s", error)

    def _may_write(self) -> bool:
        index = self._index
        if index.compression is not None or capability(index.store, Limits) is not None:
            return False
        if (checks := capability(index.store, ChecksWritable)) is not None:
            checks.check_writable()
        return True

    def _idle(self) -> int | None:
        """Wait until nobody has asked for a while; return how many have, or None at the end."""
        with self._changed:
            while not self._is_stopped:
                self._changed.wait_for(lambda: self._is_stopped or not self._num_asking)
                if not self._changed.wait_for(self._is_unwanted, _IDLE_SECONDS):
                    return self._num_asked
            return None

    def _wait_for_another(self, num_asked: int) -> None:
        """Wait for the end of the next request: only a request brings new chunks."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._num_asked != num_asked)

    def _is_unwanted(self) -> bool:
        return self._is_stopped or self._num_asking > 0

    def _check(self) -> None:
        if self._is_unwanted():
            raise _InterruptedError

    def _wanted(self) -> Iterator[str]:
        """Yield the ids of chunks that nobody has looked at here, those asked for most first."""
        index = self._index
        asked = Counter(index.found_chunk_ids)
        yield from (one for one, _ in asked.most_common() if one not in self._done)
        for source in index.catalog.documents.digests():
            self._check()
            yield from (one for one in index.catalog.chunk_ids_of(source) if one not in self._done)
