"""Reading stored KV to a graphics card: whole groups of layers, and no wait between them.

Threads read a group of layers of a record at once into page-locked memory. One stream copies it to
one of a few slots on the card; the prompt's own stream waits for the copies, there, and places the
rows of all records from the slot into the buffer. Events say when a slot, or page-locked memory,
may be written again. The host waits for the card only where a reader is two buffers ahead of it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.codec.header import padded_size
from kvrag.codec.raw import RawChunk
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.placement import Part, Placement
from kvrag.kvcache import FusedKV, KVSpec
from kvrag.loading.pinned import buffers, copy_stream, start_copy
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.positions.rotary import RotaryTable

GROUP_LAYERS = 8
"""The most layers that are read, copied and placed at once."""
AHEAD = 2
"""How many groups may be read before the prompt needs them."""
_SLOT_BYTES = 256 << 20
_READ_BYTES = 32 << 20

Bring = Callable[[RecordId, int], None]
"""Reads a layer of a record, decodes it, and places it in the prompt's rows."""


@dataclass(frozen=True)
class _Lane:
    """A record, and its layers' places in a slot: `stride` elements each, from `offset` on."""

    record_id: RecordId
    record: EncodedChunk
    offset: int
    stride: int
    first_layer: int

    @property
    def decodes_on_gpu(self) -> bool:
        return bool(getattr(self.record, "decodes_on_gpu", False))


class CardReading:
    """Brings the layers of a prompt's records to a card (a `kvrag.fusion.loader.Reading`).

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
    bring
        For records whose codec decodes on the card.
    seconds
        For each record, gets the seconds that reading took.
    """

    def __init__(
        self,
        records: Mapping[RecordId, EncodedChunk],
        spans: Mapping[RecordId, Sequence[ReusedSpan]],
        first_layers: Mapping[ReusedSpan, int],
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        num_threads: int,
        bring: Bring,
        seconds: dict[RecordId, float],
    ) -> None:
        self._spans, self._firsts = spans, first_layers
        self._fused, self._tables = fused, tables
        self._bring, self._seconds = bring, seconds
        self._device = fused.storage.device
        self._lanes, size = _lanes(records, spans, first_layers, fused.spec)
        edges = {0, len(tables), *first_layers.values()}
        most = min(GROUP_LAYERS, _SLOT_BYTES // max(1, size * fused.spec.dtype.itemsize))
        edges |= set(range(0, len(tables), max(1, most)))
        starts = sorted(edge for edge in edges if edge <= len(tables))
        self._groups = [range(*ends) for ends in pairwise(starts)]
        self._starts = starts[:-1]
        self._copying = copy_stream(self._device)
        # The stream that computes the prompt: it places, and owns the slots' memory.
        self._computing = torch.cuda.current_stream(self._device)
        longest = max(map(len, self._groups), default=0)
        num_slots = min(AHEAD + 1, len(self._groups))
        self._slots = torch.empty(
            num_slots, longest * size, dtype=fused.spec.dtype, device=self._device
        )
        # Kernels that were started before may still use the memory of slots and buffer.
        before = self._computing.record_event()
        self._before, self._may_write = before, [before] * num_slots
        self._copied: dict[int, torch.cuda.Event] = {}
        self._placements: dict[tuple[int, frozenset[ReusedSpan]], Placement] = {}
        self._is_lost = False
        self._lock = threading.Lock()
        self._waited_seconds = 0.0
        self.hidden_seconds = 0.0
        self._prefetch = LayerPrefetch(
            len(self._lanes),
            len(self._groups),
            self._read,
            num_threads=num_threads,
            num_ahead=AHEAD,
        )

    def has_layer(self, layer_index: int) -> bool:
        return self._prefetch.is_loaded(self._group_of(layer_index))

    def load_layer(self, layer_index: int) -> Mapping[RecordId, Exception]:
        number = self._group_of(layer_index)
        group = self._groups[number]
        if layer_index != group.start:
            return {}  # it came with the first layer of its group
        busy_before = self._prefetch.busy_seconds
        failures = self._prefetch.wait(number)
        self._waited_seconds += self._prefetch.busy_seconds - busy_before
        if failures:
            # Find the damage of all other records as well, so that one restart is enough.
            self._is_lost = True
            failures = self._prefetch.drain()
            return {self._lanes[lane].record_id: error for lane, error in failures.items()}
        self._place(number)
        return {}

    def close(self) -> None:
        self._is_lost = True
        self._prefetch.close()
        self.hidden_seconds = max(0.0, self._prefetch.busy_seconds - self._waited_seconds)
        # The next thread that gets the slots' memory on this stream writes after the last copy.
        for event in self._copied.values():
            self._computing.wait_event(event)

    def _group_of(self, layer_index: int) -> int:
        return bisect_right(self._starts, layer_index) - 1

    def _read(self, number: int, group_number: int) -> None:
        """Read a group of layers of one record, and have it copied to the group's slot."""
        lane, group = self._lanes[number], self._groups[group_number]
        if lane.first_layer >= group.stop:
            return
        started = time.perf_counter()
        if lane.decodes_on_gpu:
            self._decode(lane, group)
        else:
            slot = self._slots[group_number % len(self._slots)]
            at_once = max(1, _READ_BYTES // (lane.stride * slot.dtype.itemsize))
            for first in range(0, len(group), at_once):
                some = group[first : first + at_once]
                begin = lane.offset * len(group) + first * lane.stride
                into = slot[begin : begin + len(some) * lane.stride]
                self._copy(lane, some, into, group_number)
        # Only one thread at a time works on a record.
        self._seconds[lane.record_id] += time.perf_counter() - started

    def _copy(self, lane: _Lane, layers: range, into: torch.Tensor, group_number: int) -> None:
        pinned = buffers().take(into.numel() * into.dtype.itemsize)
        copied = None
        try:
            memory = pinned.memory[: into.numel() * into.dtype.itemsize]
            _read_layers(lane, layers, memory, into.dtype, self._fused.spec)
            with self._lock, torch.cuda.stream(self._copying):
                if not self._is_lost:
                    self._copying.wait_event(self._may_write[group_number % len(self._slots)])
                    start_copy(into, memory.view(into.dtype))
                    copied = self._copied[group_number] = self._copying.record_event()
        finally:
            buffers().give_back(pinned, copied)

    def _decode(self, lane: _Lane, group: range) -> None:
        # Tables of the codec are made on first use, and other streams use them: so wait.
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(self._before)
            for layer_index in group:
                self._bring(lane.record_id, layer_index)
            self._copying.synchronize()

    def _place(self, number: int) -> None:
        """Place what was copied to a group's slot, in the stream that computes the prompt."""
        group, slot_number = self._groups[number], number % len(self._slots)
        if number not in self._copied:
            return
        self._computing.wait_event(self._copied[number])
        placement = self._placement(group)
        slot = self._slots[slot_number]
        for table, layers in _runs(group, self._tables):
            placement.place(slot, layers.start - group.start, layers, table)
        self._may_write[slot_number] = self._computing.record_event()

    def _placement(self, group: range) -> Placement:
        """Return where the rows go that a group's layers need."""
        lanes = [one for one in self._lanes if not one.decodes_on_gpu]
        needed = [
            (lane, span)
            for lane in lanes
            for span in self._spans[lane.record_id]
            if self._firsts.get(span, 0) <= group.start
        ]
        key = len(group), frozenset(span for _, span in needed)
        if key not in self._placements:
            parts = [
                Part(
                    lane.offset * len(group),
                    lane.stride,
                    lane.record.num_tokens,
                    span.chunk_start,
                    span.prompt_start,
                    span.length,
                )
                for lane, span in needed
            ]
            keys, values = self._fused.layers
            widths = {table.cos.shape[-1] for table in self._tables}
            self._placements[key] = Placement(parts, keys, values, widths, self._upload)
        return self._placements[key]

    def _upload(self, numbers: torch.Tensor) -> torch.Tensor:
        size = numbers.numel() * numbers.itemsize
        pinned = buffers().take(size)
        memory = pinned.memory[:size].view(numbers.dtype).view(numbers.shape)
        memory.copy_(numbers)
        uploaded = torch.empty_like(memory, device=self._device)
        start_copy(uploaded, memory)
        buffers().give_back(pinned, self._computing.record_event())
        return uploaded


def _lanes(
    records: Mapping[RecordId, EncodedChunk],
    spans: Mapping[RecordId, Sequence[ReusedSpan]],
    first_layers: Mapping[ReusedSpan, int],
    spec: KVSpec,
) -> tuple[list[_Lane], int]:
    """Return the records' lanes, and the elements of one layer of all of them in a slot."""
    lanes, end = [], 0
    # Vectors of D elements begin at multiples of D, layers at 64 bytes, too.
    unit = spec.head_dim * spec.dtype.itemsize
    for record_id, record in records.items():
        num_bytes = padded_size(spec.layer_bytes_per_token * record.num_tokens)
        while num_bytes % unit:
            num_bytes += padded_size(1)
        first = min(first_layers.get(span, 0) for span in spans[record_id])
        lane = _Lane(record_id, record, end, num_bytes // spec.dtype.itemsize, first)
        lanes.append(lane)
        if not lane.decodes_on_gpu:
            end += lane.stride
    return lanes, end


def _read_layers(
    lane: _Lane, layers: range, memory: torch.Tensor, dtype: torch.dtype, spec: KVSpec
) -> None:
    """Fill bytes with layers of a record, as a slot has them."""
    record, stride = lane.record, lane.stride * dtype.itemsize
    if (
        isinstance(record, RawChunk)
        and record.dtype == dtype
        and record.padded_layer_bytes == stride
    ):
        record.read_layers(layers, memory.numpy().data)
        return
    size = spec.layer_bytes_per_token * record.num_tokens
    shape = (2, spec.num_kv_heads, record.num_tokens, spec.head_dim)
    for number, layer_index in enumerate(layers):
        both = memory[number * stride : number * stride + size].view(dtype).view(shape)
        for into, one in zip(both, record.read_layer(layer_index), strict=True):
            into.copy_(one)


def _runs(group: range, tables: Sequence[RotaryTable]) -> Iterator[tuple[RotaryTable, range]]:
    """Yield the layers of a group that follow each other and have one table."""
    for _, run in groupby(group, lambda layer_index: id(tables[layer_index])):
        layers = list(run)
        yield tables[layers[0]], range(layers[0], layers[-1] + 1)
