"""The codec that consists of stages, driven by a profile: transform, quantiser, entropy coder.

In each plane, a record has one block for each block of the transform. `docs/format.md` describes
the bytes. Records are read straight into the fused buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec import tables as t
from kvrag.codec.base import Destination, StoredForCards, check_layer_index
from kvrag.codec.block import COUNT, MATRIX, BlockReader, pack_streams, place_channels
from kvrag.codec.container import RecordReader
from kvrag.codec.level import CodedBlock, LevelCoder, ProfiledCodec
from kvrag.codec.pca import Components
from kvrag.codec.profile import Profile
from kvrag.codec.transforms import KINDS, greatest_tame
from kvrag.errors import RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.entropy import stream_offsets
from kvrag.native.reconstruction import Points, Rotation, contexts, reconstruct, refine
from kvrag.positions.rotary import RotaryTable

NAME = "pipeline"
# Tokens whose error exceeds the level's mean by this factor are stored as the model gave them:
# attention sinks and the like, which a basis fitted to ordinary tokens does not describe.
OUTLIER_FACTOR = 64.0


class PipelineCodec(ProfiledCodec):
    """Encodes with one level of a profile; reads records of every level of it.

    Parameters
    ----------
    profile
        The profile, fitted to the model.
    label
        The codec's name in indexes and on the command line.
    level
        Name of the level to encode with.

    Raises
    ------
    ParameterError
        If the profile does not have the level.
    """

    name = NAME

    def __init__(self, profile: Profile, label: str, level: str) -> None:
        super().__init__(profile)
        self.label = label
        self._level_index = profile.level_index(level)
        self._coders = [LevelCoder(profile, one) for one in profile.levels]

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        self.check_fitted(kv)
        coder = self._coders[self._level_index]
        by_block = [
            self.encode_block(coder, block, plan.gather(kv))
            for block, plan in enumerate(self.profile.transform.plans)
        ]
        # The coarsest plane of all blocks comes first: a reader that stops early has every layer.
        blocks = [planes[index] for index in range(len(coder.level.planes)) for planes in by_block]
        return self.write(key, kv, blocks, self._level_index)

    def open_record(self, reader: RecordReader, spec: KVSpec) -> PipelineChunk:
        self.require(reader, spec)
        coder = self._coders[reader.header.level]
        num_planes, left = divmod(len(reader.header.blocks), len(self.profile.transform.plans))
        if left or not 1 <= num_planes <= len(coder.level.planes):
            reader.refuse(
                "number of blocks",
                f"{len(self.profile.transform.plans)} for each of 1 to {len(coder.level.planes)} "
                "planes",
                str(len(reader.header.blocks)),
            )
        return PipelineChunk(reader, coder, num_planes)

    def encode_block(
        self, coder: LevelCoder, block: int, channels: torch.Tensor
    ) -> list[list[bytes | memoryview]]:
        """Return the payloads of a block's planes."""
        wild = channels.abs().amax(0) > greatest_tame(self.profile.spec.dtype)
        tame = torch.where(wild, 0.0, channels) if bool(wild.any()) else channels
        coded = self._quantise(coder, block, tame, torch.zeros(0, dtype=torch.int64))
        finest = len(coder.level.planes) - 1
        found = coder.channels(finest, block, coded)
        errors = self.profile.transform.errors(block, found, tame)
        most = OUTLIER_FACTOR * float(coder.level.distortion[block]) + 1e-12
        outliers = (wild | (errors > most)).nonzero()[:, 0]
        if len(outliers):
            coded = self._quantise(coder, block, tame, outliers)
        raw = channels[:, outliers].T.to(self.profile.spec.dtype).contiguous()
        return self._write_block(coder, block, replace(coded, raw_tokens=outliers, raw=raw))

    def _quantise(
        self, coder: LevelCoder, block: int, channels: torch.Tensor, left_out: torch.Tensor
    ) -> CodedBlock:
        """Return a block's whole numbers. Tokens in `left_out` become zeros, which cost least."""
        level, quantiser = coder.level, self.profile.config.quantiser
        steps = level.steps[block]
        rows = self.profile.transform.analyse(block, channels)[: len(steps)] / steps[:, None]
        rows[:, left_out] = 0.0
        classes = torch.from_numpy(coder.classes(block).astype(np.int64))
        limits = coder.limits(block)[:, None]
        values = t.quantise(rows, level.costs, classes, quantiser.rate_weight).clamp(
            -limits, limits
        )
        nothing = torch.zeros(0, dtype=torch.int64)
        return CodedBlock(values.to(torch.int16).numpy(), nothing, torch.zeros(0, 0))

    def _write_block(
        self, coder: LevelCoder, block: int, coded: CodedBlock
    ) -> list[list[bytes | memoryview]]:
        known = [torch.from_numpy(coded.values).int()]
        for _ in coder.level.planes[1:]:
            known.insert(0, t.coarser(known[0]))
        classes = coder.classes(block)
        n = coder.level.planes[0].num_rows[block]
        frequencies = coder.level.planes[0].frequencies
        symbols, escaped = t.to_symbols(known[0][:n], frequencies, classes[:n])
        streams = pack_streams(coder.models[0], symbols, classes[:n])
        planes: list[list[bytes | memoryview]] = [
            [
                COUNT.pack(len(coded.raw_tokens)),
                MATRIX.pack(len(escaped), len(streams)),
                coded.raw_tokens.numpy().astype("<u4").tobytes(),
                coded.raw.flatten().view(torch.uint8).numpy().data,
                escaped.tobytes(),
                streams,
            ]
        ]
        for number, plane in enumerate(coder.level.planes[1:], 1):
            n = plane.num_rows[block]
            before = known[number - 1][:n]
            symbols = t.digit_symbols(known[number][:n], before).numpy()
            which, context = classes[:n] * t.NUM_CONTEXTS, t.digit_contexts(before).numpy()
            streams = pack_streams(coder.models[number], symbols, which, context)
            planes.append([COUNT.pack(len(streams)), streams])
        return planes


@dataclass(frozen=True)
class CodedPart:
    """A plane of a block as it is stored, checked except for what its streams say.

    Attributes
    ----------
    block, plane
        Which one.
    streams
        Where each stream begins in the memory that was read to, and where the last one ends.
    escaped, num_escaped
        Where the numbers without a symbol are, int16, and how many.
    raw
        Where the channels of the tokens are that are not quantised, in the model's type.
    raw_tokens
        Those tokens, ascending.
    """

    block: int
    plane: int
    streams: NDArray[np.int64]
    escaped: int
    num_escaped: int
    raw: int
    raw_tokens: NDArray[np.int64]


class PipelineChunk(StoredForCards):
    """An opened record of the pipeline codec (an `EncodedChunk`).

    A block's numbers are decoded when the first of its layers is requested, and kept until its last
    layer is placed.

    Attributes
    ----------
    coder
        The record's level.
    num_planes
        How many planes are decoded.
    """

    def __init__(self, reader: RecordReader, coder: LevelCoder, num_planes: int) -> None:
        super().__init__(reader)
        self.coder = coder
        self.num_planes = num_planes
        self._blocks: dict[int, CodedBlock] = {}
        self._lock = threading.Lock()

    def coded_blocks(self, layers: range) -> list[range]:
        blocks = self.coder.blocks_of(layers)
        size = len(self.coder.profile.transform.plans)
        firsts = range(0, self.num_planes * size, size)
        return [range(one + blocks.start, one + blocks.stop) for one in firsts]

    def coded_parts(self, layers: range, pieces: Sequence[memoryview]) -> list[CodedPart]:
        parts, end = [], 0
        for plane, blocks in enumerate(self.coded_blocks(layers)):
            first = end
            for number in blocks:
                size = self._reader.header.blocks[number].padded_bytes
                content = pieces[plane][end - first : end - first + size]
                fields = BlockReader(self._reader, number, content)
                parts.append(self._part(plane, fields, number, end))
                end += size
        return parts

    def _part(self, plane: int, fields: BlockReader, number: int, begin: int) -> CodedPart:
        coder = self.coder
        block = number - plane * len(coder.profile.transform.plans)
        num_escaped, raw, raw_tokens = 0, 0, np.zeros(0, np.int64)
        if plane:
            (num_bytes,) = fields.unpack(COUNT)
        else:
            (num_raw,) = fields.unpack(COUNT)
            num_escaped, num_bytes = fields.unpack(MATRIX)
            raw = begin + fields.position + 4 * num_raw
            raw_tokens, _ = self._raw(fields, block, num_raw)
        escaped = begin + fields.position
        fields.take(2 * num_escaped)
        first = begin + fields.position
        num_rows = coder.level.planes[plane].num_rows[block]
        content = fields.streams(num_rows * self.num_tokens, num_bytes)
        streams = np.zeros(1, np.int64)
        if num_rows:
            try:
                streams = stream_offsets(np.frombuffer(content, np.uint8), num_rows)
            except RecordError as error:
                fields.refuse("streams", "those that were written", str(error))
        fields.end()
        return CodedPart(block, plane, first + streams, escaped, num_escaped, raw, raw_tokens)

    def refuse_streams(self) -> NoReturn:
        """Raise RecordError: some streams turned out not to be what was written."""
        self._reader.refuse("streams", "those that were written", "others")

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        blocks = self._reader.header.blocks
        size = len(self.coder.profile.transform.plans)
        return tuple(
            sum(block.padded_bytes for block in blocks[begin : begin + size])
            for begin in range(0, len(blocks), size)
        )

    def use(self, num_planes: int) -> None:
        with self._lock:
            self.num_planes = num_planes
            self._blocks.clear()

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._reader.header.spec
        check_layer_index(layer_index, spec.num_layers)
        with torch.inference_mode(False), torch.no_grad():
            shape = (spec.num_kv_heads, self.num_tokens, spec.head_dim)
            keys, values = (torch.empty(shape, dtype=spec.dtype) for _ in range(2))
            whole = slice(0, self.num_tokens)
            for kind, out in zip(KINDS, (keys, values), strict=True):
                self._write(layer_index, kind, out, whole, None)
        return keys, values

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        check_layer_index(layer_index, self._reader.header.spec.num_layers)
        for one in into:
            positions = one.table.at(one.rows)
            self._write(layer_index, "keys", one.keys, one.tokens, positions)
            self._write(layer_index, "values", one.values, one.tokens, None)
        self._forget(layer_index)

    def _write(
        self,
        layer_index: int,
        kind: str,
        out: torch.Tensor,
        tokens: slice,
        positions: RotaryTable | None,
    ) -> None:
        """Write one kind of one layer to `out` ``[H, n, D]``, rotated if there are `positions`."""
        coder, plane = self.coder, self.num_planes - 1
        transform = coder.profile.transform
        block = coder.block_of(layer_index, kind)
        coded = self.block(block)
        if not isinstance(transform, Components):
            spec = coder.profile.spec
            which = transform.plans[block].channels_of(spec, layer_index, kind)
            channels = coder.channels(plane, block, coded)[which, tokens]
            place_channels(channels.to(out.device), out, positions)
            return
        if out.device.type != "cpu" or (positions is not None and positions.in_pairs):
            host = torch.empty(out.shape, dtype=out.dtype)
            self._write(layer_index, kind, host, tokens, None)
            if positions is None:
                out.copy_(host)
            else:
                positions.place(host.to(out.device), slice(0, len(positions.cos)), out)
            return
        synthesis = coder.synthesis(plane, layer_index, kind)
        rotation = None if positions is None else Rotation(positions.cos, positions.sin)
        numbers, shrink = coded.values, synthesis.shrink
        basis, mean = synthesis.basis, synthesis.mean
        reconstruct(Points(numbers, shrink), basis, mean, out, rotation=rotation, tokens=tokens)
        for index, token in enumerate(coded.raw_tokens.tolist()):
            if tokens.start <= token < tokens.stop:
                one = slice(token - tokens.start, token - tokens.start + 1)
                there = None
                if positions is not None:
                    there = positions.at(one)
                channels = coded.raw[index, synthesis.channels].float()[:, None]
                place_channels(channels, out[:, one], there)

    def _forget(self, layer_index: int) -> None:
        """Drop blocks whose last layer this was: prompts are filled layer by layer."""
        with self._lock:
            for number, plan in enumerate(self.coder.profile.transform.plans):
                if plan.layers[-1] == layer_index:
                    self._blocks.pop(number, None)

    def block(self, block: int) -> CodedBlock:
        """Return the whole numbers of a block. Raises as `read_layer` does."""
        with self._lock:
            found = self._blocks.get(block)
            if found is None:
                found = self._blocks[block] = self._read_block(block)
            return found

    def _read_block(self, block: int) -> CodedBlock:
        # Each length below is checked against the rest of the block before it is used.
        coder = self.coder
        fields = BlockReader(self._reader, block)
        (num_raw,) = fields.unpack(COUNT)
        sizes = fields.unpack(MATRIX)
        raw_tokens, raw = self._raw(fields, block, num_raw)
        classes = coder.classes(block)[: coder.level.planes[0].num_rows[block]]
        values = fields.values(coder.models[0], classes, self.num_tokens, *sizes)
        fields.end()
        for number in range(1, self.num_planes):
            values = self._refine(number, block, values)
        return CodedBlock(values, torch.from_numpy(raw_tokens), raw)

    def _raw(
        self, fields: BlockReader, block: int, num_raw: int
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Return the tokens that are kept raw, and their channels."""
        plan, spec = self.coder.profile.transform.plans[block], self.coder.profile.spec
        shape = (plan.num_channels(spec),)
        return fields.raw_tokens(num_raw, self.num_tokens, shape, spec.dtype)

    def _refine(self, number: int, block: int, known: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the numbers of a plane, given those of the plane before it."""
        coder = self.coder
        fields = BlockReader(self._reader, number * len(coder.profile.transform.plans) + block)
        num_rows = coder.level.planes[number].num_rows[block]
        (num_bytes,) = fields.unpack(COUNT)
        values = np.zeros((num_rows, known.shape[1]), dtype=np.int16)
        values[: len(known)] = known[:num_rows]
        context = np.empty(values.shape, dtype=np.uint8)
        contexts(values, context)
        classes = coder.classes(block)[:num_rows] * t.NUM_CONTEXTS
        symbols = fields.symbols(coder.models[number], classes, values.shape[1], num_bytes, context)
        refine(values, symbols)
        fields.end()
        return values
