"""KV of passages that belong to no document: token ids alone, stored under a name.

A passage has the same key as a chunk of the same tokens after the same prefix, so the later one of
the two finds the record in the store. `gc` keeps what any name still needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey, chunk_key
from kvrag.errors import ParameterError, RecordError
from kvrag.ingest.config import no_kv, writer_lock
from kvrag.ingest.maintenance import KEPT_FOLDER, write_kept
from kvrag.ingest.stages import BackgroundWriter

if TYPE_CHECKING:
    from kvrag.codec.base import EncodedChunk
    from kvrag.ingest.index import Index
    from kvrag.kvcache import ChunkKV

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")


@dataclass(frozen=True)
class Passage:
    """Tokens whose KV is kept.

    Attributes
    ----------
    prefix_ids
        Token ids that it is encoded after, as they begin prompts.
    token_ids
        The passage's token ids, at least one.
    context_ids
        Token ids between the prefix and the passage during encoding.
    start
        Position of the first token. It matters only for KV that is bound to positions.
    """

    prefix_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...] = ()
    start: int | None = None


@dataclass(frozen=True)
class KeepReport:
    """The result of keeping passages.

    Attributes
    ----------
    num_passages, num_tokens
        Number of passages and tokens in the request.
    num_records, num_tokens_computed, size_bytes
        New records, with their tokens and bytes.
    seconds, prefill_seconds
        Total wall time, and the time of the model's forward passes.
    """

    num_passages: int
    num_tokens: int
    num_records: int
    num_tokens_computed: int
    size_bytes: int
    seconds: float
    prefill_seconds: float


class Passages:
    """Keeps passages next to an index's chunks, in the same store.

    Parameters
    ----------
    index
        The index.

    Raises
    ------
    ParameterError
        When the index stores no KV.
    """

    def __init__(self, index: Index) -> None:
        if not index.config.has_kv:
            raise ParameterError(no_kv(index.path, index.model.why_whole))
        self.index = index

    def key_of(self, passage: Passage) -> ChunkKey:
        """Return the name of a passage's KV."""
        config = self.index.config
        options = {}
        if self._bound_start(passage) is not None:
            options["position"] = str(passage.start)
        return chunk_key(
            tenant_salt=bytes.fromhex(config.tenant_salt),
            model_fingerprint=config.model_fingerprint,
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            prefix_ids=passage.prefix_ids,
            token_ids=passage.token_ids,
            context_ids=passage.context_ids,
            options=options,
        )

    def _bound_start(self, passage: Passage) -> int | None:
        """Return the position that a passage's KV is bound to, or None if it is not."""
        behind = len(passage.prefix_ids) + len(passage.context_ids)
        if not self.index.model.is_position_bound or passage.start in (None, behind):
            return None
        return passage.start

    def keep(
        self,
        name: str,
        passages: Sequence[Passage],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> KeepReport:
        """Compute and store missing records, and keep all passages until `forget`.

        Parameters
        ----------
        name
            The name to store them under; replaces the passages under that name.
        on_progress
            Called with the number of finished records and the number to do.

        Raises
        ------
        ParameterError
            When the name is not valid.
        IndexLockedError
            When another process is writing to the index.
        StoreError
            When the store refuses a write; records already stored stay.
        """
        started = time.perf_counter()
        index = self.index
        path = self._path(name)
        by_key = {self.key_of(one): one for one in passages}
        size_bytes = 0
        prefill_seconds = 0.0
        with writer_lock(index.path):
            missing = [(key, one) for key, one in by_key.items() if not index.store.contains(key)]
            # Before the records: the lock keeps others from collecting a record without a name,
            # and the next run completes the name that a killed run leaves.
            path.parent.mkdir(exist_ok=True)
            keys = {key.digest: len(one.token_ids) for key, one in sorted(by_key.items())}
            write_kept(path, keys)
            if missing:
                chunks = [_as_chunk(one) for _, one in missing]
                codec = index.upkeep.codec_for(chunks)
                missing.sort(key=lambda pair: (len(pair[1].token_ids), pair[0]))
                with BackgroundWriter() as writer:
                    for number, (key, one) in enumerate(missing):
                        begun = time.perf_counter()
                        before = (*one.prefix_ids, *one.context_ids)
                        start = self._bound_start(one)
                        (kv,) = index.model.prefill(
                            before, [one.token_ids], None if start is None else [start]
                        )
                        prefill_seconds += time.perf_counter() - begun

                        def store(key: ChunkKey = key, kv: ChunkKV = kv) -> None:
                            nonlocal size_bytes
                            record = codec.encode(key, kv)
                            index.store.put(key, record)
                            size_bytes += len(record)

                        writer.submit(store)
                        if on_progress is not None:
                            on_progress(number + 1, len(missing))
        return KeepReport(
            num_passages=len(passages),
            num_tokens=sum(len(one.token_ids) for one in passages),
            num_records=len(missing),
            num_tokens_computed=sum(len(one.token_ids) for _, one in missing),
            size_bytes=size_bytes,
            seconds=time.perf_counter() - started,
            prefill_seconds=prefill_seconds,
        )

    def forget(self, name: str) -> bool:
        """Stop keeping a name's passages; the next `gc` removes their records."""
        path = self._path(name)
        with writer_lock(self.index.path):
            known = path.exists()
            path.unlink(missing_ok=True)
        return known

    def open(self, passage: Passage) -> EncodedChunk | None:
        """Open a passage's KV, or return None if there is none.

        Raises
        ------
        RecordError
            When the record is damaged, or has another number of tokens.
        StoreError
            When the store cannot be read.
        """
        index = self.index
        key = self.key_of(passage)
        record = index.store.open(key)
        if record is None:
            return None
        try:
            encoded = index.coding.open(key, record, index.config.spec)
            if encoded.num_tokens != len(passage.token_ids):
                raise RecordError(
                    f"record {key} holds {encoded.num_tokens} tokens, expected "
                    f"{len(passage.token_ids)}"
                )
        except BaseException:
            record.close()
            raise
        return encoded

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ParameterError(f"name {shown(name)}: expected letters, digits, '_', '.' and '-'")
        return self.index.path / KEPT_FOLDER / f"{name}.json"


def _as_chunk(passage: Passage) -> Chunk:
    """Return a passage as a chunk, for fitting codecs."""
    starts = tuple(range(len(passage.token_ids)))
    return Chunk("", "", passage.token_ids, starts, "", 0, contexts=(passage.context_ids,))
