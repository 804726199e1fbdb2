"""Decoding records of the pipeline codec on a graphics card: many records, a few launches.

The host reads and checks bytes and finds the streams in them; the card gets them as they are
stored. There, one launch for each plane decodes the streams of all blocks and records, and one
transforms all numbers back to keys and values (kernels: ``cuda/triton/codec.py``).

The host decodes instead where the kernels cannot run, or decode otherwise than it does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec.container import RecordReader, write_record
from kvrag.codec.decoding import CodedPart, PipelineChunk
from kvrag.codec.level import LevelCoder
from kvrag.codec.pca import Components
from kvrag.codec.pipeline import NAME, PipelineCodec
from kvrag.codec.tables import NUM_CONTEXTS
from kvrag.codec.transforms import KINDS, ChannelRows
from kvrag.kvcache import KVSpec
from kvrag.native.entropy import decode_tables
from kvrag.native.gpu import tiled
from kvrag.native.gpu.compiling import Argument

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies numbers to the card, without waiting for it."""

_STATE_HALVES = 64
_TRIAL_TOKENS = 37


class CardLevel:
    """What a level of a profile has on a card, for records with that number of planes.

    Attributes
    ----------
    coder, num_planes
        The level, and how many planes are decoded.
    tables
        int32 ``[C, 4096]`` for each plane.
    classes
        int16: the class of each coded row, and what it is in planes after the first.
    num_rows
        How many rows of each block are decoded.
    shrink, steps
        float32 ``[R]`` for each block.
    bases
        float16 ``[R, N]`` for each block; empty if rows are channels.
    factors, means
        float32 ``[N]`` for each block.
    """

    def __init__(self, coder: LevelCoder, num_planes: int, device: torch.device) -> None:
        self.coder, self.num_planes = coder, num_planes
        transform, level = coder.profile.transform, coder.level
        assert isinstance(transform, Components | ChannelRows)
        last = num_planes - 1
        self.tables = [
            torch.from_numpy(decode_tables(plane.frequencies)).to(device)
            for plane in level.planes[:num_planes]
        ]
        classes = torch.from_numpy(level.classes.astype(np.int16))
        self.classes = classes.to(device), (classes * NUM_CONTEXTS).to(device)
        self.num_rows = level.planes[last].num_rows
        given = [(last, block, num) for block, num in enumerate(self.num_rows)]
        self.shrink = [coder.shrink(*one).to(device) for one in given]
        self.steps = [coder.steps(*one).contiguous().to(device) for one in given]
        self.means = [mean.to(device) for mean in transform.means]
        if isinstance(transform, Components):
            self.bases = transform.bases_on(device)
            self.factors = [weight.reciprocal().to(device) for weight in transform.weights]
        else:
            self.bases = []
            self.factors = [torch.ones(len(mean)).to(device) for mean in self.means]


_levels: weakref.WeakKeyDictionary[LevelCoder, dict[tuple[int, torch.device], CardLevel]]
_levels = weakref.WeakKeyDictionary()


def _level_on(coder: LevelCoder, num_planes: int, device: torch.device) -> CardLevel:
    kept = _levels.setdefault(coder, {})
    if (num_planes, device) not in kept:
        kept[num_planes, device] = CardLevel(coder, num_planes, device)
    return kept[num_planes, device]


@dataclass(frozen=True)
class Coded:
    """Layers of a record, as they were read into a payload, and where they belong.

    Attributes
    ----------
    number
        The record's number in the decoding.
    begin
        Where its bytes begin in the payload, an even number.
    parts
        What `PipelineChunk.read_coded` returned.
    into
        Memory of the card for the layers, of the KV's type.
    stride
        Elements from layer to layer there: keys ``[H, T, D]``, values, padding.
    """

    number: int
    begin: int
    parts: Sequence[CodedPart]
    into: torch.Tensor
    stride: int


class CardDecoding:
    """Decodes records of a prompt, a group of layers at a time.

    Parameters
    ----------
    records
        The open records; `can_decode` has said yes to each.
    device
        The card.

    Attributes
    ----------
    starts
        The layers at which a group may begin: blocks of all records begin there.
    flags
        int32 for each record, on the card: not 0 once its streams have turned out to be damaged.
    """

    def __init__(self, records: Sequence[PipelineChunk], device: torch.device) -> None:
        self._device = device
        self._levels = [_level_on(one.coder, one.num_planes, device) for one in records]
        self._num_tokens = [one.num_tokens for one in records]
        plans = [level.coder.profile.transform.plans for level in self._levels]
        self.starts = set.intersection(*({one.layers.start for one in some} for some in plans))
        self.flags = torch.zeros(len(records), dtype=torch.int32, device=device)

    def decode(
        self, layers: range, payload: torch.Tensor, read: Sequence[Coded], upload: Upload
    ) -> None:
        """Start to decode a group of layers, on the current stream.

        Parameters
        ----------
        layers
            The layers, from one of `starts` to another.
        payload
            The records' bytes, uint8 on the card, aligned to 16 bytes.
        read
            Records' layers, at least one's.
        upload
            Called once.
        """
        work = _Work(layers, max(level.num_planes for level in self._levels))
        for one in read:
            work.add(one, self._levels[one.number], self._num_tokens[one.number])
        tables = work.tables()
        numbers = upload(torch.from_numpy(np.concatenate([one.ravel() for one in tables])))
        pieces = torch.split(numbers, [one.size for one in tables])
        jobs = dict(zip(work.names(), pieces, strict=True))
        made = torch.empty(work.num_numbers, dtype=torch.int16, device=self._device)
        counts = torch.empty(len(work.streams[0]), dtype=torch.int32, device=self._device)
        bits, found = payload.view(torch.int16), (made, self.flags, counts)
        for plane, streams in enumerate(work.streams):
            where = bits, jobs[f"plane {plane}"]
            self._start("rans", (len(streams),), *where, *found, REFINES=int(plane > 0))
            if not plane and work.escapes:
                self._start("escapes", (len(work.escapes),), bits, jobs["escapes"], *found)
        spec = self._levels[0].coder.profile.spec
        for sums, entries in enumerate(work.entries):
            constants = _constants(spec, sums)
            tile = tiled.tiling_of("synthesise", self._device, **constants)["BT"]
            longest = max((entry[2] for entry in entries), default=0)
            grid = -(-longest // tile), len(entries) * spec.num_kv_heads
            given = made, jobs[f"entries {sums}"], read[0].into, spec.num_kv_heads
            self._start("synthesise", grid, *given, **constants)
        if work.kept:
            self._start("kept", (len(work.kept),), bits, jobs["kept"])

    def _start(
        self,
        name: str,
        grid: tuple[int, ...],
        *arguments: Argument,
        **constants: int,
    ) -> None:
        dtype = self._levels[0].coder.profile.spec.dtype
        tiled.start(name, grid, *arguments, dtype=dtype, device=self._device, **constants)


class _Work:
    """The tables that the kernels read for a group of layers; the sources say what a line means.

    Attributes
    ----------
    streams
        Lines for each plane.
    escapes, kept
        Lines.
    entries
        Lines where rows are channels, and lines where they are components.
    num_numbers
        Numbers of all blocks together.
    """

    def __init__(self, layers: range, num_planes: int) -> None:
        self._layers = layers
        self.streams: list[list[list[int]]] = [[] for _ in range(num_planes)]
        self.escapes: list[list[int]] = []
        self.kept: list[list[int]] = []
        self.entries: tuple[list[list[int]], list[list[int]]] = ([], [])
        self.num_numbers = 0

    def names(self) -> list[str]:
        """Return the names of the tables."""
        planes = [f"plane {plane}" for plane in range(len(self.streams))]
        return [*planes, "entries 0", "entries 1", "escapes", "kept"]

    def tables(self) -> list[NDArray[np.int64]]:
        """Return the tables."""
        every = [*self.streams, *self.entries, self.escapes, self.kept]
        return [np.array(one, np.int64) for one in every]

    def add(self, read: Coded, level: CardLevel, num_tokens: int) -> None:
        """Add layers of a record."""
        first = {}
        for block in level.coder.blocks_of(self._layers):
            first[block] = self.num_numbers
            rows = max(plane.num_rows[block] for plane in level.coder.level.planes)
            self._add_entries(read, level, block, num_tokens)
            self.num_numbers += rows * num_tokens
        for part in read.parts:
            self._add_streams(read, level, part, first[part.block], num_tokens)
            if not part.plane:
                self._add_kept(read, level, part, num_tokens)

    def _add_entries(self, read: Coded, level: CardLevel, block: int, num_tokens: int) -> None:
        transform, spec = level.coder.profile.transform, level.coder.profile.spec
        width, plan = spec.num_kv_heads * spec.head_dim, transform.plans[block]
        for layer_index in plan.layers:
            for kind in plan.kinds:
                channel = plan.channels_of(spec, layer_index, kind).start
                basis = channel
                if level.bases:
                    basis = level.bases[block].data_ptr() + 2 * channel
                into = (layer_index - self._layers.start) * read.stride
                into += KINDS.index(kind) * width * num_tokens
                self.entries[bool(level.bases)].append(
                    [
                        self.num_numbers,
                        level.num_rows[block],
                        num_tokens,
                        basis,
                        plan.num_channels(spec),
                        level.shrink[block].data_ptr(),
                        level.steps[block].data_ptr(),
                        level.factors[block].data_ptr() + 4 * channel,
                        level.means[block].data_ptr() + 4 * channel,
                        read.into.data_ptr() + into * read.into.itemsize,
                    ]
                )

    def _add_streams(
        self, read: Coded, level: CardLevel, part: CodedPart, place: int, num_tokens: int
    ) -> None:
        rows = [plane.num_rows[part.block] for plane in level.coder.level.planes]
        jobs, num_streams = self.streams[part.plane], len(part.streams) - 1
        first_job = len(jobs)
        first_class = level.coder.level.class_slices[part.block].start
        for stream in range(num_streams):
            start, stop = (one * rows[part.plane] // num_streams for one in (stream, stream + 1))
            where, end = (read.begin + int(one) for one in part.streams[stream : stream + 2])
            known = max(0, min(rows[part.plane - 1], stop) - start) if part.plane else 0
            target = place + start * num_tokens
            if part.num_escaped:
                own = [first_job, first_job + num_streams, target, stop - start, num_tokens]
                escaped = [(read.begin + part.escaped) // 2, part.num_escaped, len(jobs)]
                self.escapes.append([*escaped, *own, num_tokens, read.number])
            jobs.append(
                [
                    where // 2,
                    (end - where) // 2 - _STATE_HALVES,
                    level.tables[part.plane].data_ptr(),
                    level.classes[part.plane > 0].data_ptr() + 2 * (first_class + start),
                    target,
                    stop - start,
                    num_tokens,
                    num_tokens,
                    known,
                    read.number,
                    part.num_escaped,
                ]
            )

    def _add_kept(self, read: Coded, level: CardLevel, part: CodedPart, num_tokens: int) -> None:
        coder = level.coder
        spec, plan = coder.profile.spec, coder.profile.transform.plans[part.block]
        size = spec.dtype.itemsize
        halves, width = size // 2, spec.head_dim * size // 2
        first = (plan.layers.start - self._layers.start) * read.stride
        first += KINDS.index(plan.kinds[0]) * spec.num_kv_heads * num_tokens * spec.head_dim
        num_channels = plan.num_channels(spec) * halves
        heads = len(plan.kinds) * spec.num_kv_heads
        for index, token in enumerate(part.raw_tokens.tolist()):
            self.kept.append(
                [
                    (read.begin + part.raw) // 2 + index * num_channels,
                    num_channels,
                    width,
                    heads,
                    read.into.data_ptr() + (first + token * spec.head_dim) * size,
                    num_tokens * width,
                    read.stride * halves,
                ]
            )


def can_decode(coder: LevelCoder, num_planes: int, device: torch.device) -> bool:
    """Return whether a card decodes records of a level; kernels are tried once for each kind."""
    spec, transform = coder.profile.spec, coder.profile.transform
    sums, refines = int(isinstance(transform, Components)), num_planes > 1
    needed: list[tuple[str, dict[str, int]]] = [("synthesise", _constants(spec, sums))]
    needed += [("rans", {"REFINES": plane}) for plane in range(1 + refines)]
    needed += [("escapes", {}), ("kept", {})]
    return all(
        tiled.is_ready(name, spec.dtype, device, **more) for name, more in needed
    ) and tiled.is_trusted(
        "compressed records",
        spec.dtype,
        device,
        spec.head_dim,
        sums,
        refines,
        error=lambda: _difference(coder, num_planes, device),
    )


def _constants(spec: KVSpec, sums: int) -> dict[str, int]:
    return {"D": spec.head_dim, "SUMS": sums, "EXACT": int(spec.dtype == torch.float32)}


class _Bytes:
    """A record in memory (a `ByteSource`)."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size_bytes = len(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._content[offset : offset + len(buffer)]


@torch.no_grad()
def _difference(coder: LevelCoder, num_planes: int, device: torch.device) -> float:
    """Return how far the card is from the host, over the first blocks of a record made for it."""
    profile, transform = coder.profile, coder.profile.transform
    codec, made = PipelineCodec(profile, "", coder.level.name), torch.Generator().manual_seed(0)
    layers = transform.plans[0].layers
    first = coder.blocks_of(layers)
    planes: list[list[list[bytes | memoryview]]] = [[] for _ in coder.level.planes]
    for block in range(len(transform.plans)):
        payloads: list[list[bytes | memoryview]] = [[b"\0"] for _ in planes]
        if block in first:
            steps, num_rows = coder.level.steps[block], len(transform.row_layers(block))
            rows = torch.zeros(num_rows, _TRIAL_TOKENS)
            rows[: len(steps)] = 2 * torch.randn(len(steps), _TRIAL_TOKENS, generator=made)
            rows[: len(steps)] *= steps[:, None]
            rows[:1, 3] = 5000 * steps[:1]  # an escape
            rows[:, 5] *= 1000  # a token that is kept
            channels = transform.synthesise(block, rows)
            payloads = codec.encode_block(coder, block, channels)
        for plane, payload in zip(planes, payloads, strict=True):
            plane.append(payload)
    key, spec = ChunkKey("0" * 40), profile.spec
    record = write_record(
        key,
        codec=NAME,
        spec=spec,
        num_tokens=_TRIAL_TOKENS,
        blocks=[payload for plane in planes[:num_planes] for payload in plane],
        level=profile.levels.index(coder.level),
        profile=profile.hash,
    )
    chunk = codec.open_record(RecordReader(_Bytes(record), key), spec)
    memory = torch.zeros(chunk.coded_bytes(layers), dtype=torch.uint8)
    parts = chunk.read_coded(layers, memory.numpy().data)
    decoding = CardDecoding([chunk], device)
    shape = (len(layers), 2, spec.num_kv_heads, _TRIAL_TOKENS, spec.head_dim)
    staged = torch.zeros(math.prod(shape), dtype=spec.dtype, device=device)
    read = [Coded(0, 0, parts, staged, math.prod(shape[1:]))]
    decoding.decode(layers, memory.to(device), read, lambda one: one.to(device))
    if bool(decoding.flags.any()):
        return math.inf
    expected = torch.stack([torch.stack(chunk.read_layer(one)) for one in layers])
    return tiled.distance(staged.view(shape).cpu(), expected)
