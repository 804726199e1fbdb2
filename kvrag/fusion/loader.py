"""Stored chunks into the fused buffer: read, check, place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from kvrag.codec.base import Destination, EncodedChunk
from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.fusion.layout import ReusedSpan
from kvrag.kvcache import FusedKV
from kvrag.loading import threads
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.positions.rotary import RotaryTable

MISS_ABSENT = "KV not in the store"
MISS_DAMAGED = "record damaged"
MISS_UNREADABLE = "store unreadable"
MISS_PROFILE = "codec profile missing"

DAMAGE = (RecordError, StoreError, IndexFormatError, ProfileError)
"""What the state of a store or a record may raise: the span is then computed, and counted."""

OpenKV = Callable[[str, tuple[int, ...]], EncodedChunk | None]
"""From a chunk id, and the tokens that the chunk was encoded behind, to the opened record, or None
where the store has none.
"""

RecordId = tuple[str, tuple[int, ...]]
"""A chunk's id, and the tokens that the record meant was encoded behind."""

TierOf = Callable[[str, tuple[int, ...]], int | None]
"""From the same, the number of the store's tier that would deliver the record, 0 the fastest, or
None where that is not known; nothing is read.
"""

WriteKV = Callable[[int, FusedKV, RotaryTable], None]
"""Writes rows of one layer, by its index and rotary table, into a buffer."""


class SpanLostError(Exception):
    """A span could not be loaded whole; the loader has already left it out."""


class SpanLoader:
    """Brings the stored KV of a prompt's spans into its buffer, one layer at a time.

    Records are opened and their headers checked at once. Layers are read in the background from
    `begin` on, or each when it is asked for, so that the rows of later layers take no memory before
    they are needed. Nothing is raised for the state of a store except `SpanLostError`.

    Parameters
    ----------
    spans
        Stretches of the prompt and of their chunks.
    open_kv
        Opens a record of a chunk; called by several threads.
    write_more
        Writes what else has KV of its own into a layer, behind the spans; None: nothing has.
    num_threads
        Records read at the same time, while the caller computes; 0 reads each layer when it is
        asked for, in the caller's thread.

    Attributes
    ----------
    spans
        Those that can be had, in prompt order; the others must be computed.
    misses
        Why spans were left out: reason to number of spans.
    lost
        The same of each chunk: id to reason.
    hidden_seconds
        Wall seconds in which layers were read and nobody waited for them; complete after `end`.
    record_seconds
        Of each record, the seconds in which a thread opened and read it: chunk id and context to
        seconds.
    """

    def __init__(
        self,
        spans: Sequence[ReusedSpan],
        open_kv: OpenKV,
        write_more: WriteKV | None = None,
        num_threads: int = 0,
    ) -> None:
        self._write_more = write_more
        self._num_threads = num_threads
        self._prefetch: LayerPrefetch | None = None
        self._lanes: tuple[RecordId, ...] = ()
        self._waited_seconds = 0.0
        self._unneeded: Mapping[ReusedSpan, int] = {}
        self.hidden_seconds = 0.0
        self.record_seconds: dict[RecordId, float] = {}
        self.spans: list[ReusedSpan] = []
        self.misses: Counter[str] = Counter()
        self.lost: dict[str, str] = {}
        self._bytes_of_dropped = 0
        self._records: dict[RecordId, EncodedChunk] = {}
        opened = self._open(list(dict.fromkeys(map(record_id_of, spans))), open_kv)
        for span in spans:
            record = opened[record_id_of(span)]
            if isinstance(record, Exception):
                self._miss(span, reason_of(record))
            elif record is None:
                self._miss(span, MISS_ABSENT)
            elif span.chunk_end > record.num_tokens:
                self._miss(span, MISS_DAMAGED)
            else:
                self._records[record_id_of(span)] = record
                self.spans.append(span)

    def _open(
        self, wanted: Sequence[RecordId], open_kv: OpenKV
    ) -> dict[RecordId, EncodedChunk | Exception | None]:
        def opened(record_id: RecordId) -> EncodedChunk | Exception | None:
            started = time.perf_counter()
            try:
                return open_kv(*record_id)
            except DAMAGE as error:
                return error
            finally:
                self.record_seconds[record_id] = time.perf_counter() - started

        # Each costs a round trip at least.
        found = threads.each(opened, wanted, max(self._num_threads, 1))
        return dict(zip(wanted, found, strict=True))

    @property
    def bytes_loaded(self) -> int:
        """Bytes read from the store, headers included."""
        return self._bytes_of_dropped + sum(r.bytes_read for r in self._records.values())

    def begin(
        self,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        unneeded: Mapping[ReusedSpan, int] | None = None,
    ) -> None:
        """Read all layers into `fused` from now on, in the background.

        `end` must be called before the buffer is used for anything else.

        Parameters
        ----------
        unneeded
            Of how many first layers a span's stored KV are of no use; none of those left out.
        """
        self.end()
        self._unneeded = unneeded or {}
        if not self._num_threads or not self.spans:
            return
        self._lanes = lanes = tuple(self._records)
        spans = {
            lane: [span for span in self.spans if record_id_of(span) == lane] for lane in lanes
        }

        def bring(lane: int, layer_index: int) -> None:
            for span in spans[lanes[lane]]:
                self._place(span, layer_index, fused, tables[layer_index])

        self._prefetch = LayerPrefetch(
            len(lanes),
            len(tables),
            bring,
            num_threads=self._num_threads,
            device=fused.storage.device,
        )

    def end(self) -> None:
        """Stop reading; nothing is written into the buffer afterwards."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.close()
            self.hidden_seconds += max(0.0, prefetch.busy_seconds - self._waited_seconds)
            self._waited_seconds = 0.0

    def load_layer(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """Have one layer of every span that needs it in its rows, keys at global positions.

        Raises
        ------
        SpanLostError
            When a layer of a span is damaged or unreadable, this one or, where layers are read in
            the background, any. The span is counted and left out; what has been computed with it
            must be computed again.
        """
        if self._prefetch is not None:
            busy_before = self._prefetch.busy_seconds
            failures = self._prefetch.wait(layer_index)
            self._waited_seconds += self._prefetch.busy_seconds - busy_before
            if failures:
                # One new beginning is enough: let the other records show their damage too.
                self._lose({self._lanes[i]: e for i, e in self._prefetch.drain().items()})
        else:
            for span in self.spans:
                try:
                    self._place(span, layer_index, fused, table)
                except DAMAGE as error:
                    lost = record_id_of(span)
                    self._lose({lost: error, **self._other_damage(lost, len(fused.keys))})
        if self._write_more is not None:
            self._write_more(layer_index, fused, table)

    def _place(
        self, span: ReusedSpan, layer_index: int, fused: FusedKV, table: RotaryTable
    ) -> None:
        if layer_index < self._unneeded.get(span, 0):
            return
        rows = slice(span.prompt_start, span.prompt_end)
        into = Destination(
            keys=fused.keys[layer_index][0, :, rows],
            values=fused.values[layer_index][0, :, rows],
            tokens=slice(span.chunk_start, span.chunk_end),
            table=table,
            rows=rows,
        )
        record_id = record_id_of(span)
        started = time.perf_counter()
        self._records[record_id].place_layer(layer_index, into)
        # By one thread at a time for each record.
        self.record_seconds[record_id] += time.perf_counter() - started

    def _lose(self, failures: Mapping[RecordId, Exception]) -> NoReturn:
        """Leave out records, and raise what that means for the caller."""
        self.end()
        for record_id, error in failures.items():
            if not isinstance(error, DAMAGE):
                raise error
            self._drop(record_id, reason_of(error))
        first, error = next(iter(failures.items()))
        raise SpanLostError(f"chunk {first[0]}: {reason_of(error)}") from error

    def _miss(self, span: ReusedSpan, reason: str) -> None:
        self.misses[reason] += 1
        self.lost[span.chunk_id] = reason

    def _drop(self, lost: RecordId, reason: str) -> None:
        for span in self.spans:
            if record_id_of(span) == lost:
                self._miss(span, reason)
        self._leave_out(lost)

    def _leave_out(self, record_id: RecordId) -> None:
        self.spans = [span for span in self.spans if record_id_of(span) != record_id]
        self._bytes_of_dropped += self._records.pop(record_id).bytes_read

    def _other_damage(self, lost: RecordId, num_layers: int) -> dict[RecordId, Exception]:
        """Read what is needed of the other records, so that one new beginning is enough."""
        first_layers: dict[RecordId, int] = {}
        for span in self.spans:
            known = first_layers.get(record_id_of(span), num_layers)
            first_layers[record_id_of(span)] = min(known, self._unneeded.get(span, 0))
        failures: dict[RecordId, Exception] = {}
        first_layers.pop(lost)
        for record_id, first_layer in first_layers.items():
            try:
                for layer_index in range(first_layer, num_layers):
                    self._records[record_id].read_layer(layer_index)
            except DAMAGE as error:
                failures[record_id] = error
        return failures


def record_id_of(span: ReusedSpan) -> RecordId:
    """Return which record a span is taken from."""
    return span.chunk_id, span.context_ids


def reason_of(error: Exception) -> str:
    """Return why a span could not be had, for a report."""
    if isinstance(error, ProfileError):
        return MISS_PROFILE
    return MISS_UNREADABLE if isinstance(error, StoreError) else MISS_DAMAGED
