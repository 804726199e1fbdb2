"""Streams a context chunk by chunk, to meet a time to first token (CacheGen §5.3).

While chunk i is received, a separate thread decodes what has arrived of the chunks before it, to
its place in the prompt's buffer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.loading import stream_plan as p
from kvrag.loading.pace import Pace

# What requests know about the link that they share: its speed, and the other requests on it.


# The time of a smaller transfer says more about the request than about the link.
_LEAST_BYTES = 2048
# A measurement's weight falls to about a third after so much further transfer time. A speed that
# was measured earlier starts with a weight of _PRIOR_SECONDS.
_MEMORY_SECONDS = 1.0
_PRIOR_SECONDS = 0.2


class Share:
    """One request on a link.

    Attributes
    ----------
    num_left
        Chunks that it still has to fetch.
    """

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left


class NetworkLink:
    """The link to one store, shared by all requests of an engine. Thread-safe.

    Its estimated speed is the harmonic mean of two speeds: that of the last chunk (CacheGen §5.3),
    and that of all recent chunks, so that one slow moment does not decide alone.

    Parameters
    ----------
    clock
        A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        self._bytes_carried = 0
        self._last_speed: float | None = None
        self._lately_bytes = self._lately_seconds = 0.0
        self._request_seconds: float | None = None
        self._levels: Counter[str] = Counter()
        self._deadlines: Counter[str] = Counter()

    def expect(self, bytes_per_second: float) -> None:
        """Use a speed that was measured earlier, if none is known yet."""
        with self._lock:
            if self._last_speed is None:
                self._last_speed = bytes_per_second
                self._lately_bytes = bytes_per_second * _PRIOR_SECONDS
                self._lately_seconds = _PRIOR_SECONDS

    def note_request(self, seconds: float) -> None:
        """Record how long a request for almost no bytes took."""
        with self._lock:
            self._request_seconds = seconds

    @contextmanager
    def shared(self, num_chunks: int) -> Iterator[Share]:
        """Register a request for `num_chunks` chunks on the link while the block runs."""
        share = Share(num_chunks)
        with self._lock:
            self._shares.append(share)
        try:
            yield share
        finally:
            with self._lock:
                self._shares.remove(share)

    @property
    def state(self) -> p.LinkState:
        """What is currently known about the link."""
        with self._lock:
            left = [share.num_left for share in self._shares]
            speed = None
            if self._last_speed is not None:
                speed = 2.0 / (1.0 / self._last_speed + self._lately_seconds / self._lately_bytes)
            return p.LinkState(
                speed,
                self._request_seconds or 0.0,
                lambda ahead: max(1, sum(one > ahead for one in left)),
            )

    @contextmanager
    def carrying(self, num_bytes: int) -> Iterator[None]:
        """Measure the link while the block fetches `num_bytes` bytes.

        Bytes that other requests receive meanwhile count too, so the result is the throughput of
        the link, not this request's share of it.
        """
        with self._lock:
            before, started = self._bytes_carried, self._clock()
        yield
        with self._lock:
            self._bytes_carried += num_bytes
            seconds = self._clock() - started
            # The request's latency is not part of the speed. It is known only roughly.
            seconds -= min(self._request_seconds or 0.0, 0.5 * seconds)
            carried = self._bytes_carried - before
            # A small transfer is only a lower bound of the speed.
            is_telling = num_bytes >= _LEAST_BYTES or self._last_speed is None
            if is_telling and seconds > 0.0:
                self._last_speed = carried / seconds
                kept = math.exp(-seconds / _MEMORY_SECONDS)
                self._lately_bytes = self._lately_bytes * kept + carried
                self._lately_seconds = self._lately_seconds * kept + seconds

    def count(self, levels: Mapping[str, int], is_met: bool) -> None:
        """Count a request's chunks by level, and whether it met its deadline."""
        with self._lock:
            self._levels.update(levels)
            self._deadlines["met" if is_met else "missed"] += 1

    def counts(self) -> Mapping[str, Any]:
        """Return the counts of chunks by level (``text``, ``1/3`` ...), and of deadlines."""
        with self._lock:
            return {"levels": dict(self._levels), "deadlines": dict(self._deadlines)}


@dataclass(frozen=True)
class StreamEstimates:
    """Measurements that requests of one engine leave for later ones.

    Attributes
    ----------
    link, computing, decoding
        The speed of the link to the store, of computing rows (summed over layers), and of decoding
        tokens.
    """

    link: NetworkLink = field(default_factory=NetworkLink)
    computing: Pace = field(default_factory=Pace)
    decoding: Pace = field(default_factory=Pace)


@dataclass(frozen=True)
class Streaming:
    """A requested time to first token, and what streaming needs to meet it.

    Attributes
    ----------
    ttft
        The requested seconds to the first token.
    started
        When they began, on the clock of `time.perf_counter`.
    estimates
        Measurements of earlier requests, which this one adds to.
    load_seconds_per_token
        Seconds to load all planes of a token, from an earlier calibration, for a link about which
        nothing else is known. None without a calibration.
    make_plan
        Makes the plan: `StreamPlan`, or another to compare it with.
    """

    ttft: float
    started: float
    estimates: StreamEstimates
    load_seconds_per_token: float | None = None
    make_plan: Callable[[Sequence[tuple[int, ...]], p.ComputeSeconds], p.StreamPlan] = p.StreamPlan

    def closing(self, report: p.StreamReport, compute_seconds: float) -> p.StreamReport:
        """Return the report with the final times, once the first token exists, and count it."""
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
    place
        Decodes the planes in use to their place in the prompt's buffer.
    """

    chunk_id: str
    chunk: EncodedChunk
    place: Callable[[], None]


class ChunkStream:
    """Streams the records of one context.

    Parameters
    ----------
    items
        The records, in the order of the prompt.
    streaming
        The requested time to first token, and earlier measurements.
    compute_seconds
        See `StreamPlan`.
    errors
        Exceptions of stores and records. After one, the chunk is lost, or stays as coarse as it is.
    device
        The device of the prompt's buffer.

    Attributes
    ----------
    computed
        After `run`, the numbers of the items that were chosen to be computed.
    lost
        The numbers of the items that could not be loaded, and why.
    """

    def __init__(
        self,
        items: Sequence[StreamItem],
        streaming: Streaming,
        compute_seconds: p.ComputeSeconds,
        errors: tuple[type[Exception], ...],
        device: torch.device,
    ) -> None:
        self._items = items
        self._streaming = streaming
        self._errors = errors
        self._plan = streaming.make_plan(
            [item.chunk.plane_bytes for item in items], compute_seconds
        )
        self._rows = [
            p.StreamedChunk(item.chunk_id, p.TEXT, len(item.chunk.plane_bytes), 0, 0.0, 0.0, None)
            for item in items
        ]
        self._decoder = _Decoder(items, streaming.estimates.decoding, errors, device)
        self.computed: set[int] = set()
        self.lost: dict[int, Exception] = {}

    def run(self) -> tuple[p.StreamedChunk, ...]:
        """Stream, and return what was streamed, in order, without lost items."""
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
                # The caller was interrupted: do not wait for running requests.
                for item in self._items:
                    item.chunk.cancel()
                raise
            finally:
                decoder.finish()
            decoding.result()
        self.computed = {n for n, planes in enumerate(plan.num_planes) if planes == p.TEXT}
        # Damage is known only after decoding.
        self.lost |= {n: error for n, error in decoder.lost.items() if n not in self.computed}
        for number, planes in decoder.num_placed.items():
            self._rows[number] = replace(self._rows[number], num_planes=planes)
        return tuple(row for n, row in enumerate(self._rows) if n not in self.lost)

    def tail_seconds(self) -> float | None:
        """Return the expected seconds of computing after the stream."""
        return self._plan.tail_seconds() or None

    def _seconds_left(self) -> float:
        due = self._streaming.started + self._streaming.ttft
        return due - time.perf_counter() - self._decoder.expected_seconds()

    def _take(self, step: p.Step, state: p.LinkState, fetcher: ThreadPoolExecutor) -> bool:
        """Do one step; return whether there is time for another."""
        number = step.chunk
        if step.num_planes == p.TEXT:
            self._decoder.leave_out(number)
            self._plan.done(step)
            self._rows[number] = replace(self._rows[number], num_planes=p.TEXT)
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
            return False  # the link is down; use what has arrived
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

    def _wait(self, future: Future[None], step: p.Step) -> bool:
        """Wait for a request; if it is not needed, only as long as there is time."""
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


@dataclass(eq=False)
class _Decoder:
    """Decodes the planes of each record that have arrived, complete records first."""

    items: Sequence[StreamItem]
    pace: Pace
    errors: tuple[type[Exception], ...]
    device: torch.device
    num_placed: dict[int, int] = field(default_factory=dict)
    lost: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._waiting: dict[int, int] = {}
        self._left_out: set[int] = set()
        self._busy: int | None = None
        self._is_finished = False
        self._changed = threading.Condition()
        self._inference_mode = torch.is_inference_mode_enabled()

    def add(self, number: int, num_planes: int) -> None:
        """Queue a record to be decoded with `num_planes` planes, instead of fewer."""
        with self._changed:
            self._waiting[number] = num_planes
            self._changed.notify_all()

    def leave_out(self, number: int) -> None:
        """Stop decoding a record, which will be computed."""
        with self._changed:
            self._waiting.pop(number, None)
            self._left_out.add(number)

    def finish(self) -> None:
        """Accept no more records; `run` returns when everything that is queued is decoded."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def expected_seconds(self) -> float:
        """Return the expected seconds of decoding the queue, and one more record."""
        with self._changed:
            tokens = sum(self.items[number].chunk.num_tokens for number in self._waiting)
            tokens += max((item.chunk.num_tokens for item in self.items), default=0)
            if self._busy is not None:
                tokens += self.items[self._busy].chunk.num_tokens
        return self.pace.seconds(tokens) or 0.0

    def run(self) -> None:
        """Decode until `finish` is called and the queue is empty."""
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            while (taken := self._next()) is not None:
                self._decode(*taken)

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            self._busy = None
            self._changed.wait_for(lambda: self._waiting or self._is_finished)
            if not self._waiting:
                return None
            # Complete records come first: they will not be decoded again.
            _, number = min(
                (planes < len(self.items[one].chunk.plane_bytes), one)
                for one, planes in self._waiting.items()
            )
            self._busy = number
            return number, self._waiting.pop(number)

    def _decode(self, number: int, num_planes: int) -> None:
        item = self.items[number]
        for planes in range(num_planes, 0, -1):
            started = time.perf_counter()
            try:
                item.chunk.use(planes)
                item.place()
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
            except self.errors as error:
                # Try again without the damaged plane, over what it has written.
                if planes == 1:
                    self.lost[number] = error
                continue
            self.pace.observe(item.chunk.num_tokens, time.perf_counter() - started)
            with self._changed:
                if number not in self._left_out:
                    self.num_placed[number] = planes
            return
