"""Stored chunks into the fused buffer, streamed towards a time to first token."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.loader import (
    DAMAGE,
    OpenKV,
    RecordId,
    SpanLoader,
    WriteKV,
    reason_of,
    record_id_of,
)
from kvrag.kvcache import FusedKV
from kvrag.loading.stream_report import StreamReport
from kvrag.loading.streaming import ChunkStream, Streaming, StreamItem
from kvrag.positions.rotary import RotaryTable

PlannedRows = Callable[[Sequence[ReusedSpan]], int]
"""From the spans that are loaded to the rows, summed over layers, that are then computed."""


class StreamedLoader(SpanLoader):
    """Brings the spans of a prompt before anything is computed, as finely as there is time for.

    What becomes of chunks that are computed from their text for want of time is in the report of
    `stream`; `misses` are those that could not be had.

    Parameters
    ----------
    spans, open_kv, write_more, num_threads
        See `SpanLoader`; the threads open records.
    streaming
        The time to first token aimed at, and what is known.
    """

    def __init__(
        self,
        spans: Sequence[ReusedSpan],
        open_kv: OpenKV,
        write_more: WriteKV | None,
        num_threads: int,
        streaming: Streaming,
    ) -> None:
        super().__init__(spans, open_kv, write_more, num_threads)
        self._streaming = streaming
        link, records = streaming.known.link, self._records.values()
        if not records:
            return
        # Opened at the same time they slow one another down.
        link.note_request(min(self.record_seconds[record] for record in self._records))
        if streaming.load_seconds_per_token:
            num_bytes = sum(sum(record.plane_bytes) for record in records)
            num_tokens = sum(record.num_tokens for record in records)
            link.expect(num_bytes / (num_tokens * streaming.load_seconds_per_token))

    def stream(
        self, fused: FusedKV, tables: Sequence[RotaryTable], planned_rows: PlannedRows
    ) -> StreamReport:
        """Bring all layers into `fused` now; return what came of it so far.

        Spans that are to be computed instead, or cannot be had, are left out of `spans`.
        """
        streaming = self._streaming
        lanes = tuple(self._records)
        spans = {
            lane: [span for span in self.spans if record_id_of(span) == lane] for lane in lanes
        }

        def place(lane: RecordId) -> None:
            for layer_index, table in enumerate(tables):
                for span in spans[lane]:
                    self._place(span, layer_index, fused, table)

        @functools.cache
        def compute_seconds(left_out: frozenset[int]) -> float | None:
            records = {lanes[number] for number in left_out}
            loaded = [span for span in self.spans if record_id_of(span) not in records]
            return streaming.known.computing.seconds(planned_rows(loaded))

        def seconds_without(numbers: Collection[int]) -> float | None:
            return compute_seconds(frozenset(numbers))

        items = [
            StreamItem(
                lane[0],
                self._records[lane],
                # Rows that stand for compressed chunks have no text of their own.
                not any(span.num_compressed for span in spans[lane]),
                functools.partial(place, lane),
            )
            for lane in lanes
        ]
        stream = ChunkStream(items, streaming, seconds_without, DAMAGE, fused.storage.device)
        streamed = stream.run()
        expected = stream.tail_seconds()
        for number, error in stream.lost.items():
            self._drop(lanes[number], reason_of(error))
        for number in stream.computed:
            self._leave_out(lanes[number])
        elapsed = time.perf_counter() - streaming.started
        return StreamReport(streaming.ttft, elapsed, streamed, expected)

    def begin(
        self,
        fused: FusedKV,
        tables: Sequence[RotaryTable],
        unneeded: Mapping[ReusedSpan, int] | None = None,
    ) -> None:
        """Do nothing: all there is has been brought."""

    def load_layer(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """Write what has KV of its own behind the spans, which are there."""
        if self._write_more is not None:
            self._write_more(layer_index, fused, table)
