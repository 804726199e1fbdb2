"""The codec of numbers of fixed width: a row of bytes for each token, decoded in one pass.

A layer's block begins with the tokens kept raw; `docs/format.md` describes the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec.bands import FittedBands
from kvrag.codec.base import Destination, StoredForCards, check_layer_index
from kvrag.codec.block import COUNT, BlockReader
from kvrag.codec.container import RecordReader
from kvrag.codec.level import ProfiledCodec
from kvrag.codec.names import PACKED
from kvrag.codec.pipeline import OUTLIER_FACTOR
from kvrag.codec.profile import Profile
from kvrag.codec.transforms import KINDS, greatest_tame
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.packed import SLACK, place_packed
from kvrag.native.reconstruction import Rotation
from kvrag.positions.rotary import RotaryTable


class PackedCodec(ProfiledCodec):
    """Encodes with a profile fitted with the transform `Bands`.

    Parameters
    ----------
    profile
        The profile, fitted to the model.

    Attributes
    ----------
    transform
        Its bands.
    on_cards
        What `kvrag.codec.card` keeps of it, by card.
    """

    name = label = PACKED

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        assert isinstance(profile.transform, FittedBands)
        self.transform = profile.transform
        self.on_cards: dict[Any, Any] = {}

    def row_bytes(self, layer_index: int) -> int:
        """Return the bytes of a token's row in a layer's block."""
        return sum(one.row_bytes for one in self.transform.prepared_layer(layer_index))

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        spec = self.check_fitted(kv)
        blocks = [self.encode_layer(index, kv) for index in range(spec.num_layers)]
        return self.write(key, kv, blocks)

    def encode_layer(self, layer_index: int, kv: ChunkKV) -> list[bytes | memoryview]:
        """Return the parts of a layer's block."""
        plans, level = self.transform.plans, self.profile.levels[0]
        sizes = [bands.row_bytes for bands in self.transform.prepared_layer(layer_index)]
        rows = np.empty((kv.num_tokens, sum(sizes)), np.uint8)
        parts = np.split(rows, sizes[:1], axis=1)
        kept_raw, raw = np.zeros(kv.num_tokens, bool), []
        for block, part in enumerate(parts, len(KINDS) * layer_index):
            channels = plans[block].gather(kv)
            wild = channels.abs().amax(0) > greatest_tame(self.profile.spec.dtype)
            if bool(wild.any()):
                kept_raw |= wild.numpy()
                tame = torch.where(wild, 0.0, channels)
            else:
                tame = channels
            lost = self.transform.pack(block, tame, part)
            kept_raw |= ~(lost <= OUTLIER_FACTOR * float(level.distortion[block]) + 1e-12)
            raw.append(channels)
        (tokens,) = kept_raw.nonzero()
        numbers = torch.cat([one[:, tokens] for one in raw]).T.to(self.profile.spec.dtype)
        return [
            COUNT.pack(len(tokens)),
            tokens.astype("<u4").tobytes(),
            numbers.contiguous().flatten().view(torch.uint8).numpy().data,
            rows.data.cast("B"),
        ]

    def open_record(self, reader: RecordReader, spec: KVSpec) -> PackedChunk:
        self.require(reader, spec)
        reader.require_blocks(spec.num_layers)
        return PackedChunk(reader, self)


@dataclass(frozen=True)
class PackedPart:
    """A layer as it is stored, checked.

    Attributes
    ----------
    layer_index
        Which one.
    raw_tokens
        The tokens that are kept raw, ascending.
    raw
        Their numbers ``[n, 2, H, D]``; None: there are none.
    rows
        Where the first token's row begins in the memory that was read to.
    """

    layer_index: int
    raw_tokens: list[int]
    raw: torch.Tensor | None
    rows: int

    @property
    def raw_begin(self) -> int:
        """Where the raw numbers begin in that memory."""
        return self.rows - (0 if self.raw is None else self.raw.numel() * self.raw.itemsize)


class PackedChunk(StoredForCards):
    """An opened record of the packed codec (an `EncodedChunk`).

    Attributes
    ----------
    coder
        The record's codec.
    num_planes
        Of streams, which cards decode.
    """

    num_planes = 0

    def __init__(self, reader: RecordReader, codec: PackedCodec) -> None:
        super().__init__(reader)
        self.coder = codec

    def coded_blocks(self, layers: range) -> list[range]:
        return [layers]

    def coded_parts(self, layers: range, pieces: Sequence[memoryview]) -> list[PackedPart]:
        parts, begin = [], 0
        for layer_index in layers:
            size = self._reader.header.blocks[layer_index].padded_bytes
            content = pieces[0][begin : begin + size]
            parts.append(_part(self._reader, self.coder, layer_index, content, begin))
            begin += size
        return parts

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._reader.header.spec
        check_layer_index(layer_index, spec.num_layers)
        shape = (2, spec.num_kv_heads, self.num_tokens, spec.head_dim)
        with torch.inference_mode(False), torch.no_grad():
            both = torch.empty(shape, dtype=spec.dtype)
            layer = _Layer(self._reader, self.coder, layer_index)
            layer.write(both[0], both[1], slice(0, self.num_tokens))
        return both[0], both[1]

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        check_layer_index(layer_index, self._reader.header.spec.num_layers)
        layer = _Layer(self._reader, self.coder, layer_index)
        for one in into:
            table = one.table
            if one.keys.device.type == "cpu" and not table.in_pairs:
                layer.write(one.keys, one.values, one.tokens, table, one.rows)
                continue
            keys, values = (torch.empty(one.keys.shape, dtype=one.keys.dtype) for _ in range(2))
            layer.write(keys, values, one.tokens)
            table.place(keys.to(one.keys.device), one.rows, one.keys)
            one.values.copy_(values)


class _Scratch(threading.local):
    """One buffer for each thread, as large as the largest block read."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def bytes_of(self, reader: RecordReader, num_bytes: int) -> NDArray[np.uint8]:
        """Return at least this many bytes. Raises RecordError if memory is too small."""
        if len(self._bytes) < num_bytes:
            self._bytes = np.frombuffer(reader.room(num_bytes), np.uint8)
        return self._bytes


_scratch = _Scratch()


def _part(
    reader: RecordReader, codec: PackedCodec, layer_index: int, content: memoryview, begin: int = 0
) -> PackedPart:
    """Check a layer's block, which begins at a place in memory."""
    header = reader.header
    size = header.blocks[layer_index].size_bytes
    rows_bytes = header.num_tokens * codec.row_bytes(layer_index)
    if size == COUNT.size + rows_bytes and COUNT.unpack_from(content) == (0,):
        return PackedPart(layer_index, [], None, begin + COUNT.size)
    spec, fields = header.spec, BlockReader(reader, layer_index, content)
    (num_raw,) = fields.unpack(COUNT)
    shape = (len(KINDS), spec.num_kv_heads, spec.head_dim)
    tokens, raw = fields.raw_tokens(num_raw, header.num_tokens, shape, spec.dtype)
    rows = begin + fields.position
    fields.take(rows_bytes)
    fields.end()
    return PackedPart(layer_index, tokens.tolist(), raw, rows)


class _Layer:
    """One layer of a record, read and checked; the next one of the same thread overwrites it."""

    def __init__(self, reader: RecordReader, codec: PackedCodec, layer_index: int) -> None:
        size = reader.header.blocks[layer_index].padded_bytes
        self._keys, self._values = codec.transform.prepared_layer(layer_index)
        self._row_bytes = codec.row_bytes(layer_index)
        self._content = _scratch.bytes_of(reader, size + SLACK)
        content = self._content.data[:size]
        reader.read_block(layer_index, content)
        self._part = _part(reader, codec, layer_index, content)

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        tokens: slice,
        table: RotaryTable | None = None,
        rows: slice = slice(0),
    ) -> None:
        """Write some tokens of both kinds ``[H, n, D]``, keys turned by rows of a table."""
        stored = self._content, self._part.rows, self._row_bytes, tokens
        both = (self._keys, keys), (self._values, values)
        rotation = None if table is None else Rotation(table.cos, table.sin)
        place_packed(*stored, *both, rotation, rows.start or 0)
        raw = self._part.raw
        if raw is None:
            return
        for token, (key, value) in zip(self._part.raw_tokens, raw.unsqueeze(3), strict=True):
            at = token - tokens.start
            if not tokens.start <= token < tokens.stop:
                continue
            one = slice(at, at + 1)
            if table is None:
                keys[:, one] = key
            else:
                table.place(key, slice(rows.start + at, rows.start + at + 1), keys[:, one])
            values[:, one] = value
