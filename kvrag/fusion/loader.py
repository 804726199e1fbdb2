"""Loading stored chunks into the fused buffer: read, check, place; also streams, and made KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import NoReturn

import torch

from kvrag.codec.base import Destination, EncodedChunk
from kvrag.errors import EngineError
from kvrag.fusion.card import CardReading
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.slices import (
    DAMAGE,
    MISS_ABSENT,
    MISS_DAMAGED,
    REASONS,
    Clock,
    LostError,
    Slices,
    reason_of,
    until,
)
from kvrag.fusion.staging import HotRecords
from kvrag.kvcache import ChunkKV, FusedKV
from kvrag.loading import threads
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.loading.stream_plan import StreamReport
from kvrag.loading.streaming import ChunkStream, Streaming, StreamItem
from kvrag.models.kv_model import ALONE, Ranks
from kvrag.positions.rotary import RotaryTable


@dataclass(frozen=True)
class Target:
    """A time to first token, for a loader.

    Attributes
    ----------
    streaming
        The time, and the estimates.
    planned_rows
        Takes the spans to load; returns the rows, summed over layers, that are then computed.
    """

    streaming: Streaming
    planned_rows: Callable[[Sequence[ReusedSpan]], int]


class NotMadeError(Exception):
    """No prompt has made an optional record yet, and this one needs too little of it."""


@dataclass(frozen=True)
class MadeChunk(EncodedChunk):
    """KV in memory, which came from no store.

    Attributes
    ----------
    kv
        The KV as the model gave it.
    seconds
        How long this prompt computed it; None if another prompt did.
    """

    kv: ChunkKV
    seconds: float | None

    @property
    def num_tokens(self) -> int:
        return self.kv.num_tokens

    @property
    def size_bytes(self) -> int:
        return self.kv.size_bytes

    @property
    def bytes_read(self) -> int:
        return 0

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.keys[layer_index], self.kv.values[layer_index]


OpenKV = Callable[[str, tuple[int, ...]], EncodedChunk | None]
"""Takes a chunk id and the chunk's context tokens; returns the opened record, or None if the store
has none. Raises NotMadeError if it is right that there is none.
"""


class SpanLoader:
    """Loads the stored KV of a prompt's spans into its buffer, one layer at a time.

    `open` opens records and checks their headers. After `begin`, threads read layers in the
    background; without threads, each layer is read on request. So the rows of later layers take no
    memory before they are needed. With a target, `stream` loads all layers before. Damage in a
    store raises only `LostError`.

    Parameters
    ----------
    open_kv
        Opens a record of a chunk; several threads call it.
    num_threads
        Number of records read at the same time while the caller computes; 0 reads each layer on
        request, in the caller's thread.
    ranks
        The processes that fuse the prompt, each with its heads. All of them raise the same
        `LostError`, or they would compute different rows. They agree once a layer.
    target
        The time to first token, if the records are to be there before anything is computed.
    hot
        What stays on a graphics card for later prompts; the caller closes it.

    Attributes
    ----------
    hidden_seconds
        Wall seconds of reading layers during which nobody waited; complete after `end`.
    record_seconds
        For each record, the seconds that a thread took to open and read it.
    made_seconds
        For each record that was made for this prompt, the seconds of computing it.
    stream_report
        The report on streaming; None without a target, and before `stream`.
    num_loaded
        Layers from 0 on for which nothing is left to do.
    num_decoded_by_host
        Records that the host decodes for a card, which has no kernels for them.
    """

    def __init__(
        self,
        open_kv: OpenKV,
        num_threads: int = 0,
        ranks: Ranks = ALONE,
        target: Target | None = None,
        hot: HotRecords | None = None,
    ) -> None:
        self._open_kv = open_kv
        self._num_threads = num_threads
        self._ranks = ranks
        self._target = target
        self._hot = hot
        self._reading: LayerPrefetch | None = None
        self._into: tuple[FusedKV, Sequence[RotaryTable]] | None = None
        self._spans: Sequence[ReusedSpan] = ()
        self._records: dict[RecordId, EncodedChunk] = {}
        self._bytes_of_dropped = 0
        self.hidden_seconds = 0.0
        self.record_seconds: dict[RecordId, float] = {}
        self.made_seconds: dict[RecordId, float] = {}
        self.stream_report: StreamReport | None = None
        self.num_loaded = self.num_decoded_by_host = 0

    def open(self, spans: Sequence[ReusedSpan]) -> None:
        """Set the spans to load, and open their records.

        Records that are already open stay open.

        Raises
        ------
        LostError
            If some of the records are not available; the others are open.
        EngineError
            If another rank fails in another way.
        """
        with self._agreeing(spans):
            self._open(spans)

    def _open(self, spans: Sequence[ReusedSpan]) -> None:
        self._spans = spans
        ends: dict[RecordId, int] = {}
        for span in spans:
            ends[span.record_id] = max(ends.get(span.record_id, 0), span.chunk_end)
        for record_id in self._records.keys() - ends.keys():
            self._bytes_of_dropped += self._records.pop(record_id).bytes_read
        wanted = [record_id for record_id in ends if record_id not in self._records]
        # Opening a record costs at least one round trip.
        found = threads.each(self._opened, wanted, max(self._num_threads, 1))
        lost: dict[RecordId, str | None] = {}
        for record_id, record in zip(wanted, found, strict=True):
            if isinstance(record, NotMadeError):
                lost[record_id] = None
            elif isinstance(record, Exception):
                lost[record_id] = reason_of(record)
            elif record is None:
                lost[record_id] = MISS_ABSENT
            elif record.num_tokens < ends[record_id]:
                lost[record_id] = MISS_DAMAGED
            else:
                self._records[record_id] = record
                if isinstance(record, MadeChunk) and record.seconds is not None:
                    self.made_seconds[record_id] = record.seconds
        if lost:
            raise LostError(lost)

    def _opened(self, record_id: RecordId) -> EncodedChunk | Exception | None:
        started = time.perf_counter()
        try:
            return self._open_kv(*record_id)
        except (*DAMAGE, NotMadeError) as error:
            return error
        finally:
            self.record_seconds[record_id] = time.perf_counter() - started

    def num_tokens(self, record_ids: Iterable[RecordId]) -> int:
        """Return the number of tokens in open records."""
        return sum(self._records[one].num_tokens for one in set(record_ids))

    @property
    def bytes_loaded(self) -> int:
        """Bytes read from the store, including headers."""
        return self._bytes_of_dropped + sum(r.bytes_read for r in self._records.values())

    def stream(self, fused: FusedKV, tables: Sequence[RotaryTable]) -> None:
        """With a target, load all layers; later calls, and those without a target, do nothing.

        Raises
        ------
        LostError
            If records are not available, or are quicker to compute.
        """
        target = self._target
        if target is None or self.stream_report is not None:
            return
        streaming, spans = target.streaming, self._spans_by_record()

        def place(record_id: RecordId) -> None:
            for layer_index, table in enumerate(tables):
                self._place(spans[record_id], layer_index, fused, table)

        stored = []
        for one, record in self._records.items():
            if isinstance(record, MadeChunk):  # in memory
                place(one)
            else:
                stored.append(one)
        if stored:
            self._expect(streaming, stored)

        @cache
        def compute_seconds(left_out: frozenset[int]) -> float | None:
            out = {stored[number] for number in left_out}
            loaded = [span for span in self._spans if span.record_id not in out]
            return streaming.estimates.computing.seconds(target.planned_rows(loaded))

        items = [StreamItem(one[0], self._records[one], partial(place, one)) for one in stored]
        device = fused.storage.device
        stream = ChunkStream(items, streaming, compute_seconds, DAMAGE, device)
        streamed = stream.run()
        elapsed = time.perf_counter() - streaming.started
        expected = stream.tail_seconds()
        self.stream_report = StreamReport(streaming.ttft, elapsed, streamed, expected)
        lost: dict[RecordId, str | None] = dict.fromkeys(stored[n] for n in stream.computed)
        lost.update({stored[n]: reason_of(error) for n, error in stream.lost.items()})
        if lost:
            raise LostError(lost)

    def _expect(self, streaming: Streaming, stored: Sequence[RecordId]) -> None:
        """Pass the time of opening and the expected loading speed to the link's estimate."""
        link = streaming.estimates.link
        # The fastest: records opened at the same time slow each other down.
        link.note_request(min(self.record_seconds[one] for one in stored))
        if streaming.load_seconds_per_token:
            records = [self._records[one] for one in stored]
            num_bytes = sum(sum(record.plane_bytes) for record in records)
            num_tokens = sum(record.num_tokens for record in records)
            link.expect(num_bytes / (num_tokens * streaming.load_seconds_per_token))

    def begin(
        self,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        unneeded: Mapping[ReusedSpan, int] | None = None,
    ) -> None:
        """Start to read all layers into `fused`; with threads, in the background.

        Call `end` before you use the buffer for anything else.

        Parameters
        ----------
        fused
            The buffer.
        tables
            The rotary table of each layer.
        unneeded
            For some spans, the number of first layers whose stored KV is not needed; 0 for the
            others.
        """
        self.end()
        self._into, self.num_loaded = (fused, tables), 0
        if self.stream_report is not None or not self._spans:
            return
        first_layers = unneeded or {}
        spans = self._spans_by_record()

        if self._num_threads and _is_on_card(fused):
            into = first_layers, fused, tables
            more = self._num_threads, self.record_seconds, self._hot
            self._reading = reading = CardReading(self._records, spans, *into, *more)
            self.num_decoded_by_host = reading.num_decoded_by_host
            return
        spans_of = list(spans.values())

        def bring(lane: int, layer_index: int) -> None:
            needed = [s for s in spans_of[lane] if layer_index >= first_layers.get(s, 0)]
            self._place(needed, layer_index, fused, tables[layer_index])

        num_threads = self._num_threads
        self._reading = LayerPrefetch(len(spans), len(tables), bring, num_threads=num_threads)

    def end(self) -> None:
        """Stop reading; the loader writes nothing into the buffer afterwards."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()
            self.hidden_seconds += reading.hidden_seconds

    @property
    def waits(self) -> bool:
        """Whether other threads read records, which are perhaps far away."""
        return self._num_threads > 0

    def has_layer(self, layer_index: int) -> bool:
        """Return whether `load_layer` would begin at once; if not, the layer is on its way."""
        return self._reading is None or self._reading.is_loaded(layer_index)

    def bring(self, layers: range, clock: Clock) -> Slices[None]:
        """Load layers as `load_layer` does, those that are not there yet, as they come."""
        for layer_index in range(max(layers.start, self.num_loaded), layers.stop):
            if layer_index >= self.num_loaded:  # some come with others
                yield from until(partial(self.has_layer, layer_index), clock)
                with torch.no_grad():
                    self.load_layer(layer_index)
        clock.lap("load")

    def load_layer(self, layer_index: int) -> None:
        """Load one layer of every span that needs it into its rows, keys at global positions.

        Raises
        ------
        LostError
            If this layer of a record is damaged or unreadable; with background reading, if any
            layer is. Rows computed with the lost records must be computed again.
        EngineError
            If another rank fails in another way.
        """
        assert self._into is not None, "begin comes first"
        with self._agreeing(self._spans):
            reading = self._reading
            failures = {} if reading is None else reading.wait(layer_index)
            if failures:
                self._lose(failures)
        self.num_loaded = layer_index + 1
        # Ranks agree about each layer: the groups that are on their cards may differ.
        if isinstance(reading, CardReading) and self._ranks.size == 1:
            self.num_loaded = reading.num_placed

    def is_sound(self) -> bool:
        """Return whether `check` would return at once, after all layers are loaded."""
        return not isinstance(self._reading, CardReading) or self._reading.is_sound()

    def check(self) -> None:
        """Ask a card, after all layers are loaded, whether what it decoded was what was written.

        Raises LostError as `load_layer` does. Only what one process reads alone is decoded there.
        """
        failures = self._reading.damage() if isinstance(self._reading, CardReading) else {}
        if failures:
            self._lose(failures)

    def _place(
        self, spans: Sequence[ReusedSpan], layer_index: int, fused: FusedKV, table: RotaryTable
    ) -> None:
        """Place one layer of one record's spans, decoded once."""
        into = [
            Destination(
                keys=fused.keys[layer_index][0, :, rows],
                values=fused.values[layer_index][0, :, rows],
                tokens=slice(span.chunk_start, span.chunk_end),
                table=table,
                rows=rows,
            )
            for span in spans
            for rows in [slice(span.prompt_start, span.prompt_end)]
        ]
        if not into:
            return
        record_id = spans[0].record_id
        started = time.perf_counter()
        self._records[record_id].place_layer(layer_index, *into)
        # Only one thread at a time works on a record.
        self.record_seconds[record_id] += time.perf_counter() - started

    def _lose(self, failures: Mapping[int, Exception]) -> NoReturn:
        """Raise LostError for damaged records, by number, or the first error of another kind."""
        self.end()
        for error in failures.values():
            if not isinstance(error, DAMAGE):
                raise error
        records = list(self._records)
        lost = {records[number]: reason_of(error) for number, error in failures.items()}
        raise LostError(lost) from error

    def _spans_by_record(self) -> dict[RecordId, list[ReusedSpan]]:
        spans: dict[RecordId, list[ReusedSpan]] = {record_id: [] for record_id in self._records}
        for span in self._spans:
            spans[span.record_id].append(span)
        return spans

    @contextmanager
    def _agreeing(self, spans: Sequence[ReusedSpan]) -> Iterator[None]:
        """Lose on all ranks what one of them loses."""
        if self._ranks.size == 1:
            yield
            return
        record_ids = list(dict.fromkeys(span.record_id for span in spans))
        codes = [0] * len(record_ids)
        failure: BaseException | None = None
        try:
            yield
        except LostError as error:
            for number, record_id in enumerate(record_ids):
                if record_id in error.lost:
                    codes[number] = 1 + REASONS.index(error.lost[record_id])
        except BaseException as error:
            failure = error
        *agreed, has_failed = self._ranks.most([*codes, int(failure is not None)])
        if failure is not None:
            raise failure
        if has_failed:
            self.end()
            raise EngineError("another of the engine's processes could not load the prompt's KV")
        told = zip(record_ids, agreed, strict=True)
        lost = {record_id: REASONS[code - 1] for record_id, code in told if code}
        if lost:
            self.end()
            raise LostError(lost)


def _is_on_card(fused: FusedKV) -> bool:
    return fused.storage.device.type == "cuda"
