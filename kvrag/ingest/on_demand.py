"""Records that ingestion leaves out, and the first prompt that needs one makes.

In an index with a filler, or context ``similar``, these are the records of chunks alone. Such a
record is exact where its chunk stands first in a prompt, and most chunks never do. Making it costs
that prompt what computing the chunk would have cost. A thread then stores it, for later prompts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from kvrag.chunk import Chunk, ChunkKey
from kvrag.fusion.layout import MAX_EDGE_TOKENS, Layout
from kvrag.fusion.loader import MadeChunk, NotMadeError
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.storage import Storage

if TYPE_CHECKING:
    from kvrag.codec.base import EncodedChunk
    from kvrag.fusion.loader import OpenKV
    from kvrag.kvcache import ChunkKV

logger = logging.getLogger("kvrag")

_MAX_WAITING = 4
"""KV of at most this many chunks waits in memory to be stored; more is used and not kept."""
_PAUSE_SECONDS = 60.0
"""After a store has refused a record, how long no other is offered to it."""


class OnDemand:
    """Makes the optional records of one index (`Chunk.is_optional`). Safe for several threads.

    It needs no writer's lock: a store takes records from several processes, and the catalog already
    names these, so that garbage collection keeps them.

    Parameters
    ----------
    storage, encoders
        The storage and the encoders of the index.
    """

    def __init__(self, storage: Storage, encoders: Encoders) -> None:
        self._storage = storage
        self._encoders = encoders
        self._making = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "kvrag-keep")
        self._waiting: dict[ChunkKey, ChunkKV] = {}
        self._refused_until = 0.0
        self._has_warned = False

    def opener(self, open_kv: OpenKV, layout: Layout, *, makes: bool = True) -> OpenKV:
        """Return `open_kv` for one prompt, for which it makes missing optional records.

        It makes them where the prompt has the whole chunk at the place where the record is exact.
        Elsewhere, making one would cost more than computing what the prompt has of the chunk.

        Parameters
        ----------
        open_kv
            Opens records of the index.
        layout
            The prompt's layout.
        makes
            False makes none: the model computes only some heads, and records have all.
        """
        exact = [span for span in layout.spans if makes and layout.is_exact(span)]
        ends = {span.record_id: span.chunk_end for span in exact}

        def open_or_make(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
            record = open_kv(chunk_id, context_ids)
            if record is not None:
                return record
            for chunk in self._storage.catalog.chunks([chunk_id]):
                if chunk.is_optional(context_ids):
                    end = ends.get((chunk_id, context_ids), 0)
                    if end < len(chunk.token_ids) - MAX_EDGE_TOKENS:
                        raise NotMadeError
                    return self._make(replace(chunk, contexts=(context_ids,)), open_kv)
            return None

        return open_or_make

    def make_all(self, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Make and store every optional record that the store lacks; return their number.

        Parameters
        ----------
        on_progress
            Called after each chunk, with the number of chunks looked at and of all chunks.

        Raises
        ------
        StoreError
            When the store refuses a record. Those made before are kept.
        IndexFormatError
            When the catalog is damaged.
        """
        chunk_ids: list[str] = []
        self._storage.catalog.texts.each_text(lambda chunk_id, _: chunk_ids.append(chunk_id))
        num_made = 0
        for num_done, chunk_id in enumerate(chunk_ids, start=1):
            num_made += self.make(chunk_id, lambda: None) > 0
            if on_progress is not None:
                on_progress(num_done, len(chunk_ids))
        return num_made

    def make(self, chunk_id: str, check: Callable[[], None]) -> int:
        """Make and store the record of a chunk alone if the store lacks it; return its bytes.

        It is optional, or the only one: what the chunk was encoded after was deleted.

        Parameters
        ----------
        check
            Called before and during the work. An error that it raises ends it, with nothing stored.

        Raises
        ------
        StoreError, IndexFormatError
            As `make_all` does.
        """
        check()
        storage, num_bytes = self._storage, 0
        chunks = storage.catalog.chunks([chunk_id] * storage.config.chunk_context.is_shared)
        for alone in chain.from_iterable(chunk.encodings() for chunk in chunks):
            key = storage.config.key_of(alone)
            if not alone.contexts[0] and not storage.store.contains(key):
                num_bytes += self._store(key, alone, self._encoders.prefill(alone, check))
        return num_bytes

    def flush(self) -> None:
        """Wait until everything that was made is stored."""
        with contextlib.suppress(RuntimeError):  # the index is closed, which stored everything
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Store what was made, and end the thread."""
        self._thread.shutdown()

    # -- private -----------------------------------------------------------------------------

    def _make(self, alone: Chunk, open_kv: OpenKV) -> EncodedChunk | None:
        key = self._storage.config.key_of(alone)
        # One after the other, as the model computes. A prompt that waited finds what another made.
        with self._making:
            kv = self._waiting.get(key)
            if kv is not None:
                return MadeChunk(kv, None)
            record = open_kv(alone.chunk_id, alone.contexts[0])
            if record is not None:
                return record
            started = time.perf_counter()
            with torch.inference_mode(False):  # another thread reads it
                kv = self._encoders.prefill(alone)
            seconds = time.perf_counter() - started
            if len(self._waiting) < _MAX_WAITING and time.monotonic() >= self._refused_until:
                self._waiting[key] = kv
                try:
                    self._thread.submit(self._keep, key, alone, kv)
                except RuntimeError:  # the index is being closed, or there are too many threads
                    self._waiting.pop(key, None)
            return MadeChunk(kv, seconds)

    def _keep(self, key: ChunkKey, alone: Chunk, kv: ChunkKV) -> None:
        """Store what a prompt has made."""
        try:
            self._store(key, alone, kv)
        except Exception as error:  # the answer does not depend on it, and nobody waits for it
            self._refused_until = time.monotonic() + _PAUSE_SECONDS
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "chunks that stand first in a prompt cannot be stored, and are computed each "
                    "time: %s",
                    error,
                )
        finally:
            self._waiting.pop(key, None)

    def _store(self, key: ChunkKey, alone: Chunk, kv: ChunkKV) -> int:
        """Store a record, unless its chunk was removed meanwhile; return its bytes."""
        storage = self._storage
        storage.reload_codec()
        record = storage.coding.codec.encode(key, kv)
        if storage.catalog.chunks([alone.chunk_id]):
            storage.store.put(key, record)
        return len(record)
