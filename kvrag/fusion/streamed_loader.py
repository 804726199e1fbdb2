"""Streaming stored chunks into the fused buffer, towards a time to first token."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.loader import (
    DAMAGE,
    LostError,
    OpenKV,
    SpanLoader,
    WriteKV,
    reason_of,
)
from kvrag.fusion.made import MadeChunk
from kvrag.kvcache import FusedKV
from kvrag.loading.stream_report import StreamReport
from kvrag.loading.streaming import ChunkStream, Streaming, StreamItem
from kvrag.positions.rotary import RotaryTable

PlannedRows = Callable[[Sequence[ReusedSpan]], int]
"""Takes the spans to load; returns the rows, summed over layers, that are then computed."""


class StreamedLoader(SpanLoader):
    """Loads a prompt's spans before anything is computed, in the quality that the time allows.

    Parameters
    ----------
    open_kv, write_more, num_threads
        See `SpanLoader`; the threads open records.
    streaming
        The target time to first token, and the estimates.
    planned_rows
        Returns the rows to compute if only some spans are loaded.

    Attributes
    ----------
    report
        The report on streaming; None before `begin`.
    """

    def __init__(
        self,
        open_kv: OpenKV,
        write_more: WriteKV | None,
        num_threads: int,
        streaming: Streaming,
        planned_rows: PlannedRows,
    ) -> None:
        super().__init__(open_kv, write_more, num_threads)
        self._streaming = streaming
        self._planned_rows = planned_rows
        self.report: StreamReport | None = None

    def begin(
        self,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        unneeded: Mapping[ReusedSpan, int] | None = None,  # noqa: ARG002
    ) -> None:
        """Load all layers into `fused` on the first call; later calls do nothing.

        Raises
        ------
        LostError
            If records are not available, or are quicker to compute.
        """
        if self.report is not None:
            return
        lost = self._stream(fused, tables)
        if lost:
            raise LostError(lost)

    def _stream(self, fused: FusedKV, tables: Sequence[RotaryTable]) -> dict[RecordId, str | None]:
        self._expect()
        streaming = self._streaming
        lanes = self._stored()
        spans = self._spans_by_record()

        def place(lane: RecordId) -> None:
            for layer_index, table in enumerate(tables):
                self._place(spans[lane], layer_index, fused, table)

        for lane in spans.keys() - set(lanes):
            place(lane)

        @functools.cache
        def compute_seconds(left_out: frozenset[int]) -> float | None:
            records = {lanes[number] for number in left_out}
            loaded = [span for span in self._spans if span.record_id not in records]
            return streaming.estimates.computing.seconds(self._planned_rows(loaded))

        def seconds_without(numbers: Collection[int]) -> float | None:
            return compute_seconds(frozenset(numbers))

        items = [
            StreamItem(
                lane[0],
                self._records[lane],
                # Only spans without compressed chunks have text to compute instead.
                not any(span.num_compressed for span in spans[lane]),
                functools.partial(place, lane),
            )
            for lane in lanes
        ]
        stream = ChunkStream(items, streaming, seconds_without, DAMAGE, fused.storage.device)
        streamed = stream.run()
        expected = stream.tail_seconds()
        elapsed = time.perf_counter() - streaming.started
        self.report = StreamReport(streaming.ttft, elapsed, streamed, expected)
        lost: dict[RecordId, str | None] = dict.fromkeys(lanes[n] for n in stream.computed)
        lost.update({lanes[n]: reason_of(error) for n, error in stream.lost.items()})
        return lost

    def _expect(self) -> None:
        """Pass the time of opening and the expected loading speed to the link's estimate."""
        link, lanes = self._streaming.estimates.link, self._stored()
        if not lanes:
            return
        # The fastest: records opened at the same time slow each other down.
        link.note_request(min(self.record_seconds[lane] for lane in lanes))
        if self._streaming.load_seconds_per_token:
            records = [self._records[lane] for lane in lanes]
            num_bytes = sum(sum(record.plane_bytes) for record in records)
            num_tokens = sum(record.num_tokens for record in records)
            seconds = num_tokens * self._streaming.load_seconds_per_token
            link.expect(num_bytes / seconds)

    def _stored(self) -> tuple[RecordId, ...]:
        """Return the records that come from the store: the others are in memory."""
        return tuple(
            one for one, record in self._records.items() if not isinstance(record, MadeChunk)
        )

    def load_layer(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """Write other stored KV of the layer; the spans' is already there."""
        if self._write_more is not None:
            self._write_more(layer_index, fused, table)
