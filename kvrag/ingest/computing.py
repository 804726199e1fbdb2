"""The vectors and the KV of chunks: what ingestion computes, on this machine or on others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.background import BackgroundWriter
from kvrag.ingest.failures import document_failures
from kvrag.ingest.rows import KeyOf
from kvrag.store.base import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvrag.codec.base import Codec
    from kvrag.ingest.embedding import Embedding
    from kvrag.kvcache import ChunkKV


_EMBEDDED_AT_ONCE = 32


@dataclass
class Outcome:
    """Counts of the work actually done."""

    num_records: int = 0
    num_tokens_computed: int = 0
    num_context_tokens: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0


def names_of(
    chunks: Iterable[Chunk], key_of: KeyOf
) -> tuple[dict[str, list[ChunkKey]], dict[ChunkKey, Chunk]]:
    """Return the names of all KV of each chunk by its id, and the required KV by its name."""
    keys: dict[str, list[ChunkKey]] = {}
    required: dict[ChunkKey, Chunk] = {}
    for chunk in chunks:
        keys[chunk.chunk_id] = [key_of(one) for one in chunk.encodings()]
        required |= {key_of(one): one for one in chunk.required()}
    return keys, required


def by_length(required: Mapping[ChunkKey, Chunk]) -> list[tuple[ChunkKey, Chunk]]:
    """Return KV by length, so that neighbouring passes reuse each other's buffers."""
    return sorted(
        required.items(),
        key=lambda one: (len(one[1].contexts[0]) + len(one[1].token_ids), one[0]),
    )


def reason_against(
    chunks: Iterable[Chunk],
    keys: Mapping[str, Sequence[ChunkKey]],
    bad_keys: Mapping[ChunkKey, str],
    bad_texts: Mapping[str, str],
) -> str | None:
    """Return why a document with these chunks cannot be indexed, or None if it can."""
    for chunk in chunks:
        for key in keys[chunk.chunk_id]:
            if key in bad_keys:
                return bad_keys[key]
        if chunk.text in bad_texts:
            return bad_texts[chunk.text]
    return None


def embed_chunks(
    embedding: Embedding, chunks: Iterable[Chunk], between: Callable[[], object] = lambda: None
) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    """Return vectors ``[num_windows, dim]`` by text, and reasons for the texts without any.

    `between` is called after each few texts; what it raises ends the work.
    """
    # Passages that several documents hold are embedded once.
    texts = list(dict.fromkeys(chunk.text for chunk in chunks))
    vectors: dict[str, NDArray[np.float32]] = {}
    with document_failures(lambda _: None):
        for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
            vectors |= _vectors(embedding, texts[start : start + _EMBEDDED_AT_ONCE])
            between()
        return vectors, {}
    # Either a text is at fault, or the embedding, which then fails for a plain word too.
    _vectors(embedding, ["word"])
    vectors = {}
    bad: dict[str, str] = {}
    for text in texts:
        with document_failures(functools.partial(bad.__setitem__, text)):
            vectors |= _vectors(embedding, [text])
    return vectors, {text: f"it cannot be embedded ({reason})" for text, reason in bad.items()}


def _vectors(embedding: Embedding, texts: list[str]) -> dict[str, NDArray[np.float32]]:
    import numpy as np

    rows = embedding.embed_windows(texts)
    if not all(np.isfinite(vectors).all() for vectors in rows):
        raise DocumentError("its vector is not finite")
    return dict(zip(texts, rows, strict=True))


class RecordMaker:
    """Computes the KV of chunks, and encodes and stores it.

    Parameters
    ----------
    store
        Where records go.
    prefill
        Computes the KV of one chunk after the first of its contexts.
    outcome
        Counts what is done.

    Attributes
    ----------
    codec
        The codec of the records; set before the first is made.
    """

    def __init__(self, store: Store, prefill: Callable[[Chunk], ChunkKV], outcome: Outcome) -> None:
        self.codec: Codec | None = None
        self._store = store
        self._prefill = prefill
        self._outcome = outcome
        self._last_encoded: Chunk | None = None
        self._is_doubted = False

    def make(
        self, key: ChunkKey, chunk: Chunk, writer: BackgroundWriter, bad: dict[ChunkKey, str]
    ) -> bool:
        """Compute a chunk's KV and queue its storing; note in `bad` why this failed.

        Returns whether it was computed.
        """
        codec = self.codec
        assert codec is not None
        started = time.perf_counter()
        fail = functools.partial(bad.__setitem__, key)
        kv: ChunkKV | None = None
        with document_failures(fail):
            kv = self._prefill(chunk)
        self._outcome.prefill_seconds += time.perf_counter() - started
        if kv is None or self._is_doubted:
            self._is_doubted = False
            # A model that fails where it succeeded before, or on a single token, is broken.
            one_token = replace(chunk, text="", token_ids=chunk.token_ids[:1])
            sample = self._prefill(self._last_encoded or one_token)
            writer.submit(lambda: codec.encode(key, sample))
        if kv is None:
            return False

        def store() -> None:
            record: bytes | None = None
            with document_failures(fail):
                try:
                    record = codec.encode(key, kv)
                except ParameterError as error:  # NaN or infinity
                    raise DocumentError(f"its KV cannot be encoded ({error})") from error
            if record is None:
                self._is_doubted = True  # the model, until it is asked again
                return
            self._last_encoded = chunk
            self._store.put(key, record)
            self._outcome.size_bytes += len(record)

        writer.submit(store)
        self._outcome.num_records += 1
        self._outcome.num_tokens_computed += len(chunk.token_ids)
        self._outcome.num_context_tokens += len(chunk.contexts[0])
        return True
