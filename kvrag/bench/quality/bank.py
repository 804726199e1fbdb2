"""The chunks of all questions: computed once each, stored in memory through every codec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvrag.bench.quality.questions import RenderedPrompt
from kvrag.chunk import Chunk, ChunkKey, chunk_key, content_hash
from kvrag.codec.base import Codec, EncodedChunk
from kvrag.fusion.layout import Layout, lay_out
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.segments import ChunkMatcher
from kvrag.models.kv_model import KVModel
from kvrag.store.memory import MemoryStore

# Tokens prefilled at once, padding included: enough for full speed, little beside the weights.
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class _Shelf:
    codec: Codec
    store: MemoryStore


class ChunkBank:
    """Distinct chunks and their records.

    Policies read what the codec wrote, not what the model computed, so that a codec's loss is
    judged as an index would have it.

    Parameters
    ----------
    model
        The model judged.
    texts
        Normalised chunk texts; those that come again are kept once.
    codecs
        Each stores every chunk.
    on_progress
        Receives the chunks done and their number.
    """

    def __init__(
        self,
        model: KVModel,
        texts: Iterable[str],
        codecs: Sequence[Codec],
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self.model = model
        self.prefix_ids = model.default_prefix_ids()
        self._shelves = {codec.label: _Shelf(codec, MemoryStore()) for codec in codecs}
        chunks = list(_tokenised(model.tokenizer, dict.fromkeys(texts)))
        self._chunks = {chunk.chunk_id: chunk for chunk in chunks}
        self._keys = {chunk.chunk_id: self._key(chunk) for chunk in chunks}
        self._matcher = ChunkMatcher()
        for chunk in chunks:
            self._matcher.add(chunk.chunk_id, chunk.text)
        num_done = 0
        for batch in _batches(chunks):
            on_progress(num_done, len(chunks))
            kvs = model.prefill(self.prefix_ids, [chunk.token_ids for chunk in batch])
            for chunk, kv in zip(batch, kvs, strict=True):
                key = self._keys[chunk.chunk_id]
                for shelf in self._shelves.values():
                    shelf.store.put(key, shelf.codec.encode(key, kv))
            num_done += len(batch)

    def lay_out(self, prompt: RenderedPrompt) -> Layout:
        """Find the chunks in a prompt and lay them over its tokens."""
        return lay_out(
            prompt.text,
            self.model.tokenizer,
            self._matcher.find(prompt.text),
            self._chunks,
            self.prefix_ids,
            add_special_tokens=prompt.add_special_tokens,
        )

    def opener(self, codec: str) -> OpenKV:
        """Return what opens the records of one codec."""
        shelf = self._shelves[codec]

        def open_kv(chunk_id: str, context_ids: tuple[int, ...] = ()) -> EncodedChunk | None:
            assert not context_ids, "chunks have one record here, encoded behind the prefix alone"
            key = self._keys[chunk_id]
            source = shelf.store.open(key)
            return None if source is None else shelf.codec.open(key, source, self.model.spec)

        return open_kv

    def stored(self, codec: str, texts: Sequence[str]) -> tuple[int, int]:
        """Return the bytes and the tokens of the records of some chunks."""
        num_bytes = num_tokens = 0
        for text in texts:
            chunk_id = content_hash(text)
            source = self._shelves[codec].store.open(self._keys[chunk_id])
            assert source is not None
            num_bytes += source.size_bytes
            num_tokens += len(self._chunks[chunk_id].token_ids)
        return num_bytes, num_tokens

    def _key(self, chunk: Chunk) -> ChunkKey:
        return chunk_key(
            tenant_salt=b"kvrag bench quality",
            model_fingerprint=self.model.fingerprint,
            tokenizer_fingerprint=self.model.tokenizer_fingerprint,
            prefix_ids=self.prefix_ids,
            token_ids=chunk.token_ids,
        )


def _tokenised(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[Chunk]:
    for text in texts:
        encoding = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        yield Chunk(
            chunk_id=content_hash(text),
            text=text,
            token_ids=tuple(encoding["input_ids"]),
            token_starts=tuple(start for start, _ in encoding["offset_mapping"]),
            source="data set",
            ordinal=0,
        )


def _batches(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Yield chunks of like lengths together, so that little is padding."""
    batch: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: len(chunk.token_ids)):
        if batch and (len(batch) + 1) * len(chunk.token_ids) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
