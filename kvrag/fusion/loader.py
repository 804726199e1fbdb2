"""Loading stored chunks into the fused buffer: read, check, place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from kvrag.codec.base import Destination, EncodedChunk
from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.made import MadeChunk, NotMadeError
from kvrag.kvcache import FusedKV
from kvrag.loading import threads
from kvrag.loading.patience import SlowStoreError
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.positions.deferred import DeferredTable
from kvrag.positions.rotary import RotaryTable

MISS_ABSENT = "KV not in the store"
MISS_DAMAGED = "record damaged"
MISS_UNREADABLE = "store unreadable"
MISS_PROFILE = "codec profile missing"
MISS_SLOW = "store slower than computing"

DAMAGE = (RecordError, StoreError, IndexFormatError, ProfileError)
"""Errors that a store or record may raise; the span is then computed, and counted as a miss."""

OpenKV = Callable[[str, tuple[int, ...]], EncodedChunk | None]
"""Takes a chunk id and the chunk's context tokens; returns the opened record, or None if the store
has none. Raises NotMadeError if it is right that there is none.
"""

WriteKV = Callable[[int, FusedKV, RotaryTable], None]
"""Writes rows of one layer, by its index and rotary table, into a buffer."""


class LostError(Exception):
    """Records are unavailable or not wanted: the prompt has to be planned without them.

    Attributes
    ----------
    lost
        For each record the reason for the miss; None if computing it is a choice.
    """

    def __init__(self, lost: Mapping[RecordId, str | None]) -> None:
        super().__init__(", ".join(f"chunk {one[0]}: {why}" for one, why in lost.items()))
        self.lost = lost


class SpanLoader:
    """Loads the stored KV of a prompt's spans into its buffer, one layer at a time.

    `open` opens records and checks their headers. After `begin`, threads read layers in the
    background; without threads, each layer is read on request. So the rows of later layers take no
    memory before they are needed. Damage in a store raises only `LostError`.

    Parameters
    ----------
    open_kv
        Opens a record of a chunk; several threads call it.
    write_more
        Writes other stored KV of a layer besides the spans'; None if there is none.
    num_threads
        Number of records read at the same time while the caller computes; 0 reads each layer on
        request, in the caller's thread.

    Attributes
    ----------
    hidden_seconds
        Wall seconds of reading layers during which nobody waited; complete after `end`.
    record_seconds
        For each record, the seconds that a thread took to open and read it.
    made_seconds
        For each record that was made for this prompt, the seconds of computing it.
    """

    def __init__(
        self,
        open_kv: OpenKV,
        write_more: WriteKV | None = None,
        num_threads: int = 0,
    ) -> None:
        self._open_kv = open_kv
        self._write_more = write_more
        self._num_threads = num_threads
        self._prefetch: LayerPrefetch | None = None
        self._lanes: tuple[RecordId, ...] = ()
        # On a GPU: threads write a layer's keys, and its caller places them.
        self._deferred: tuple[DeferredTable, ...] = ()
        self._waited_seconds = 0.0
        self._unneeded: Mapping[ReusedSpan, int] = {}
        self.hidden_seconds = 0.0
        self.record_seconds: dict[RecordId, float] = {}
        self.made_seconds: dict[RecordId, float] = {}
        self._spans: Sequence[ReusedSpan] = ()
        self._bytes_of_dropped = 0
        self._records: dict[RecordId, EncodedChunk] = {}

    def open(self, spans: Sequence[ReusedSpan]) -> None:
        """Set the spans to load, and open their records.

        Records that are already open stay open.

        Raises
        ------
        LostError
            If some of the records are not available; the others are open.
        """
        self._spans = spans
        ends: dict[RecordId, int] = {}
        for span in spans:
            ends[span.record_id] = max(ends.get(span.record_id, 0), span.chunk_end)
        for record_id in self._records.keys() - ends.keys():
            self._drop(record_id)
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

    def begin(
        self,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        unneeded: Mapping[ReusedSpan, int] | None = None,
    ) -> None:
        """Start to read all layers into `fused` in the background.

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
        self._unneeded = unneeded or {}
        if not self._num_threads or not self._spans:
            return
        self._lanes = lanes = tuple(self._records)
        spans = self._spans_by_record()
        self._deferred = ()
        if fused.storage.device.type != "cpu":
            tables = self._deferred = tuple(map(DeferredTable.of, tables))

        def bring(lane: int, layer_index: int) -> None:
            self._place(spans[lanes[lane]], layer_index, fused, tables[layer_index])

        self._prefetch = LayerPrefetch(
            len(lanes),
            len(tables),
            bring,
            num_threads=self._num_threads,
            device=fused.storage.device,
        )

    def end(self) -> None:
        """Stop reading; the loader writes nothing into the buffer afterwards."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.close()
            self.hidden_seconds += max(0.0, prefetch.busy_seconds - self._waited_seconds)
            self._waited_seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether other threads read records, which are perhaps far away."""
        return self._num_threads > 0

    def has_layer(self, layer_index: int) -> bool:
        """Return whether `load_layer` would begin at once; if not, the layer is on its way."""
        return self._prefetch is None or self._prefetch.is_loaded(layer_index)

    def load_layer(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """Load one layer of every span that needs it into its rows, keys at global positions.

        Raises
        ------
        LostError
            If this layer of a record is damaged or unreadable; with background reading, if any
            layer is. Rows computed with the lost records must be computed again.
        """
        if self._prefetch is not None:
            busy_before = self._prefetch.busy_seconds
            failures = self._prefetch.wait(layer_index)
            self._waited_seconds += self._prefetch.busy_seconds - busy_before
            if failures:
                # Find the damage of all other records as well, so that one restart is enough.
                self._lose({self._lanes[i]: e for i, e in self._prefetch.drain().items()})
            if self._deferred:
                self._deferred[layer_index].finish(fused.keys[layer_index][0])
        else:
            for lost, spans in self._spans_by_record().items():
                try:
                    self._place(spans, layer_index, fused, table)
                except DAMAGE as error:
                    self._lose({lost: error, **self._other_damage(lost, len(fused.keys))})
        if self._write_more is not None:
            self._write_more(layer_index, fused, table)

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
            if layer_index >= self._unneeded.get(span, 0)
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

    def _drop(self, record_id: RecordId) -> None:
        self._bytes_of_dropped += self._records.pop(record_id).bytes_read

    def _spans_by_record(self) -> dict[RecordId, list[ReusedSpan]]:
        spans: dict[RecordId, list[ReusedSpan]] = {record_id: [] for record_id in self._records}
        for span in self._spans:
            spans[span.record_id].append(span)
        return spans

    def _other_damage(self, lost: RecordId, num_layers: int) -> dict[RecordId, Exception]:
        """Return the damage of the other records' needed layers, so that one restart is enough."""
        first_layers: dict[RecordId, int] = {}
        for span in self._spans:
            known = first_layers.get(span.record_id, num_layers)
            first_layers[span.record_id] = min(known, self._unneeded.get(span, 0))
        failures: dict[RecordId, Exception] = {}
        first_layers.pop(lost)
        for record_id, first_layer in first_layers.items():
            try:
                for layer_index in range(first_layer, num_layers):
                    self._records[record_id].read_layer(layer_index)
            except DAMAGE as error:
                failures[record_id] = error
        return failures


def reason_of(error: Exception) -> str:
    """Return the reason, for a report, why a span is not available."""
    if isinstance(error, ProfileError):
        return MISS_PROFILE
    if isinstance(error, SlowStoreError):
        return MISS_SLOW
    return MISS_UNREADABLE if isinstance(error, StoreError) else MISS_DAMAGED
