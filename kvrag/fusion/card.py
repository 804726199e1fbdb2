"""Reading stored KV to a graphics card: whole groups of layers, and no wait between them.

Threads read a group of layers of a record at once into page-locked memory. One stream copies it to
one of a few slots on the card; the prompt's own stream waits for the copies, there, and places the
rows of all records from the slot into the buffer. Compressed records are copied as they are stored;
a third stream decodes those of a group (`kvrag.codec.card`). Events say when a slot, or page-locked
memory, may be written again. The host waits for the card only where a reader is two buffers ahead
of it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvrag.codec.base import EncodedChunk
from kvrag.codec.card import CardDecoding, Coded
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.staging import GROUP_LAYERS, Hot, HotRecords, Source
from kvrag.kvcache import FusedKV
from kvrag.loading.hot import buffers, copy_stream, decode_stream, is_over, page_locked, start_copy
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.native.gpu import tiled
from kvrag.positions.rotary import RotaryTable

# -- placing rows --------------------------------------------------------------------------------

_ALIGNED = 16
"""The kernel reads and writes this many channels at once."""

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies numbers to the card, without waiting for it."""


class Part(NamedTuple):
    """Rows of one record that are next to each other in the prompt.

    Attributes
    ----------
    memory
        The record's layers, one-dimensional, of the buffer's type, aligned to 16 bytes.
    offset
        The first element of the record's `first_layer` there, a multiple of D and of 16 bytes.
    stride
        Elements from layer to layer, such a multiple, too.
    first_layer
        The first layer that the memory holds.
    num_tokens
        T of the record: a layer holds keys ``[H, T, D]``, then values.
    first_token, first_row, num_rows
        The rows: from which token of the record on, at which row of the prompt, how many.
    """

    memory: torch.Tensor
    offset: int
    stride: int
    first_layer: int
    num_tokens: int
    first_token: int
    first_row: int
    num_rows: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the kernel reads."""
        offset = self.offset - self.first_layer * self.stride
        address = self.memory.data_ptr() + offset * self.memory.itemsize
        return (
            *(address, self.stride, self.num_tokens),
            *(self.first_token, self.first_row, self.num_rows),
        )


class Placement:
    """Places rows: a group of layers of all records in one launch, or with PyTorch in few.

    Parameters
    ----------
    groups
        For each group of layers the rows, which do not overlap.
    keys, values
        ``[L, H, C, D]``, contiguous: the prompt's buffer.
    num_rotated
        The widths of the tables that `place` will get.
    upload
        Called once, if at all.
    in_kernel
        Whether the kernel places; None: where it can, and is right.

    Attributes
    ----------
    groups, keys, values
        As given.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Part]],
        keys: torch.Tensor,
        values: torch.Tensor,
        num_rotated: Collection[int],
        upload: Upload,
        in_kernel: bool | None = None,
    ) -> None:
        self.groups, self.keys, self.values = groups, keys, values
        head_dim = keys.shape[-1]
        self._constants = {"D": head_dim}
        if in_kernel is None:
            in_kernel = (
                not any(width % _ALIGNED for width in (head_dim, *num_rotated))
                and tiled.is_ready("place", keys.dtype, keys.device, **self._constants)
                and is_right(keys.dtype, keys.device, head_dim, frozenset(num_rotated))
            )
        self._in_kernel = in_kernel
        if in_kernel:
            numbers = np.array([one.numbers for parts in groups for one in parts], np.int64)
            self._numbers = upload(torch.from_numpy(numbers))

    def place(self, number: int, layers: range, table: RotaryTable) -> None:
        """Place some layers of a group, which have one table.

        Parameters
        ----------
        number
            The group.
        layers
            The layers of the buffer, and of the records.
        table
            Rotates their keys.
        """
        place = self._start if self._in_kernel else self._compute
        if self.groups[number]:
            place(number, layers, table)

    def _start(self, number: int, layers: range, table: RotaryTable) -> None:
        num_heads, capacity, _ = self.keys.shape[1:]
        device, parts = self.keys.device, self.groups[number]
        block = tiled.tiling_of("place", device, **self._constants)["BT"]
        before = sum(map(len, self.groups[:number]))
        grid = -(-max(one.num_rows for one in parts) // block), len(parts), len(layers) * num_heads
        numbers = self._numbers[before : before + len(parts)]
        turning = table.cos.contiguous(), table.sin.contiguous()
        sizes = layers.start, num_heads, table.cos.shape[-1], capacity
        given = numbers, *turning, self.keys, self.values, *sizes
        dtype = self.keys.dtype
        tiled.start("place", grid, *given, dtype=dtype, device=device, **self._constants)

    def _compute(self, number: int, layers: range, table: RotaryTable) -> None:
        """Place rows with PyTorch, one part after the other."""
        _, num_heads, _, head_dim = self.keys.shape
        into = slice(layers.start, layers.stop)
        for part in self.groups[number]:
            of_kind = num_heads * part.num_tokens * head_dim
            first = part.offset + (layers.start - part.first_layer) * part.stride
            first += part.first_token * head_dim + int(part.memory.storage_offset())
            shape = (len(layers), 2, num_heads, part.num_rows, head_dim)
            strides = (part.stride, of_kind, part.num_tokens * head_dim, head_dim, 1)
            stored = part.memory.as_strided(shape, strides, first)
            rows = slice(part.first_row, part.first_row + part.num_rows)
            table.place(stored[:, 0], rows, self.keys[into, :, rows])
            self.values[into, :, rows] = stored[:, 1]


def is_right(
    dtype: torch.dtype, device: torch.device, head_dim: int, num_rotated: frozenset[int]
) -> bool:
    """Return whether the kernel places as PyTorch does here; tried once for each kind."""

    def error() -> float:
        return max(_difference(dtype, device, head_dim, one) for one in num_rotated)

    return tiled.is_trusted("placing", dtype, device, head_dim, num_rotated, error=error)


@torch.no_grad()
def _difference(dtype: torch.dtype, device: torch.device, head_dim: int, num_rotated: int) -> float:
    """Return how far the kernel is from PyTorch, over some rows of two records."""
    made, num_heads = torch.Generator().manual_seed(0), 2
    parts, row = [], 2
    # One in separate memory, from layer 0 on, and one whose layer 0 is not there.
    for num_tokens, first, num_rows, held in ((90, 3, 80, 0), (5, 0, 5, 1)):
        stride = 2 * num_heads * num_tokens * head_dim
        memory = torch.randn(head_dim + (3 - held) * stride, generator=made).to(device, dtype)
        parts.append(Part(memory, head_dim, stride, held, num_tokens, first, row, num_rows))
        row += num_rows + 1
    angles = torch.randn(row, num_rotated // 2, generator=made).repeat(1, 2).to(device)
    table = RotaryTable(angles.cos(), angles.sin())
    results = []
    for in_kernel in (True, False):
        keys, values = torch.zeros(2, 3, num_heads, row + 3, head_dim, dtype=dtype, device=device)
        placement = Placement(
            [parts], keys, values, (num_rotated,), lambda one: one.to(device, copy=True), in_kernel
        )
        placement.place(0, range(1, 3), table)
        results.append((keys, values))
    return max(tiled.distance(*pair) for pair in zip(*results, strict=True))


# -- loading to a card ---------------------------------------------------------------------------

AHEAD = 2
"""How many groups may be read before the prompt needs them."""
_SLOT_BYTES = 256 << 20


@dataclass(frozen=True)
class _Lane:
    """A record, and its layers' places: in memory that stays, or in a slot from `offset` on.

    What the card decodes has a number.
    """

    record_id: RecordId
    source: Source
    hot: Hot | None
    offset: int
    first_layer: int
    coded: int | None

    def is_needed(self, group: range) -> bool:
        """Return whether layers are read; memory that stays gets those nobody needs yet, too."""
        return self.hot is not None or self.first_layer < group.stop


class CardReading(LayerPrefetch):
    """Brings the layers of a prompt's records to a card, whole groups of them ahead of the prompt.

    Parameters
    ----------
    records
        The open records.
    spans
        For each record the spans of the prompt.
    first_layers
        For some spans, the number of first layers that are not needed.
    fused
        The prompt's buffer.
    tables
        The rotary table of each layer.
    num_threads
        How many records are read at the same time.
    seconds
        For each record, gets the seconds that reading took.
    hot
        What stays on the card for later prompts; None: nothing.

    Attributes
    ----------
    num_placed
        Layers from 0 on that are placed, some with the one that was asked for.
    num_decoded_by_host
        Records that the card cannot decode.
    """

    def __init__(
        self,
        records: Mapping[RecordId, EncodedChunk],
        spans: Mapping[RecordId, Sequence[ReusedSpan]],
        first_layers: Mapping[ReusedSpan, int],
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        num_threads: int,
        seconds: dict[RecordId, float],
        hot: HotRecords | None = None,
    ) -> None:
        self._spans, self._firsts = spans, first_layers
        self._fused, self._tables = fused, tables
        self._seconds = seconds
        self._device = fused.storage.device
        self._lanes, size = self._lanes_of(records, hot)
        self.num_decoded_by_host = sum(
            lane.source.is_decoded_by_host and not (lane.hot is not None and lane.hot.after is None)
            for lane in self._lanes
        )
        coded = [one.source for one in self._lanes if one.coded is not None]
        self._decoding = None
        if coded:
            stored = [one.stored for one in coded]
            self._decoding = CardDecoding(stored, self._device, coded[0].heads)
        edges = {0, len(tables), *first_layers.values()}
        most = min(GROUP_LAYERS, _SLOT_BYTES // max(1, size * fused.spec.dtype.itemsize))
        if all(lane.hot is not None and lane.hot.is_whole for lane in self._lanes):
            most = len(tables)  # nothing to wait for
        if self._decoding is None:
            edges |= set(range(0, len(tables), max(1, most)))
            starts = sorted(edge for edge in edges if edge <= len(tables))
            self._groups = [range(*ends) for ends in pairwise(starts)]
        else:
            self._groups = _whole_blocks(
                self._decoding.starts | {fused.spec.num_layers}, len(tables), max(1, most)
            )
        self._starts = [group.start for group in self._groups]
        # What is placed at once; of a group, more and more may be needed.
        steps = sorted(one for one in {*edges, *self._starts} if one <= len(tables))
        self._steps = [range(*ends) for ends in pairwise(steps)]
        # The stream that computes the prompt: it places, and owns the slots' memory.
        self._computing = torch.cuda.current_stream(self._device)
        longest = max(map(len, self._groups), default=0)
        num_slots = min(AHEAD + 1, len(self._groups))
        self._slots = torch.empty(
            num_slots, longest * size, dtype=fused.spec.dtype, device=self._device
        )
        self._payload_places = [self._places_in_payload(group) for group in self._groups]
        most_bytes = max((places[-1] for places in self._payload_places), default=0)
        self._payloads = torch.empty(num_slots, most_bytes, dtype=torch.uint8, device=self._device)
        # Kernels that were started before may still use the memory of slots and buffer.
        self._may_write = [self._computing.record_event()] * num_slots
        self._read_coded: list[list[Coded]] = [[] for _ in self._groups]
        self._num_unread = [len(coded)] * len(self._groups)
        self._told: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._lock = threading.Lock()
        self._copied: list[list[torch.cuda.Event]] = [[] for _ in self._groups]
        self._placement: Placement | None = None
        self._is_lost = False
        self.num_placed = 0
        super().__init__(
            *(len(self._lanes), len(self._groups), self._read),
            num_threads=num_threads,
            num_ahead=AHEAD,
        )

    def is_loaded(self, layer_index: int) -> bool:
        return super().is_loaded(self._group_of(layer_index))

    def wait(self, layer_index: int) -> Mapping[int, Exception]:
        number = self._group_of(layer_index)
        if layer_index == self._groups[number].start and (failures := super().wait(number)):
            return failures
        for step, layers in enumerate(self._steps):
            if layers.start == layer_index:
                self._place(step, number)
                self.num_placed = layers.stop
        return {}

    def drain(self) -> Mapping[int, Exception]:
        self._is_lost = True
        return super().drain()

    def is_sound(self) -> bool:
        """Return whether the card has told if the streams of compressed records are damaged."""
        return self._told is None or is_over(self._told[1])

    def damage(self) -> Mapping[int, Exception]:
        """Return what the card has found, after it has decoded everything."""
        if self._told is None:
            return {}
        flags, event = self._told
        if not self.is_sound():
            event.synchronize()
        failures: dict[int, Exception] = {}
        for number, lane in enumerate(self._lanes):
            if lane.coded is None:
                continue
            if flags[lane.coded]:
                failures[number] = lane.source.refuse_streams()
            elif lane.hot is not None:
                lane.hot.keep()
        return failures

    def close(self) -> None:
        self._is_lost = True
        super().close()
        # The next thread that gets the slots' memory on this stream writes after the last copy.
        for event in chain.from_iterable(self._copied):
            self._computing.wait_event(event)

    def _lanes_of(
        self, records: Mapping[RecordId, EncodedChunk], hot: HotRecords | None
    ) -> tuple[list[_Lane], int]:
        """Return the records' lanes, and the elements of one layer of all of them in a slot."""
        lanes, end = [], 0
        num_coded = 0
        for record_id, record in records.items():
            source, place = Source(record, self._fused.spec, self._device), None
            if hot is not None:
                source, place = hot.take(source)
            first = min(self._firsts.get(span, 0) for span in self._spans[record_id])
            is_coded = source.is_coded and not (place is not None and place.is_whole)
            number = num_coded if is_coded else None
            num_coded += is_coded
            lanes.append(_Lane(record_id, source, place, end, first, number))
            end += source.stride * (place is None)
        return lanes, end

    def _group_of(self, layer_index: int) -> int:
        return bisect_right(self._starts, layer_index) - 1

    def _read(self, number: int, group_number: int) -> None:
        """Read a group of layers of one record, and have it copied to the group's slot."""
        lane = self._lanes[number]
        started = time.perf_counter()
        try:
            if lane.coded is not None:
                self._read_stored(lane, lane.coded, group_number)
            elif lane.is_needed(self._groups[group_number]):
                self._copy(lane, group_number)
        except BaseException:
            # What was queued before the failure still has to be waited for.
            streams = copy_stream(self._device), decode_stream(self._device)
            self._copied[group_number] += [stream.record_event() for stream in streams]
            raise
        # Only one thread at a time works on a record.
        self._seconds[lane.record_id] += time.perf_counter() - started

    def _copy(self, lane: _Lane, group_number: int) -> None:
        """Read a group of layers, and have it copied to where it is placed from."""
        group = self._groups[group_number]
        if lane.hot is not None:
            self._copied[group_number] += lane.hot.bring(group, self._is_wanted)
            return
        number = group_number % len(self._slots)
        begin = lane.offset * len(group)
        into = self._slots[number][begin : begin + lane.source.stride * len(group)]
        after = self._may_write[number]
        self._copied[group_number] += lane.source.copy(group, into, after, self._is_wanted)

    def _is_wanted(self) -> bool:
        return not self._is_lost

    def _places_in_payload(self, group: range) -> list[int]:
        """Return where each compressed record's bytes begin in a slot's payload, and the end."""
        places = [0]
        for lane in self._lanes:
            if lane.coded is not None:
                size = lane.source.stored.coded_bytes(group) if lane.is_needed(group) else 0
                places.append(places[-1] + size)
        return places

    def _read_stored(self, lane: _Lane, coded: int, group_number: int) -> None:
        """Read a group of layers as they are stored; the last reader has them decoded."""
        group, slot = self._groups[group_number], group_number % len(self._slots)
        begin, end = self._payload_places[group_number][coded : coded + 2]
        stride = lane.source.stride
        if begin < end:
            into, after = self._payloads[slot][begin:end], self._may_write[slot]
            parts, copied = lane.source.copy_coded(group, into, after, self._is_wanted)
            self._copied[group_number] += copied
            where, first = self._slots[slot], lane.offset * len(group)
            if lane.hot is not None:
                where, first = lane.hot.memory, group.start * stride
            target = where[first : first + stride * len(group)]
            self._read_coded[group_number].append(Coded(coded, begin, parts, target, stride))
        with self._lock:
            self._num_unread[group_number] -= 1
            is_last = not self._num_unread[group_number]
        if is_last and self._is_wanted():
            self._decode(group_number)

    def _decode(self, number: int) -> None:
        """Have a group of compressed layers decoded; after the last, read back its flags."""
        assert self._decoding is not None
        group, slot = self._groups[number], number % len(self._slots)
        read = self._read_coded[number]
        lanes = {lane.coded: lane for lane in self._lanes}
        hot = [lane.hot for lane in (lanes[one.number] for one in read) if lane.hot is not None]
        stream = decode_stream(self._device)
        with torch.cuda.stream(stream):
            may_write = [one.after for one in hot if one.after is not None]
            for event in (self._may_write[slot], *may_write, *self._copied[number]):
                stream.wait_event(event)
            if read:
                self._decoding.decode(
                    group, self._payloads[slot], read, lambda one: self._upload(one, stream)
                )
            if number == len(self._groups) - 1:
                flags = page_locked(self._decoding.flags.numel() * 4).view(torch.int32)
                start_copy(flags, self._decoding.flags)
                self._told = flags, stream.record_event()
            decoded = stream.record_event()
        self._copied[number].append(decoded)
        for one in hot:
            one.note_decoded(group, decoded)

    def _place(self, step: int, number: int) -> None:
        """Place layers of a group, in the stream that computes the prompt."""
        if self._placement is None:
            keys, values = self._fused.layers
            distinct = list({id(one): one for one in self._tables}.values())  # layers share them
            widths = {table.cos.shape[-1] for table in distinct}
            parts = list(self._parts())
            if not any(parts):
                return
            in_kernel = False if any(table.in_pairs for table in distinct) else None
            upload = partial(self._upload, stream=self._computing)
            self._placement = Placement(parts, keys, values, widths, upload, in_kernel)
        for event in self._copied[number]:
            self._computing.wait_event(event)
        for table, layers in _runs(self._steps[step], self._tables):
            self._placement.place(step, layers, table)
        self._may_write[number % len(self._slots)] = self._computing.record_event()

    def _parts(self) -> Iterator[list[Part]]:
        """Yield for each step where the rows go that its layers need."""
        spans = [
            (self._firsts.get(one, 0), lane, (one.chunk_start, one.prompt_start, one.length))
            for lane in self._lanes
            for one in self._spans[lane.record_id]
        ]
        for layers in self._steps:
            number = self._group_of(layers.start)
            group, slot = self._groups[number], self._slots[number % len(self._slots)]
            found = []
            for first, lane, rows in spans:
                stride, num_tokens = lane.source.stride, lane.source.num_tokens
                there = slot, lane.offset * len(group), stride, group.start
                if lane.hot is not None:
                    there = lane.hot.memory, 0, stride, 0
                if first <= layers.start:
                    found.append(Part(*there, num_tokens, *rows))
            yield found

    def _upload(self, numbers: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        size = numbers.numel() * numbers.itemsize
        pinned = buffers().take(size)
        memory = pinned.memory[:size].view(numbers.dtype).view(numbers.shape)
        memory.copy_(numbers)
        uploaded = torch.empty_like(memory, device=self._device)
        start_copy(uploaded, memory)
        buffers().give_back(pinned, stream.record_event())
        return uploaded


def _whole_blocks(stops: set[int], num_layers: int, most: int) -> list[range]:
    """Return groups of layers that end where they may, each with as many as there may be."""
    groups: list[range] = []
    while (start := groups[-1].stop if groups else 0) < num_layers:
        later = sorted(stop for stop in stops if stop > start)
        stop = max((stop for stop in later if stop <= start + most), default=later[0])
        groups.append(range(start, stop))
    return groups


def _runs(group: range, tables: Sequence[RotaryTable]) -> Iterator[tuple[RotaryTable, range]]:
    """Yield the layers of a group that follow each other and have one table."""
    for _, run in groupby(group, lambda layer_index: id(tables[layer_index])):
        layers = list(run)
        yield tables[layers[0]], range(layers[0], layers[-1] + 1)
