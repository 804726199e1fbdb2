"""Streaming stored chunks into the fused buffer, towards a time to first token."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.loss import DAMAGE, reason_of
from kvrag.fusion.made import MadeChunk
from kvrag.loading.stream_plan import StreamReport
from kvrag.loading.streaming import ChunkStream, Streaming, StreamItem

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
            # Only spans without compressed chunks have text to compute instead.
            not any(span.num_compressed for span in spans[one]),
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
