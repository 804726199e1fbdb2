"""Reading stored KV to a graphics card: whole groups of layers, and no wait between them.

Threads read a group of layers of a record at once into page-locked memory. One stream copies it to
one of a few slots on the card; the prompt's own stream waits for the copies, there, and places the
rows of all records from the slot into the buffer. Events say when a slot, or page-locked memory,
may be written again. The host waits for the card only where a reader is two buffers ahead of it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.placement import Part, Placement
from kvrag.fusion.staging import GROUP_LAYERS, Hot, HotRecords, Source
from kvrag.kvcache import FusedKV
from kvrag.loading.pinned import buffers, copy_stream, start_copy
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.positions.rotary import RotaryTable

AHEAD = 2
"""How many groups may be read before the prompt needs them."""
_SLOT_BYTES = 256 << 20

Bring = Callable[[RecordId, int], None]
"""Reads a layer of a record, decodes it, and places it in the prompt's rows."""


@dataclass(frozen=True)
class _Lane:
    """A record, and its layers' places: in memory that stays, or in a slot from `offset` on."""

    record_id: RecordId
    source: Source
    hot: Hot | None
    offset: int
    first_layer: int

    @property
    def is_staged(self) -> bool:
        """Whether the layers pass through slots."""
        return self.hot is None and not self.source.decodes_on_gpu


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
    hot
        What stays on the card for later prompts; None: nothing.
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
        hot: HotRecords | None = None,
    ) -> None:
        self._spans, self._firsts = spans, first_layers
        self._fused, self._tables = fused, tables
        self._bring, self._seconds = bring, seconds
        self._device = fused.storage.device
        self._lanes, size = self._lanes_of(records, hot)
        edges = {0, len(tables), *first_layers.values()}
        most = min(GROUP_LAYERS, _SLOT_BYTES // max(1, size * fused.spec.dtype.itemsize))
        if all(lane.hot is not None and lane.hot.is_whole for lane in self._lanes):
            most = len(tables)  # nothing to wait for
        edges |= set(range(0, len(tables), max(1, most)))
        starts = sorted(edge for edge in edges if edge <= len(tables))
        self._groups = [range(*ends) for ends in pairwise(starts)]
        self._starts = starts[:-1]
        # The stream that computes the prompt: it places, and owns the slots' memory.
        self._computing = torch.cuda.current_stream(self._device)
        self._copying = copy_stream(self._device)
        longest = max(map(len, self._groups), default=0)
        num_slots = min(AHEAD + 1, len(self._groups))
        self._slots = torch.empty(
            num_slots, longest * size, dtype=fused.spec.dtype, device=self._device
        )
        # Kernels that were started before may still use the memory of slots and buffer.
        before = self._computing.record_event()
        self._before, self._may_write = before, [before] * num_slots
        self._copied: list[list[torch.cuda.Event]] = [[] for _ in self._groups]
        self._placement: Placement | None = None
        self._is_lost = False
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
        for event in chain.from_iterable(self._copied):
            self._computing.wait_event(event)

    def _lanes_of(
        self, records: Mapping[RecordId, EncodedChunk], hot: HotRecords | None
    ) -> tuple[list[_Lane], int]:
        """Return the records' lanes, and the elements of one layer of all of them in a slot."""
        lanes, end = [], 0
        num_rotated = max((table.cos.shape[-1] for table in self._tables), default=0)
        for record_id, record in records.items():
            source, place = Source(record, self._fused.spec, num_rotated), None
            if hot is not None:
                source, place = hot.take(source)
            first = min(self._firsts.get(span, 0) for span in self._spans[record_id])
            lanes.append(_Lane(record_id, source, place, end, first))
            end += source.stride * lanes[-1].is_staged
        return lanes, end

    def _group_of(self, layer_index: int) -> int:
        return bisect_right(self._starts, layer_index) - 1

    def _read(self, number: int, group_number: int) -> None:
        """Read a group of layers of one record, and have it copied to the group's slot."""
        lane, group = self._lanes[number], self._groups[group_number]
        # Memory that stays gets all layers, those that this prompt does not need, too.
        if lane.first_layer >= group.stop and lane.hot is None:
            return
        started = time.perf_counter()
        if lane.hot is not None:
            self._copied[group_number] += lane.hot.bring(group, self._is_wanted)
        elif lane.source.decodes_on_gpu:
            self._decode(lane, group)
        else:
            number = group_number % len(self._slots)
            begin = lane.offset * len(group)
            into = self._slots[number][begin : begin + lane.source.stride * len(group)]
            after = self._may_write[number]
            copied = lane.source.copy(group, into, after, self._is_wanted)
            self._copied[group_number] += copied
        # Only one thread at a time works on a record.
        self._seconds[lane.record_id] += time.perf_counter() - started

    def _is_wanted(self) -> bool:
        return not self._is_lost

    def _decode(self, lane: _Lane, group: range) -> None:
        # Tables of the codec are made on first use, and other streams use them: so wait.
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(self._before)
            for layer_index in group:
                self._bring(lane.record_id, layer_index)
            self._copying.synchronize()

    def _place(self, number: int) -> None:
        """Place a group, in the stream that computes the prompt."""
        if self._placement is None:
            keys, values = self._fused.layers
            widths = {table.cos.shape[-1] for table in self._tables}
            parts = [list(self._parts(one)) for one in range(len(self._groups))]
            if not any(parts):
                return
            self._placement = Placement(parts, keys, values, widths, self._upload)
        for event in self._copied[number]:
            self._computing.wait_event(event)
        for table, layers in _runs(self._groups[number], self._tables):
            self._placement.place(number, layers, table)
        self._may_write[number % len(self._slots)] = self._computing.record_event()

    def _parts(self, number: int) -> Iterator[Part]:
        """Yield where the rows go that a group's layers need."""
        group, slot = self._groups[number], self._slots[number % len(self._slots)]
        for lane in self._lanes:
            if lane.hot is not None:
                there = lane.hot.memory, 0, lane.source.stride, 0
            elif lane.is_staged:
                there = slot, lane.offset * len(group), lane.source.stride, group.start
            else:
                continue
            num_tokens = lane.source.record.num_tokens
            for span in self._spans[lane.record_id]:
                if self._firsts.get(span, 0) <= group.start:
                    rows = span.chunk_start, span.prompt_start, span.length
                    yield Part(*there, num_tokens, *rows)

    def _upload(self, numbers: torch.Tensor) -> torch.Tensor:
        size = numbers.numel() * numbers.itemsize
        pinned = buffers().take(size)
        memory = pinned.memory[:size].view(numbers.dtype).view(numbers.shape)
        memory.copy_(numbers)
        uploaded = torch.empty_like(memory, device=self._device)
        start_copy(uploaded, memory)
        buffers().give_back(pinned, self._computing.record_event())
        return uploaded


def _runs(group: range, tables: Sequence[RotaryTable]) -> Iterator[tuple[RotaryTable, range]]:
    """Yield the layers of a group that follow each other and have one table."""
    for _, run in groupby(group, lambda layer_index: id(tables[layer_index])):
        layers = list(run)
        yield tables[layers[0]], range(layers[0], layers[-1] + 1)
