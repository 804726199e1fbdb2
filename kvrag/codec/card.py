"""Decoding records on a graphics card: many records, a few launches.

The host reads and checks bytes; the card gets them as they are stored (kernels:
``cuda/triton/codec.py``). There, one launch writes the keys and values of all rows of codec
`packed`. The pipeline codec has streams, which the host finds: one launch for each plane decodes
those of all blocks and records, and one transforms all numbers back.

The host decodes instead where the kernels cannot run, or decode otherwise than it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec.container import RecordReader, write_record
from kvrag.codec.level import LevelCoder
from kvrag.codec.packed import PackedChunk, PackedCodec, PackedPart
from kvrag.codec.pca import Components
from kvrag.codec.pipeline import CodedPart, PipelineChunk, PipelineCodec
from kvrag.codec.tables import NUM_CONTEXTS
from kvrag.codec.transforms import KINDS, BlockPlan, ChannelRows
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.native.entropy import decode_tables
from kvrag.native.gpu import tiled
from kvrag.native.gpu.compiling import Argument
from kvrag.native.packed import GROUP, LEVELS, MIDDLE, POWERS, USUAL

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies numbers to the card, without waiting for it."""

_STATE_HALVES = 64
_TRIAL_TOKENS = 37

Coder = LevelCoder | PackedCodec
"""What knows how a record's bytes become keys and values."""


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


class CardBands:
    """What a profile of bands has on a card.

    Parameters
    ----------
    heads
        The key heads that are wanted.

    Attributes
    ----------
    num_planes
        0: there are no streams.
    lines
        int64 ``[L, 2, 14]``: entries of the kernel, which lack what only a record knows.
    levels, powers
        int8 ``[128]`` and float32 ``[256]``: what numbers stand for.
    shape
        Bands that have channels of these heads, and channels of each.
    """

    num_planes = 0

    def __init__(self, codec: PackedCodec, device: torch.device, heads: range) -> None:
        transform = codec.transform
        widths = torch.stack(transform.widths).long()
        # The byte of a band's scale comes first.
        begins = GROUP * (1 + widths.cumsum(2) - widths)
        bits = begins[..., None] + widths[..., None] * torch.arange(GROUP)
        places = (bits << 3 | widths[..., None]).int()
        tensors = [torch.stack(one) for one in (transform.bases, transform.scales, transform.means)]
        num_blocks, num_bands, num_numbers, num_channels = tensors[0].shape
        first, last = (one * codec.profile.spec.head_dim for one in (heads.start, heads.stop))
        begin = first // num_channels
        self.shape = -(-last // num_channels) - begin, num_channels
        band_bytes = (1 + widths[:, 0].sum(1)).numpy()
        lines = np.zeros((num_blocks, 14), np.int64)
        lines[1::2, 0] = num_bands * band_bytes[::2]  # values come after keys
        lines[:, 0] += begin * band_bytes
        lines[:, 1] = num_bands * (band_bytes[::2] + band_bytes[1::2]).repeat(2)
        lines[:, 4:8] = self.shape[0], 0, num_numbers, num_channels
        lines[:, 5] = band_bytes
        lines[:, 12:] = first - begin * num_channels, last - begin * num_channels
        self._tensors = [one.contiguous().to(device) for one in (places, *tensors)]
        for column, one in enumerate(self._tensors, 8):
            size = one.numel() // (num_blocks * num_bands) * one.itemsize
            place = num_bands * np.arange(num_blocks) + begin
            lines[:, column] = one.data_ptr() + size * place
        self.lines = lines.reshape(-1, len(KINDS), 14)
        levels = 2 * LEVELS.astype(np.int16) - MIDDLE
        self.levels = torch.from_numpy(levels.astype(np.int8)).to(device)
        self.powers = torch.from_numpy(POWERS).to(device)


def _on_card(
    coder: Coder, num_planes: int, device: torch.device, heads: range
) -> CardLevel | CardBands:
    """Return what a card has of a coder, made on first use."""
    kept, name = coder.on_cards, (num_planes, device, heads)
    if name not in kept:
        kept[name] = (
            CardBands(coder, device, heads)
            if isinstance(coder, PackedCodec)
            else CardLevel(coder, num_planes, device)
        )
    found: CardLevel | CardBands = kept[name]
    return found


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
        What the record's `read_coded` returned.
    into
        Memory of the card for the layers, of the KV's type.
    stride
        Elements from layer to layer there: keys ``[H, T, D]``, values, padding.
    """

    number: int
    begin: int
    parts: Sequence[CodedPart] | Sequence[PackedPart]
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
    heads
        The key heads to write; None: all.

    Attributes
    ----------
    starts
        The layers at which a group may begin: blocks of all records begin there.
    flags
        int32 for each record, on the card: not 0 once its streams have turned out to be damaged.
    """

    def __init__(
        self,
        records: Sequence[PipelineChunk | PackedChunk],
        device: torch.device,
        heads: range | None = None,
    ) -> None:
        self._device = device
        profiles = [one.coder.profile for one in records]
        self._whole = profiles[0].spec
        self._heads = range(self._whole.num_kv_heads) if heads is None else heads
        self._spec = replace(self._whole, num_kv_heads=len(self._heads))
        self._levels = [_on_card(one.coder, one.num_planes, device, self._heads) for one in records]
        self._num_tokens = [one.num_tokens for one in records]
        plans = [one.transform.plans for one in profiles]
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
        spec = self._spec
        num_planes = max(level.num_planes for level in self._levels)
        work = _Work(layers, self._whole, self._heads, num_planes)
        for one in read:
            work.add(one, self._levels[one.number], self._num_tokens[one.number])
        rows = np.concatenate([np.empty((0, 14), np.int64), *work.rows])
        tables = {name: np.array(lines, np.int64) for name, lines in work.lines.items()}
        tables["rows"] = rows
        # Kernels take addresses that are multiples of 16, or are compiled again.
        padded = [np.pad(one.ravel(), (0, one.size % 2)) for one in tables.values()]
        numbers = upload(torch.from_numpy(np.concatenate(padded)))
        pieces = zip(tables, torch.split(numbers, [*map(len, padded)]), strict=True)
        jobs = {name: piece[: tables[name].size] for name, piece in pieces}
        made = torch.empty(work.num_numbers, dtype=torch.int16, device=self._device)
        num_streams = len(work.lines.get("plane 0", ()))
        counts = torch.empty(num_streams, dtype=torch.int32, device=self._device)
        bits, found = payload.view(torch.int16), (made, self.flags, counts)
        for plane in range(num_planes):
            where = bits, jobs[f"plane {plane}"]
            num_streams = len(work.lines[f"plane {plane}"])
            self._start("rans", (num_streams,), *where, *found, REFINES=int(plane > 0))
            if not plane and (escapes := work.lines["escapes"]):
                self._start("escapes", (len(escapes),), bits, jobs["escapes"], *found)
        for sums in range(2):
            entries = work.lines[f"entries {sums}"]
            constants = _constants(spec, sums)
            tile = tiled.tiling_of("synthesise", self._device, **constants)["BT"]
            longest = max((entry[2] for entry in entries), default=0)
            # A card takes at most 65,535 programs in other directions than the first.
            programs = len(entries) * spec.num_kv_heads, -(-longest // tile)
            given = made, jobs[f"entries {sums}"], read[0].into, spec.num_kv_heads
            self._start("synthesise", programs, *given, **constants)
        bands = [level for level in self._levels if isinstance(level, CardBands)]
        if bands:
            tiling = tiled.tiling_of("unpack", self._device)
            most = max(
                num * -(-width // tiling["WIDTH"]) for num, width in (o.shape for o in bands)
            )
            grid = len(rows), most, -(-work.most_tokens // tiling["BT"])
            constant = jobs["rows"], bands[0].levels, bands[0].powers
            self._start("unpack", grid, payload, *constant, read[0].into, spec.head_dim)
        if kept := work.lines["kept"]:
            self._start("kept", (len(kept),), bits, jobs["kept"])

    def _start(
        self, name: str, grid: tuple[int, ...], *arguments: Argument, **constants: int
    ) -> None:
        dtype, device = self._spec.dtype, self._device
        tiled.start(name, grid, *arguments, dtype=dtype, device=device, **constants)


class _Work:
    """The tables that the kernels read for a group of layers; the sources say what a line means.

    Attributes
    ----------
    lines
        Those of streams for each plane, of entries where rows are channels (0) or components (1),
        of escapes, and of kept tokens.
    rows
        Lines ``[n, 14]`` of records of `packed`.
    num_numbers
        Numbers of all blocks together.
    most_tokens
        Of a record of `packed`.
    """

    def __init__(self, layers: range, spec: KVSpec, heads: range, num_planes: int) -> None:
        self._layers, self._spec, self._heads = layers, spec, heads
        planes = [f"plane {plane}" for plane in range(num_planes)]
        names = *planes, "entries 0", "entries 1", "escapes", "kept"
        self.lines: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
        self.rows: list[NDArray[np.int64]] = []
        self.num_numbers = self.most_tokens = 0

    def add(self, read: Coded, level: CardLevel | CardBands, num_tokens: int) -> None:
        """Add layers of a record."""
        parts: Any = read.parts
        if isinstance(level, CardBands):
            self._add_rows(read, parts, level, num_tokens)
            return
        first = {}
        for block in level.coder.blocks_of(self._layers):
            first[block] = self.num_numbers
            rows = max(plane.num_rows[block] for plane in level.coder.level.planes)
            self._add_entries(read, level, block, num_tokens)
            self.num_numbers += rows * num_tokens
        for part in parts:
            self._add_streams(read, level, part, first[part.block], num_tokens)
            if not part.plane:
                plan = level.coder.profile.transform.plans[part.block]
                tokens = part.raw_tokens.tolist()
                self._add_kept(read, plan, part.raw, tokens, num_tokens)

    def _add_rows(
        self, read: Coded, parts: Sequence[PackedPart], bands: CardBands, num_tokens: int
    ) -> None:
        spec, layers = self._spec, self._layers
        lines = bands.lines[layers.start : layers.stop].copy()
        lines[..., 0] += read.begin + np.array([part.rows for part in parts])[:, None]
        lines[..., 2] = num_tokens
        kind = np.arange(len(KINDS)) * len(self._heads) * num_tokens * spec.head_dim
        first = np.arange(len(layers))[:, None] * read.stride + kind
        lines[..., 3] = read.into.data_ptr() + first * read.into.itemsize
        self.rows.append(lines.reshape(-1, 14))
        self.most_tokens = max(self.most_tokens, num_tokens)
        for index, part in zip(layers, parts, strict=True):
            plan = BlockPlan(range(index, index + 1))
            self._add_kept(read, plan, part.raw_begin, part.raw_tokens, num_tokens)

    def _add_entries(self, read: Coded, level: CardLevel, block: int, num_tokens: int) -> None:
        transform, spec = level.coder.profile.transform, level.coder.profile.spec
        width, plan = len(self._heads) * spec.head_dim, transform.plans[block]
        for layer_index in plan.layers:
            for kind in plan.kinds:
                channel = plan.channels_of(spec, layer_index, kind).start
                channel += self._heads.start * spec.head_dim
                basis = channel
                if level.bases:
                    basis = level.bases[block].data_ptr() + 2 * channel
                into = (layer_index - self._layers.start) * read.stride
                into += KINDS.index(kind) * width * num_tokens
                target = read.into.data_ptr() + into * read.into.itemsize
                of_rows = level.shrink[block].data_ptr(), level.steps[block].data_ptr()
                tables = level.factors[block], level.means[block]
                of_channels = [one.data_ptr() + 4 * channel for one in tables]
                matrix = self.num_numbers, level.num_rows[block], num_tokens
                line = *matrix, basis, plan.num_channels(spec), *of_rows, *of_channels, target
                self.lines[f"entries {int(bool(level.bases))}"].append(line)

    def _add_streams(
        self, read: Coded, level: CardLevel, part: CodedPart, place: int, num_tokens: int
    ) -> None:
        rows = [plane.num_rows[part.block] for plane in level.coder.level.planes]
        jobs, num_streams = self.lines[f"plane {part.plane}"], len(part.streams) - 1
        first_job = len(jobs)
        first_class = level.coder.level.class_slices[part.block].start
        for stream in range(num_streams):
            start, stop = (one * rows[part.plane] // num_streams for one in (stream, stream + 1))
            where, end = (read.begin + int(one) for one in part.streams[stream : stream + 2])
            known = max(0, min(rows[part.plane - 1], stop) - start) if part.plane else 0
            matrix = place + start * num_tokens, stop - start, num_tokens, num_tokens
            if part.num_escaped:
                escaped = (read.begin + part.escaped) // 2, part.num_escaped
                own = len(jobs), first_job, first_job + num_streams
                self.lines["escapes"].append((*escaped, *own, *matrix, read.number))
            halves = where // 2, (end - where) // 2 - _STATE_HALVES
            table = level.tables[part.plane].data_ptr()
            classes = level.classes[part.plane > 0].data_ptr() + 2 * (first_class + start)
            told = known, read.number, part.num_escaped
            jobs.append((*halves, table, classes, *matrix, *told))

    def _add_kept(
        self, read: Coded, plan: BlockPlan, raw: int, tokens: Sequence[int], num_tokens: int
    ) -> None:
        spec, heads = self._spec, self._heads
        size = spec.dtype.itemsize
        halves, width = size // 2, spec.head_dim * size // 2
        num_channels = plan.num_channels(spec) * halves
        # All heads of a block are next to each other; of some, each layer's of each kind are.
        runs = [(plan.layers, plan.kinds)]
        if len(heads) < spec.num_kv_heads:
            layers = [range(one, one + 1) for one in plan.layers]
            runs = [(layer, (kind,)) for layer in layers for kind in plan.kinds]
        for layers_of_run, kinds in runs:
            source = plan.channels_of(spec, layers_of_run.start, kinds[0]).start
            source = (read.begin + raw) // 2 + (source + heads.start * spec.head_dim) * halves
            first = (layers_of_run.start - self._layers.start) * read.stride
            first += KINDS.index(kinds[0]) * len(heads) * num_tokens * spec.head_dim
            num_heads = len(kinds) * len(heads)
            run = len(layers_of_run) * num_heads * width, width, num_heads
            strides = num_tokens * width, read.stride * halves
            for index, token in enumerate(tokens):
                target = read.into.data_ptr() + (first + token * spec.head_dim) * size
                line = source + index * num_channels, *run, target, *strides
                self.lines["kept"].append(line)


def can_decode(coder: Coder, num_planes: int, device: torch.device) -> bool:
    """Return whether a card decodes records of a level; kernels are tried once for each kind."""
    spec, transform = coder.profile.spec, coder.profile.transform
    needed: list[tuple[str, dict[str, int]]] = [("kept", {})]
    kind: tuple[int, ...] = ()
    if isinstance(coder, PackedCodec):
        needed.append(("unpack", {}))
    else:
        sums, refines = int(isinstance(transform, Components)), num_planes > 1
        needed.append(("synthesise", _constants(spec, sums)))
        needed += [("rans", {"REFINES": plane}) for plane in range(1 + refines)]
        needed.append(("escapes", {}))
        kind = sums, refines
    error = partial(_difference, coder, num_planes, device)
    what = "compressed records", spec.dtype, device, spec.head_dim
    return all(
        tiled.is_ready(name, spec.dtype, device, **more) for name, more in needed
    ) and tiled.is_trusted(*what, *kind, error=error)


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
def _difference(coder: Coder, num_planes: int, device: torch.device) -> float:
    """Return how far the card is from the host, over the first blocks of a record made for it."""
    profile, made = coder.profile, torch.Generator().manual_seed(0)
    codec: Any = coder
    if isinstance(coder, PackedCodec):
        layers, level = range(1), 0
        blocks = _packed_blocks(coder, made)
    else:
        codec = PipelineCodec(profile, "", coder.level.name)
        layers, level = profile.transform.plans[0].layers, profile.levels.index(coder.level)
        blocks = _coded_blocks(codec, coder, num_planes, made)
    key, spec = ChunkKey("0" * 40), profile.spec
    record = write_record(
        key,
        codec=codec.name,
        spec=spec,
        num_tokens=_TRIAL_TOKENS,
        blocks=blocks,
        level=level,
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


_Blocks = list[list[bytes | memoryview]]


def _packed_blocks(codec: PackedCodec, made: torch.Generator) -> _Blocks:
    """Return the blocks of a record whose first layer has numbers of the usual size."""
    spec, transform = codec.profile.spec, codec.transform
    both = []
    for block in range(len(KINDS)):
        usual = torch.from_numpy(USUAL)[transform.widths[block].flatten().long()]
        rows = torch.randn(GROUP * len(usual), _TRIAL_TOKENS, generator=made)
        rows *= usual.repeat_interleave(GROUP)[:, None] / 2
        rows[:, 5] *= 100  # a token that is kept
        both.append(transform.synthesise(block, rows).view(1, spec.num_kv_heads, spec.head_dim, -1))
    keys, values = (one.transpose(2, 3).to(spec.dtype) for one in both)
    rest: _Blocks = [[b"\0"] for _ in range(spec.num_layers - 1)]
    return [codec.encode_layer(0, ChunkKV(keys, values)), *rest]


def _coded_blocks(
    codec: PipelineCodec, coder: LevelCoder, num_planes: int, made: torch.Generator
) -> _Blocks:
    """Return the blocks of a record whose first ones have numbers of the usual size."""
    transform = coder.profile.transform
    first = coder.blocks_of(transform.plans[0].layers)
    planes: list[_Blocks] = [[] for _ in coder.level.planes]
    for block in range(len(transform.plans)):
        payloads: _Blocks = [[b"\0"] for _ in planes]
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
    return [payload for plane in planes[:num_planes] for payload in plane]
