"""A context in a store that is reached over a shaped link, and each loading method's losses."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.codec.base import EncodedChunk
from kvrag.codec.container import RecordReader
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.layout import Layout
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_bench.setting import fit_codec
from kvrag_bench.stream.eight_bit import EightBitChunk, encode_eight_bit
from kvrag_corpus import generate_corpus


@dataclass(frozen=True)
class Level:
    """One way to have a chunk's KV.

    Attributes
    ----------
    num_bytes
        Of all chunks.
    relative_error
        Squared error of keys and values over their energy.
    """

    num_bytes: int
    relative_error: float

    @property
    def decibels(self) -> float:
        """The same as a signal-to-noise ratio."""
        return -10.0 * math.log10(self.relative_error)


@dataclass(frozen=True)
class StreamContext:
    """A prompt whose chunks are stored, in planes and in 8 bits.

    Attributes
    ----------
    index
        The index; its own store is near.
    layout
        The prompt.
    num_tokens
        Tokens of the chunks.
    levels
        With 1, 2, ... planes.
    eight_bit
        In 8 bits.
    """

    index: Index
    layout: Layout
    num_tokens: int
    levels: tuple[Level, ...]
    eight_bit: Level

    @property
    def num_chunks(self) -> int:
        """Chunks of the prompt."""
        return len(self.layout.spans)


@contextmanager
def stored_context(
    folder: Path, codec: str, num_chunks: int, chunk_tokens: int, seed: int
) -> Iterator[StreamContext]:
    """Yield a context of generated text, indexed with the shipped model."""
    model = KVModel.load("kvrag-tiny")
    texts, question = _texts(model, num_chunks, chunk_tokens, seed)
    with Index.create(
        folder / "index",
        model=model,
        embedding="hashing",
        chunk_tokens=2 * chunk_tokens,
        codec=codec,
        store=f"file:{folder / 'kv'}",
    ) as index:
        index.add([Document(source=f"text-{i}", text=text) for i, text in enumerate(texts)])
        fit_codec(index)
        layout = KVEngine(index).fuse("\n\n".join([*texts[:num_chunks], question])).layout
        if len(layout.spans) != num_chunks:
            raise ParameterError(
                f"bench stream: {len(layout.spans)} of {num_chunks} chunks were found in the "
                "prompt; take fewer or shorter ones"
            )
        chunks = index.get_chunks([span.chunk_id for span in layout.spans])
        levels, eight_bit = _store_and_measure(index, chunks)
        yield StreamContext(index, layout, sum(len(c.token_ids) for c in chunks), levels, eight_bit)


def _texts(model: KVModel, num_chunks: int, chunk_tokens: int, seed: int) -> tuple[list[str], str]:
    """Return documents of about `chunk_tokens` each, more than the prompt's, and a question."""
    wanted = 3 * num_chunks  # the codec is fitted to more than what is streamed
    encode = model.tokenizer.backend_tokenizer.encode
    texts: list[str] = []
    parts: list[str] = []
    corpus = generate_corpus(seed, num_questions=10 * wanted * max(1, chunk_tokens // 100))
    for document in corpus.documents:
        for paragraph in document.paragraphs:
            parts.append(paragraph)
            text = " ".join(parts)
            if len(encode(text, add_special_tokens=False).ids) >= chunk_tokens:
                texts.append(text)
                parts = []
            if len(texts) == wanted:
                return texts, corpus.questions[0].question
    raise ParameterError(f"bench stream: the corpus has no {wanted} texts; take fewer chunks")


def _store_and_measure(index: Index, chunks: Sequence[Chunk]) -> tuple[tuple[Level, ...], Level]:
    """Store the chunks in 8 bits as well; return what each level takes and loses."""
    errors: list[float] = []
    sizes: list[int] = []
    lost_in_8, bytes_in_8, energy = 0.0, 0, 0.0
    for chunk in chunks:
        (exact,) = index.model.prefill(index.prefix_ids, [chunk.token_ids])
        energy += float(exact.keys.square().sum() + exact.values.square().sum())
        key = eight_bit_key(index.key_of(chunk))
        record = encode_eight_bit(key, exact, index.config.spec)
        index.store.put(key, record)
        bytes_in_8 += len(record)
        in_8 = open_eight_bit(index, chunk.chunk_id)
        assert in_8 is not None
        lost_in_8 += _error(in_8, exact.keys, exact.values)
        opened = index.open_kv(chunk.chunk_id)
        assert opened is not None
        errors = errors or [0.0] * len(opened.plane_bytes)
        sizes = sizes or [0] * len(opened.plane_bytes)
        for number in range(len(opened.plane_bytes)):
            opened.use(number + 1)
            errors[number] += _error(opened, exact.keys, exact.values)
            sizes[number] += sum(opened.plane_bytes[: number + 1])
    levels = tuple(Level(size, error / energy) for size, error in zip(sizes, errors, strict=True))
    return levels, Level(bytes_in_8, lost_in_8 / energy)


def _error(chunk: EncodedChunk, keys: torch.Tensor, values: torch.Tensor) -> float:
    lost = 0.0
    for layer_index in range(len(keys)):
        for found, exact in zip(
            chunk.read_layer(layer_index), (keys[layer_index], values[layer_index]), strict=True
        ):
            lost += float((found - exact).square().sum())
    return lost


def eight_bit_key(key: ChunkKey) -> ChunkKey:
    """Return the key under which a chunk's 8-bit record is kept beside its own."""
    return ChunkKey(hashlib.sha256(b"8-bit " + key.digest.encode()).hexdigest()[:40])


def open_eight_bit(index: Index, chunk_id: str) -> EightBitChunk | None:
    """Open a chunk's 8-bit record."""
    key = eight_bit_key(index.key_of(index.get_chunks([chunk_id])[0]))
    record = index.store.open(key)
    return None if record is None else EightBitChunk(RecordReader(record, key))


def sleep_until(moment: float) -> None:
    """Sleep until a moment of `time.perf_counter`, unless it has passed."""
    left = moment - time.perf_counter()
    if left > 0.0:
        time.sleep(left)
