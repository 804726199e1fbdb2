"""Records of chunks that may stand first in a prompt, made while nobody asks.

Without them, the first prompt that begins with a chunk computes it for that place
(`kvrag.ingest.on_demand`), and takes about three times as long as its repetition.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from kvrag.engine.idle import Idle, IdleJob
from kvrag.ingest.index import Index
from kvrag.store.capabilities import ChecksWritable, Limits, capability

# Each record takes as much room as the chunk's other one.
_MOST_BYTES = 1 << 30
_LEAST_FREE_BYTES = 2 << 30


class FirstPlaces(IdleJob):
    """Makes the first places of an index's chunks.

    Chunks that searches found most often come first. It writes at most 1 GiB, and nothing where
    that would push other records out of the store, or fill the disk.

    Parameters
    ----------
    index
        The index.
    """

    if_it_fails = "first places of prompts are not prepared"

    def __init__(self, index: Index) -> None:
        self._index = index
        self._done: set[str] = set()
        self._room = _MOST_BYTES

    def work(self, idle: Idle) -> None:
        """Make what is missing, as far as there is room. Raises as `OnDemand.make` does."""
        if not self._may_write:
            return
        for chunk_id in self._wanted(idle):
            if self._room <= 0 or shutil.disk_usage(self._index.path).free < _LEAST_FREE_BYTES:
                return
            self._room -= self._index.on_demand.make(chunk_id, idle.check)
            self._done.add(chunk_id)

    @cached_property
    def _may_write(self) -> bool:
        index = self._index
        if index.compression is not None or capability(index.store, Limits) is not None:
            return False
        if (checks := capability(index.store, ChecksWritable)) is not None:
            checks.check_writable()
        return True

    def _wanted(self, idle: Idle) -> Iterator[str]:
        """Yield the ids of chunks that nobody has looked at here, those asked for most first."""
        index = self._index
        asked = Counter(index.found_chunk_ids)
        yield from (one for one, _ in asked.most_common() if one not in self._done)
        for source in index.catalog.documents.digests():
            idle.check()
            yield from (one for one in index.catalog.chunk_ids_of(source) if one not in self._done)
