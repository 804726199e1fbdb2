"""Chunks through a codec: the bytes of real records, what they lose, and their entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, EncodedChunk
from kvrag.codec.container import RecordReader
from kvrag.codec.level import LevelCoder
from kvrag.codec.lossless import LosslessCodec, rest_bits, split
from kvrag.codec.pipeline import PipelineChunk, PipelineCodec
from kvrag.codec.tables import NUM_CONTEXTS, coarser, digit_contexts, digit_symbols, to_symbols
from kvrag.ingest.coding import read_all
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.entropy import ideal_bits
from kvrag.store.memory import MemoryRecord
from kvrag_bench.codec.cutting import cut_record
from kvrag_bench.codec.sources import Source

KEY = ChunkKey("6b76726167" * 4)


@dataclass(frozen=True)
class Point:
    """Where a codec stands between rate and distortion.

    Attributes
    ----------
    bits, entropy
        Bits an element: of everything stored, and of the symbols under their tables (None where
        there are none).
    error, balanced_error
        See `CodecRow`.
    """

    bits: float
    entropy: float | None
    error: float
    balanced_error: float


class Meter:
    """Adds up what chunks of a source take and lose.

    Parameters
    ----------
    source
        Whose means errors are measured against.
    """

    def __init__(self, source: Source) -> None:
        self._means = source.means
        shape = (2, source.spec.num_layers)
        self._errors = torch.zeros(shape, dtype=torch.float64)
        self._energy = torch.zeros(shape, dtype=torch.float64)
        self._num_elements = 0
        self._num_bits = 0.0
        self._entropy: float | None = 0.0

    def add(self, kv: ChunkKV, found: ChunkKV, num_bits: float, entropy: float | None) -> None:
        """Take one chunk in.

        Parameters
        ----------
        found
            What came back of it.
        num_bits, entropy
            Of the whole record, and of its symbols.
        """
        pairs = ((kv.keys, found.keys), (kv.values, found.values))
        for kind, (true, decoded) in enumerate(pairs):
            difference = (decoded.float() - true.float()).square()
            self._errors[kind] += difference.sum((1, 2, 3)).double()
            about = (true.float() - self._means[kind]).square()
            self._energy[kind] += about.sum((1, 2, 3)).double()
        self._num_elements += 2 * kv.keys.numel()
        self._num_bits += num_bits
        missing = self._entropy is None or entropy is None
        self._entropy = None if missing else (self._entropy or 0.0) + (entropy or 0.0)

    def point(self) -> Point:
        """Return the mean over everything added."""
        energy = self._energy.clamp(min=1e-30)
        return Point(
            bits=self._num_bits / self._num_elements,
            entropy=None if self._entropy is None else self._entropy / self._num_elements,
            error=float(self._errors.sum() / energy.sum()),
            balanced_error=float((self._errors / energy).mean()),
        )


def measure_codec(
    codec: Codec,
    source: Source,
    chunks: Sequence[ChunkKV],
    planes: Sequence[int | None] = (None,),
) -> list[Point]:
    """Encode chunks, decode them, and return what they take and lose.

    Parameters
    ----------
    planes
        After how many planes to cut the records of codec ``pipeline``; None keeps all.

    Returns
    -------
    list of Point
        One for each of `planes`.
    """
    meters = [Meter(source) for _ in planes]
    entropy_of = _entropy_meter(codec)
    for kv in chunks:
        whole = codec.encode(KEY, kv)
        for num_planes, meter in zip(planes, meters, strict=True):
            record = whole
            if num_planes is not None:
                assert isinstance(codec, PipelineCodec)
                record = cut_record(whole, num_planes, len(codec.profile.transform.plans))
            chunk = codec.open(KEY, MemoryRecord(KEY, record), source.spec)
            found = read_all(chunk, source.spec)
            meter.add(kv, found, 8.0 * len(record), entropy_of(kv, chunk, record))
    return [meter.point() for meter in meters]


def _entropy_meter(codec: Codec) -> Callable[[ChunkKV, EncodedChunk, bytes], float | None]:
    """Return what gives the code length of the symbols of a chunk's record."""
    if isinstance(codec, LosslessCodec):
        of_level = LevelCoder(codec.profile, codec.profile.levels[0])
        return lambda kv, _chunk, _record: _lossless_entropy(of_level, kv)
    if not isinstance(codec, PipelineCodec):
        return lambda _kv, _chunk, _record: None
    coders = [LevelCoder(codec.profile, level) for level in codec.profile.levels]

    def measure(_kv: ChunkKV, chunk: EncodedChunk, record: bytes) -> float:
        assert isinstance(chunk, PipelineChunk)
        header = RecordReader(MemoryRecord(KEY, record), KEY).header
        return _pipeline_entropy(coders[header.level], chunk, len(header.blocks))

    return measure


def _pipeline_entropy(coder: LevelCoder, chunk: PipelineChunk, num_blocks: int) -> float:
    """Return the code length of a record's symbols, all planes that it has."""
    transform = coder.profile.transform
    num_planes = num_blocks // len(transform.plans)
    bits = 0.0
    for block in range(len(transform.plans)):
        known = [torch.from_numpy(chunk.block(block).values).int()]
        for _ in range(num_planes - 1):
            known.insert(0, coarser(known[0]))
        classes = coder.classes(block)
        n = coder.level.planes[0].num_rows[block]
        symbols, _ = to_symbols(known[0][:n], coder.level.planes[0].frequencies, classes[:n])
        bits += ideal_bits(coder.models[0], symbols, classes[:n])
        for number in range(1, num_planes):
            n = coder.level.planes[number].num_rows[block]
            before = known[number - 1][:n]
            bits += ideal_bits(
                coder.models[number],
                digit_symbols(known[number][:n], before).numpy(),
                (classes[:n] * NUM_CONTEXTS).astype(np.uint16),
                context=digit_contexts(before).numpy(),
            )
    return bits


def _lossless_entropy(coder: LevelCoder, kv: ChunkKV) -> float:
    """Return the code length of exponents, and the bits of what is stored as it is."""
    dtype = coder.profile.spec.dtype
    bits = 0.0
    for block, plan in enumerate(coder.profile.transform.plans):
        exponents, rest = split(plan.stack(kv.keys, kv.values))
        centres, _ = split(coder.level.steps[block].to(dtype))
        classes = coder.classes(block)
        frequencies = coder.level.planes[0].frequencies
        symbols, _ = to_symbols(exponents - centres[:, None], frequencies, classes)
        bits += ideal_bits(coder.models[0], symbols, classes)
        bits += rest.numel() * rest_bits(dtype)
    return bits


def bytes_per_token(spec: KVSpec, bits: float) -> float:
    """Return the bytes per token at `bits` per element."""
    return bits / 8 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
