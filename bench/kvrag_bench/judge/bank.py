"""The chunks of all questions, each computed once and stored in memory through every codec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from kvrag.chunk import Chunk, ChunkKey, chunk_key, content_hash
from kvrag.codec.base import Codec, EncodedChunk
from kvrag.fusion.layout import Layout, lay_out
from kvrag.fusion.links import LinkTokens
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.segments import ChunkMatcher
from kvrag.ingest.contexts import NO_CONTEXT, SIMILAR, add_contexts, parse_context
from kvrag.kvcache import ChunkKV
from kvrag.models.adapter import RowAdapter
from kvrag.models.kv_model import KVModel
from kvrag.models.tokens import encode
from kvrag.store.memory import MemoryStore
from kvrag_bench.judge.questions import Passage, RenderedPrompt

# Tokens in one prefill, padding included: enough for full speed, and small next to the weights.
_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class _Shelf:
    codec: Codec
    store: MemoryStore


class ChunkBank:
    """Distinct chunks and their records.

    Policies read what the codec wrote, not what the model computed, so that they see a codec's loss
    as in an index.

    Parameters
    ----------
    model
        The model under test.
    passages
        The chunks, or only their normalised texts; duplicates are kept once.
    codecs
        The codecs, each of which stores every chunk.
    on_progress
        Called with the number of finished chunks, and the number of all.
    context
        What precedes chunks when they are encoded (`kvrag.ingest.contexts`).
    beside
        A bank of the same model and codecs: what it has encoded is used, not encoded
        again, and what is encoded here joins it.
    similar
        For each chunk's text, the tokens before it with context ``similar``.
    writer
        Acts while chunks are encoded after a context.
    """

    def __init__(
        self,
        model: KVModel,
        passages: Iterable[Passage | str],
        codecs: Sequence[Codec],
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
        context: str = NO_CONTEXT,
        beside: ChunkBank | None = None,
        similar: Mapping[str, tuple[int, ...]] | None = None,
        writer: LinkTokens | None = None,
    ) -> None:
        self.model = model
        self._writer = writer
        self.prefix_ids = model.default_prefix_ids()
        self._shelves: dict[str, _Shelf] = (
            {codec.label: _Shelf(codec, MemoryStore()) for codec in codecs}
            if beside is None
            else beside._shelves
        )
        self._context = parse_context(context)
        self._similar = similar or {}
        self._encode_prefix = lru_cache(maxsize=2)(
            lambda before: model.encode_prefix(before, self._adapter(before))
        )
        self._chunks: dict[str, Chunk] = {}
        self._matcher = ChunkMatcher()
        for passage in map(_as_passage, passages):
            chunk_id = self._id(passage)
            if chunk_id not in self._chunks:
                self._chunks[chunk_id] = self._chunk(chunk_id, passage)
                self._matcher.add(chunk_id, passage.text)
        # After a filler, `require` encodes a chunk alone for the one prompt in many that needs it.
        self._encode_missing(
            [one for chunk in self._chunks.values() for one in chunk.required()], on_progress
        )

    def require(self, layout: Layout) -> None:
        """Encode what a layout wants of its chunks and is not stored yet. Call it before fusing."""
        self._encode_missing(
            [
                replace(self._chunks[span.chunk_id], contexts=(span.context_ids,))
                for span in layout.spans
            ]
        )

    def lay_out(self, prompt: RenderedPrompt, passages: Sequence[Passage] = ()) -> Layout:
        """Find the chunks in a prompt and map them to its tokens.

        `passages` are the prompt's own: they distinguish chunks of one text in several documents.
        """
        hints = [self._id(passage) for passage in passages]
        (tokens,) = encode(self.model.tokenizer, [prompt.text], prompt.add_special_tokens)
        matches = self._matcher.find(prompt.text, hints)
        return lay_out(
            tokens,
            matches,
            self._chunks,
            self.prefix_ids,
            hints=hints,
            has_writer=self._writer is not None,
        )

    def opener(self, codec: str) -> OpenKV:
        """Return a function that opens the records of one codec."""
        shelf = self._shelves[codec]

        def open_kv(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
            key = self._key(replace(self._chunks[chunk_id], contexts=(context_ids,)))
            source = shelf.store.open(key)
            return None if source is None else shelf.codec.open(key, source, self.model.chunk_spec)

        return open_kv

    def stored(self, codec: str, passages: Iterable[Passage]) -> tuple[int, int]:
        """Return the size of the records that ingestion stores, and the chunks' number of tokens.

        After a filler, the record of a chunk alone is not among them (`Chunk.is_optional`).
        """
        num_bytes = num_tokens = 0
        for passage in passages:
            chunk = self._chunks[self._id(passage)]
            store = self._shelves[codec].store
            for one in chunk.required():
                record = store.open(self._key(one))
                assert record is not None, "a bank encodes these first"
                num_bytes += record.size_bytes
            num_tokens += len(chunk.token_ids)
        return num_bytes, num_tokens

    def _encode_missing(
        self, wanted: Iterable[Chunk], on_progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Encode and store chunks of one context each, except those that are stored."""
        store = next(iter(self._shelves.values())).store
        by_key = {self._key(one): one for one in wanted}
        missing = [one for key, one in by_key.items() if not store.contains(key)]
        num_done = 0
        for batch in _batches(missing):
            on_progress(num_done, len(missing))
            # A batch holds only chunks that are encoded after the same tokens.
            before = (*self.prefix_ids, *batch[0].contexts[0])
            kvs = self._encode(before, [one.token_ids for one in batch])
            for one, kv in zip(batch, kvs, strict=True):
                key = self._key(one)
                for shelf in self._shelves.values():
                    shelf.store.put(key, shelf.codec.encode(key, kv))
            num_done += len(batch)

    def _encode(
        self, before: tuple[int, ...], chunks: Sequence[Sequence[int]]
    ) -> Iterable[ChunkKV]:
        prefix = self._encode_prefix(before) if self._context.is_shared else before
        return self.model.prefill(prefix, chunks, adapter=self._adapter(before))

    def _adapter(self, before: tuple[int, ...]) -> RowAdapter | None:
        if self._writer is None or before == self.prefix_ids:
            return None
        return self._writer.adapter

    def _id(self, passage: Passage) -> str:
        before = passage.before if self._context.is_of_document else ()
        return content_hash("\0".join([*before, passage.text]))

    def _chunk(self, chunk_id: str, passage: Passage) -> Chunk:
        tokenizer = self.model.tokenizer
        earlier = passage.before if self._context.is_of_document else ()
        document = [_tokenised(tokenizer, text) for text in (*earlier, passage.text)]
        room = self.model.max_positions - len(self.prefix_ids)
        *_, last = add_contexts(document, tokenizer, self._context, room)
        before = self._similar[passage.text] if self._context.name == SIMILAR else ()
        if before:
            last = replace(last, contexts=(before, ()))
        # Its first text identifies a document, so that a prompt's text tells chunks apart.
        return replace(last, chunk_id=chunk_id, source=document[0].text, ordinal=len(earlier))

    def _key(self, chunk: Chunk) -> ChunkKey:
        return chunk_key(
            tenant_salt=b"kvrag bench quality",
            model_fingerprint=self.model.fingerprint,
            tokenizer_fingerprint=self.model.tokenizer_fingerprint,
            prefix_ids=self.prefix_ids,
            token_ids=chunk.token_ids,
            context_ids=chunk.contexts[0],
            options={"writer": self._writer.digest} if self._writer and chunk.contexts[0] else {},
        )


def _as_passage(given: Passage | str) -> Passage:
    return Passage(given) if isinstance(given, str) else given


def _tokenised(tokenizer: PreTrainedTokenizerBase, text: str) -> Chunk:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Chunk(
        chunk_id="",
        text=text,
        token_ids=tuple(encoding["input_ids"]),
        token_starts=tuple(start for start, _ in encoding["offset_mapping"]),
        source="data set",
        ordinal=0,
    )


def _batches(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Yield chunks with the same context and similar lengths together, to reduce padding."""
    batch: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.contexts, len(chunk.token_ids))):
        is_full = (len(batch) + 1) * len(chunk.token_ids) > _BATCH_TOKENS
        if batch and (is_full or chunk.contexts != batch[0].contexts):
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
