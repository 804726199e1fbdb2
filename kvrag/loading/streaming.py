"""A context streamed chunk by chunk towards a time to first token (CacheGen §5.3).

While chunk i is received, what has arrived of the chunks before it is decoded, in a thread of its
own, to where it belongs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.loading.network_link import NetworkLink
from kvrag.loading.pace import Pace
from kvrag.loading.stream_plan import (
    TEXT,
    ChunkSize,
    ComputeSeconds,
    LinkState,
    Step,
    StreamPlan,
)
from kvrag.loading.stream_report import StreamedChunk, StreamReport


@dataclass(frozen=True)
class StreamEstimates:
    """What requests of one engine learn for those after them.

    Attributes
    ----------
    link, computing, decoding
        What is known of the way to the store, of computing rows (summed over layers), and of
        decoding tokens.
    """

    link: NetworkLink = field(default_factory=NetworkLink)
    computing: Pace = field(default_factory=Pace)
    decoding: Pace = field(default_factory=Pace)


@dataclass(frozen=True)
class Streaming:
    """A time to first token to stream towards.

    Attributes
    ----------
    ttft
        Seconds to the first token that are aimed at.
    started
        When they began, on the clock of `time.perf_counter`.
    estimates
        What is known, and learnt.
    load_seconds_per_token
        What was once measured for loading a token whole, for a link of which nothing is known; None
        where that was not.
    make_plan
        What chooses: `StreamPlan`, or one to compare it with.
    """

    ttft: float
    started: float
    estimates: StreamEstimates
    load_seconds_per_token: float | None = None
    make_plan: Callable[[Sequence[ChunkSize], ComputeSeconds], StreamPlan] = StreamPlan

    @property
    def deadline(self) -> float:
        """When the first token is due."""
        return self.started + self.ttft

    def closing(self, report: StreamReport, compute_seconds: float) -> StreamReport:
        """Return a report with what it came to now that the first token is there, and count it."""
        seconds = time.perf_counter() - self.started
        closed = replace(report, seconds=seconds, compute_seconds=compute_seconds)
        self.estimates.link.count(closed.levels, closed.is_met)
        return closed


@dataclass(frozen=True)
class StreamItem:
    """One record of a context.

    Attributes
    ----------
    chunk_id, chunk
        The chunk, and its opened record.
    has_text
        Whether it can be computed instead.
    place
        Decodes the record, as far as it is used, to where it belongs.
    """

    chunk_id: str
    chunk: EncodedChunk
    has_text: bool
    place: Callable[[], None]


class ChunkStream:
    """Brings the records of one context.

    Parameters
    ----------
    items
        In the order of the prompt.
    streaming
        The objective, and what is known.
    compute_seconds
        See `StreamPlan`.
    errors
        What a store or a record may raise: the chunk is then lost, or stays as coarse as it was.
    device
        Where the records are placed.

    Attributes
    ----------
    computed
        After `run`, the numbers of the items that are to be computed, by choice.
    lost
        The numbers of those that could not be had, and why.
    """

    def __init__(
        self,
        items: Sequence[StreamItem],
        streaming: Streaming,
        compute_seconds: ComputeSeconds,
        errors: tuple[type[Exception], ...],
        device: torch.device,
    ) -> None:
        self._items = items
        self._streaming = streaming
        self._errors = errors
        self._plan = streaming.make_plan(
            [ChunkSize(item.chunk.plane_bytes, item.has_text) for item in items], compute_seconds
        )
        self._rows = [
            StreamedChunk(item.chunk_id, TEXT, len(item.chunk.plane_bytes), 0, 0.0, 0.0, None)
            for item in items
        ]
        self._decoder = _Decoder(items, streaming.estimates.decoding, errors, device)
        self.computed: set[int] = set()
        self.lost: dict[int, Exception] = {}

    def run(self) -> tuple[StreamedChunk, ...]:
        """Stream, and return what was streamed, in order; lost items are left out."""
        link, plan, decoder = self._streaming.estimates.link, self._plan, self._decoder
        with (
            link.shared(len(self._items)) as share,
            ThreadPoolExecutor(1, "kvrag-fetch") as fetcher,
            ThreadPoolExecutor(1, "kvrag-decode") as pool,
        ):
            decoding = pool.submit(decoder.run)
            try:
                while True:
                    state = link.state
                    step = plan.next(self._seconds_left(), state)
                    if step is None or not self._take(step, state, fetcher):
                        break
                    share.num_left = len(plan.undecided)
            except BaseException:
                # Whoever wanted it has gone: what is being fetched is not waited for.
                for item in self._items:
                    item.chunk.cancel()
                raise
            finally:
                decoder.finish()
            decoding.result()
        self.computed = {n for n, planes in enumerate(plan.num_planes) if planes == TEXT}
        # What was damaged is known only now.
        self.lost |= {n: error for n, error in decoder.lost.items() if n not in self.computed}
        for number, planes in decoder.num_placed.items():
            self._rows[number] = replace(self._rows[number], num_planes=planes)
        return tuple(row for n, row in enumerate(self._rows) if n not in self.lost)

    def tail_seconds(self) -> float | None:
        """Return the expected seconds of what is computed behind the stream."""
        return self._plan.tail_seconds() or None

    def _seconds_left(self) -> float:
        due = self._streaming.deadline - time.perf_counter()
        return due - self._decoder.expected_seconds()

    def _take(self, step: Step, state: LinkState, fetcher: ThreadPoolExecutor) -> bool:
        """Take one step; say whether there is time for another."""
        number = step.chunk
        if step.num_planes == TEXT:
            self._decoder.leave_out(number)
            self._plan.done(step)
            self._rows[number] = replace(self._rows[number], num_planes=TEXT)
            return True
        row = self._rows[number]
        begin, started = row.num_planes, time.perf_counter()
        num_bytes = sum(self._items[number].chunk.plane_bytes[begin : step.num_planes])
        future = fetcher.submit(self._fetch, number, step.num_planes, num_bytes)
        try:
            is_here = self._wait(future, step)
        except self._errors as error:
            if step.is_needed:
                self._plan.lose(number)
                self.lost[number] = error
                return True
            return False  # the link is gone; what is there is of use without it
        self._rows[number] = replace(
            row,
            num_planes=step.num_planes if is_here else begin,
            num_bytes=row.num_bytes + (num_bytes if is_here else 0),
            expected_seconds=row.expected_seconds + (step.expected_seconds or 0.0),
            seconds=row.seconds + time.perf_counter() - started,
            bytes_per_second=state.bytes_per_second,
        )
        if is_here:
            self._plan.done(step)
            self._decoder.add(number, step.num_planes)
        return is_here

    def _fetch(self, number: int, num_planes: int, num_bytes: int) -> None:
        with self._streaming.estimates.link.carrying(num_bytes):
            self._items[number].chunk.fetch(num_planes)

    def _wait(self, future: Future[None], step: Step) -> bool:
        """Wait for what is being fetched; what is not needed, only as long as there is time."""
        if step.is_needed:
            future.result()
            return True
        left = self._seconds_left() - self._plan.tail_seconds()
        try:
            future.result(min(max(0.0, left), threading.TIMEOUT_MAX))
        except TimeoutError:
            self._items[step.chunk].chunk.cancel()
            try:
                future.result()
            except self._errors:
                return False
        return True


class _Decoder:
    """Decodes what arrives, each record as far as it is there, whole records first."""

    def __init__(
        self,
        items: Sequence[StreamItem],
        pace: Pace,
        errors: tuple[type[Exception], ...],
        device: torch.device,
    ) -> None:
        self._items = items
        self._pace = pace
        self._errors = errors
        self._device = device
        self._waiting: dict[int, int] = {}
        self._left_out: set[int] = set()
        self._busy: int | None = None
        self._is_finished = False
        self._changed = threading.Condition()
        self._inference_mode = torch.is_inference_mode_enabled()
        self.num_placed: dict[int, int] = {}
        self.lost: dict[int, Exception] = {}

    def add(self, number: int, num_planes: int) -> None:
        """Have so many planes of a record decoded, in place of fewer."""
        with self._changed:
            self._waiting[number] = num_planes
            self._changed.notify_all()

    def leave_out(self, number: int) -> None:
        """Decode no more of a record: it is computed."""
        with self._changed:
            self._waiting.pop(number, None)
            self._left_out.add(number)

    def finish(self) -> None:
        """Take nothing more; `run` ends when all that is waiting is decoded."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def expected_seconds(self) -> float:
        """Return what decoding what waits, and one record more, is expected to take."""
        with self._changed:
            tokens = sum(self._items[number].chunk.num_tokens for number in self._waiting)
            tokens += max((item.chunk.num_tokens for item in self._items), default=0)
            if self._busy is not None:
                tokens += self._items[self._busy].chunk.num_tokens
        return self._pace.seconds(tokens) or 0.0

    def run(self) -> None:
        """Decode until `finish`."""
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            while (taken := self._next()) is not None:
                self._decode(*taken)

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            self._busy = None
            self._changed.wait_for(lambda: self._waiting or self._is_finished)
            if not self._waiting:
                return None
            # A record that is whole will not be decoded again.
            number = min(
                self._waiting,
                key=lambda one: (
                    self._waiting[one] < len(self._items[one].chunk.plane_bytes),
                    one,
                ),
            )
            self._busy = number
            return number, self._waiting.pop(number)

    def _decode(self, number: int, num_planes: int) -> None:
        item = self._items[number]
        for planes in range(num_planes, 0, -1):
            started = time.perf_counter()
            try:
                item.chunk.use(planes)
                item.place()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            except self._errors as error:
                # A damaged plane leaves the coarser ones; what it has overwritten is written anew.
                if planes == 1:
                    self.lost[number] = error
                continue
            self._pace.observe(item.chunk.num_tokens, time.perf_counter() - started)
            with self._changed:
                if number not in self._left_out:
                    self.num_placed[number] = planes
            return
