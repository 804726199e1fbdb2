"""Loading stored chunks into the fused buffer: read, check, place; also streams, and made KV."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

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

PlannedRows = Callable[[Sequence[ReusedSpan]], int]
"""Takes the spans to load; returns the rows, summed over layers, that are then computed."""


@dataclass(frozen=True)
class Target:
    """A time to first token, for a loader.

    Attributes
    ----------
    streaming
        The time, and the estimates.
    planned_rows
        Returns the rows to compute if only some spans are loaded.
    """

    streaming: Streaming
    planned_rows: PlannedRows


def stream_records(
    target: Target,
    records: Mapping[RecordId, EncodedChunk],
    spans: Mapping[RecordId, Sequence[ReusedSpan]],
    opening_seconds: Mapping[RecordId, float],
    place: Callable[[RecordId], None],
    device: torch.device,
) -> tuple[StreamReport, dict[RecordId, str | None]]:
    """Load a prompt's records before anything is computed, in the quality that the time allows.

    Parameters
    ----------
    target
        The target.
    records
        The open records. Those that come from no store are in memory.
    spans, opening_seconds
        For each record its spans, and how long opening it took.
    place
        Decodes all layers of a record into the prompt's buffer.
    device
        The buffer's device.

    Returns
    -------
    (report, lost)
        The report on streaming; why records are not there, None for those quicker to compute.
    """
    streaming = target.streaming
    stored = [one for one, record in records.items() if not isinstance(record, MadeChunk)]
    if stored:
        _expect(streaming, [records[one] for one in stored], [opening_seconds[o] for o in stored])
    for one in records.keys() - set(stored):
        place(one)
    every = [span for some in spans.values() for span in some]

    @functools.cache
    def compute_seconds(left_out: frozenset[int]) -> float | None:
        out = {stored[number] for number in left_out}
        loaded = [span for span in every if span.record_id not in out]
        return streaming.estimates.computing.seconds(target.planned_rows(loaded))

    def seconds_without(numbers: Collection[int]) -> float | None:
        return compute_seconds(frozenset(numbers))

    items = [
        StreamItem(
            one[0],
            records[one],
            functools.partial(place, one),
        )
        for one in stored
    ]
    stream = ChunkStream(items, streaming, seconds_without, DAMAGE, device)
    streamed = stream.run()
    expected = stream.tail_seconds()
    elapsed = time.perf_counter() - streaming.started
    lost: dict[RecordId, str | None] = dict.fromkeys(stored[n] for n in stream.computed)
    lost.update({stored[n]: reason_of(error) for n, error in stream.lost.items()})
    return StreamReport(streaming.ttft, elapsed, streamed, expected), lost


def _expect(
    streaming: Streaming, records: Sequence[EncodedChunk], opening_seconds: Sequence[float]
) -> None:
    """Pass the time of opening and the expected loading speed to the link's estimate."""
    link = streaming.estimates.link
    # The fastest: records opened at the same time slow each other down.
    link.note_request(min(opening_seconds))
    if streaming.load_seconds_per_token:
        num_bytes = sum(sum(record.plane_bytes) for record in records)
        num_tokens = sum(record.num_tokens for record in records)
        link.expect(num_bytes / (num_tokens * streaming.load_seconds_per_token))


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

Bring = Callable[[RecordId, int], None]
"""Reads a layer of a record, decodes it, and places it in the prompt's rows."""

"""Writes rows of one layer, by its index and rotary table, into a buffer."""


class Reading(Protocol):
    """How the layers of open records come into a prompt's buffer.

    Attributes
    ----------
    hidden_seconds
        Wall seconds of reading during which nobody waited; complete after `close`.
    """

    hidden_seconds: float

    def has_layer(self, layer_index: int) -> bool:
        """Return whether `load_layer` would begin at once; if not, the layer is on its way."""

    def load_layer(self, layer_index: int) -> Mapping[RecordId, Exception]:
        """Bring a layer; callers ask for each layer once, in order.

        Returns
        -------
        mapping
            Records that cannot be read, in this layer or later ones, and why. Empty if it is there.
        """

    def close(self) -> None:
        """Stop; nothing is written into the buffer afterwards."""


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
        self._reading: Reading | None = None
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
        if self._target is None or self.stream_report is not None:
            return
        spans = self._spans_by_record()

        def place(record_id: RecordId) -> None:
            for layer_index, table in enumerate(tables):
                self._place(spans[record_id], layer_index, fused, table)

        self.stream_report, lost = stream_records(
            self._target,
            self._records,
            spans,
            self.record_seconds,
            place,
            fused.storage.device,
        )
        if lost:
            raise LostError(lost)

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

        def bring(record_id: RecordId, layer_index: int) -> None:
            needed = [s for s in spans[record_id] if layer_index >= first_layers.get(s, 0)]
            self._place(needed, layer_index, fused, tables[layer_index])

        if self._num_threads and _is_on_card(fused):
            self._reading = CardReading(
                self._records,
                spans,
                first_layers,
                fused,
                tables,
                self._num_threads,
                self.record_seconds,
                self._hot,
            )
            self.num_decoded_by_host = self._reading.num_decoded_by_host
        elif self._num_threads:
            self._reading = _Ahead(tuple(self._records), bring, len(tables), self._num_threads)
        else:
            firsts = {
                one: min(first_layers.get(span, 0) for span in some) for one, some in spans.items()
            }
            self._reading = _OnRequest(self._records, firsts, bring, len(tables))

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
        return self._reading is None or self._reading.has_layer(layer_index)

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
            failures = {} if reading is None else reading.load_layer(layer_index)
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

    def _lose(self, failures: Mapping[RecordId, Exception]) -> NoReturn:
        """Raise LostError for damaged records, or the first error of another kind."""
        self.end()
        for error in failures.values():
            if not isinstance(error, DAMAGE):
                raise error
        raise LostError({one: reason_of(error) for one, error in failures.items()}) from next(
            iter(failures.values())
        )

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


class _OnRequest:
    """Reads each layer when it is asked for, in the caller's thread."""

    hidden_seconds = 0.0

    def __init__(
        self,
        records: Mapping[RecordId, EncodedChunk],
        first_layers: Mapping[RecordId, int],
        bring: Bring,
        num_layers: int,
    ) -> None:
        self._records = records
        self._first_layers = first_layers
        self._bring = bring
        self._num_layers = num_layers

    def has_layer(self, layer_index: int) -> bool:  # noqa: ARG002
        return True

    def load_layer(self, layer_index: int) -> Mapping[RecordId, Exception]:
        for record_id in self._records:
            try:
                self._bring(record_id, layer_index)
            except DAMAGE as error:
                return {record_id: error, **self._other_damage(record_id)}
        return {}

    def close(self) -> None:
        pass

    def _other_damage(self, lost: RecordId) -> dict[RecordId, Exception]:
        """Return the damage of the other records' needed layers, so that one restart is enough."""
        failures: dict[RecordId, Exception] = {}
        for record_id, first_layer in self._first_layers.items():
            if record_id == lost:
                continue
            try:
                for layer_index in range(first_layer, self._num_layers):
                    self._records[record_id].read_layer(layer_index)
            except DAMAGE as error:
                failures[record_id] = error
        return failures


class _Ahead:
    """Reads layers in other threads, ahead of the caller."""

    def __init__(
        self,
        lanes: Sequence[RecordId],
        bring: Bring,
        num_layers: int,
        num_threads: int,
    ) -> None:
        self._lanes = lanes
        self._waited_seconds = 0.0
        self.hidden_seconds = 0.0
        self._prefetch = LayerPrefetch(
            len(lanes),
            num_layers,
            lambda lane, layer_index: bring(lanes[lane], layer_index),
            num_threads=num_threads,
        )

    def has_layer(self, layer_index: int) -> bool:
        return self._prefetch.is_loaded(layer_index)

    def load_layer(self, layer_index: int) -> Mapping[RecordId, Exception]:
        busy_before = self._prefetch.busy_seconds
        failures = self._prefetch.wait(layer_index)
        self._waited_seconds += self._prefetch.busy_seconds - busy_before
        if failures:
            # Find the damage of all other records as well, so that one restart is enough.
            failures = self._prefetch.drain()
        return {self._lanes[lane]: error for lane, error in failures.items()}

    def close(self) -> None:
        self._prefetch.close()
        self.hidden_seconds = max(0.0, self._prefetch.busy_seconds - self._waited_seconds)
