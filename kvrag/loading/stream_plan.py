"""Chooses which bytes of a context to request next, so that its first token is in time.

Source: CacheGen (SIGCOMM 2024) §5.3 and Algorithm 1. For each chunk, choose the least lossy
configuration: text, which is computed and lossless, or a level of the codec. With it, this chunk
and all chunks after it must be expected within the time left, at the throughput of the last chunk.

Deviations: here the levels of a record are its planes, so a coarser level is a part of the finer
one. A level finer than the coarsest is chosen at once only if the remaining chunks would need at
most a quarter of the time left at that level. When every chunk has arrived, the time left is spent
on missing planes, the coarsest chunk first. So a link that becomes faster is used, and a link that
becomes slower has not been spent on the first chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# The report on streaming one context.


@dataclass(frozen=True)
class StreamedChunk:
    """One chunk that was streamed, or computed instead.

    Attributes
    ----------
    chunk_id
        The chunk's id.
    num_planes, most_planes
        Planes that were received and used, 0 for text; and planes of its record.
    num_bytes
        Bytes received.
    expected_seconds, seconds
        How long receiving it was expected to take, and how long it took. A request without an
        expectation counts as 0.
    bytes_per_second
        The link's estimated speed at the last request for the chunk; None if it was not known.
    """

    chunk_id: str
    num_planes: int
    most_planes: int
    num_bytes: int
    expected_seconds: float
    seconds: float
    bytes_per_second: float | None

    @property
    def level(self) -> str:
        """``text``, or its planes, such as ``1/3``."""
        return f"{self.num_planes}/{self.most_planes}" if self.num_planes else "text"


@dataclass(frozen=True)
class StreamReport:
    """The result of streaming one context.

    Attributes
    ----------
    ttft
        The requested time to first token, in seconds.
    seconds
        The time to first token, or the time until this report was made.
    chunks
        The chunks, in the order of the prompt. Those that could not be loaded are misses instead.
    expected_compute_seconds, compute_seconds
        How long computing after the stream was expected to take, and took; None if not known.
    """

    ttft: float
    seconds: float
    chunks: tuple[StreamedChunk, ...]
    expected_compute_seconds: float | None = None
    compute_seconds: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the first token was in time."""
        return self.seconds <= self.ttft

    @property
    def levels(self) -> Mapping[str, int]:
        """How many chunks were received at each level."""
        return dict(sorted(Counter(chunk.level for chunk in self.chunks).items()))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, including derived ones."""
        return {**asdict(self), "is_met": self.is_met, "levels": dict(self.levels)}

    def one_line(self) -> str:
        """Return a summary in one line."""
        what = ", ".join(
            f"{count} {'as' if level == 'text' else 'at'} {level}"
            for level, count in self.levels.items()
        )
        late = "" if self.is_met else ", late"
        return f"{self.seconds:.2f} s of {self.ttft:g} s{late}: {what or 'no chunk'}"


TEXT = 0
"""The number of planes of a chunk that is computed from its text."""

# Chunks are requested with more than their first plane only if all are expected within this share
# of the time left.
_PRUDENCE = 0.25


@dataclass(frozen=True)
class LinkState:
    """What is currently known about the link.

    Attributes
    ----------
    bytes_per_second
        The speed of all requests on it together; None if nothing is known.
    request_seconds
        The latency of a request, without its bytes.
    num_sharing
        For a number k: how many requests, this one included, have more than k chunks left.
    """

    bytes_per_second: float | None
    request_seconds: float = 0.0
    num_sharing: Callable[[int], int] = lambda ahead: 1  # noqa: ARG005


@dataclass(frozen=True)
class Step:
    """The next step of streaming.

    Attributes
    ----------
    chunk
        The chunk's number.
    num_planes
        Planes that it has after the step; `TEXT` to compute it.
    expected_seconds
        Expected seconds on the link; 0 for text, None if nothing is known about the link.
    is_needed
        Whether the chunk has nothing yet. A step that is not needed may be cancelled.
    """

    chunk: int
    num_planes: int
    expected_seconds: float | None
    is_needed: bool


ComputeSeconds = Callable[[frozenset[int]], float | None]
"""For the numbers of the chunks to compute: the seconds of all computing after streaming; None if
that is not known.
"""


class StreamPlan:
    """Chooses, step by step, which parts of one context to stream.

    Parameters
    ----------
    chunks
        For each chunk, in the order in which they are streamed, the bytes of each plane, from
        coarse to fine.
    compute_seconds
        The seconds of computing. While they are not known, no chunk is chosen as text.

    Attributes
    ----------
    num_planes
        For each chunk, the planes it has, `TEXT`, or None for nothing yet.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, ...]],
        compute_seconds: ComputeSeconds,
    ) -> None:
        self._chunks = chunks
        self._compute_seconds = compute_seconds
        self._lost: set[int] = set()
        self._has_measured = False
        self.num_planes: list[int | None] = [None] * len(chunks)

    @property
    def computed(self) -> frozenset[int]:
        """Chunks that are computed: by choice, or because they are lost."""
        chosen = (number for number, planes in enumerate(self.num_planes) if planes == TEXT)
        return frozenset(chosen) | self._lost

    @property
    def undecided(self) -> list[int]:
        """Chunks that have nothing yet."""
        return [
            number
            for number, planes in enumerate(self.num_planes)
            if planes is None and number not in self._lost
        ]

    def tail_seconds(self) -> float:
        """Return the seconds of computing after streaming, as chosen so far; 0 if not known."""
        return self._compute_seconds(self.computed) or 0.0

    def done(self, step: Step) -> None:
        """Record that a step has been done."""
        self.num_planes[step.chunk] = step.num_planes
        self._has_measured = self._has_measured or step.num_planes != TEXT

    def lose(self, chunk: int) -> None:
        """Record that a chunk cannot be loaded: it will be computed."""
        self._lost.add(chunk)

    def next(self, seconds_left: float, link: LinkState) -> Step | None:
        """Return the next step, or None if there is no time for another.

        Parameters
        ----------
        seconds_left
            Seconds until the first token is due.
        """
        undecided = self.undecided
        left = seconds_left - self.tail_seconds()
        if not undecided:
            return self._refine(left, link)
        chunk = undecided[0]
        computing = self._compute_seconds(self.computed | set(undecided))
        if computing is not None and computing <= seconds_left:
            return Step(chunk, TEXT, 0.0, is_needed=True)
        if link.bytes_per_second is None:
            # Nothing is known about the link: the smallest useful request measures it.
            return Step(chunk, 1, None, is_needed=True)
        finest = len(self._chunks[chunk])
        for planes in range(finest, 1, -1):
            if self._delay(undecided, planes, link) <= _PRUDENCE * left:
                return self._step(chunk, planes, link)
        coarsest = self._step(chunk, 1, link)
        if self._delay(undecided, 1, link) <= left:
            return coarsest
        if not self._has_measured:
            # The link was slow for an earlier prompt, but that may have changed.
            return coarsest
        # The first token will be late: choose what takes less time.
        assert coarsest.expected_seconds is not None
        more = self._more_seconds(chunk)
        if more is not None and more < coarsest.expected_seconds:
            return Step(chunk, TEXT, 0.0, is_needed=True)
        return coarsest

    def _refine(self, left: float, link: LinkState) -> Step | None:
        """Return the next step when every chunk has arrived, if there is time for one."""
        if link.bytes_per_second is None:
            return None
        coarse = [
            number
            for number, planes in enumerate(self.num_planes)
            if planes and number not in self._lost and planes < self._num_planes(number)
        ]
        if not coarse:
            return None
        whole = [self._step(number, self._num_planes(number), link) for number in coarse]
        if sum(step.expected_seconds or 0.0 for step in whole) <= _PRUDENCE * left:
            return whole[0]
        for number in sorted(coarse, key=lambda number: (self.num_planes[number], number)):
            finest = self._step(number, self._num_planes(number), link)
            more = self._more_seconds(number)
            if more is not None and more <= min(left, finest.expected_seconds or 0.0):
                return Step(number, TEXT, 0.0, is_needed=False)
            step = self._step(number, (self.num_planes[number] or 0) + 1, link)
            if step.expected_seconds is not None and step.expected_seconds <= left:
                return step
        return None

    def _num_planes(self, chunk: int) -> int:
        return len(self._chunks[chunk])

    def _more_seconds(self, chunk: int) -> float | None:
        """Return the seconds that computing a chunk adds to the computing chosen so far."""
        now, then = (
            self._compute_seconds(chosen) for chosen in (self.computed, self.computed | {chunk})
        )
        return None if now is None or then is None else then - now

    def _step(self, chunk: int, planes: int, link: LinkState) -> Step:
        known = self.num_planes[chunk] or 0
        num_bytes = sum(self._chunks[chunk][known:planes])
        return Step(chunk, planes, _seconds(num_bytes, 0, link), is_needed=not known)

    def _delay(self, chunks: Sequence[int], planes: int, link: LinkState) -> float:
        """Return the expected seconds of the chunks, if all have `planes` planes."""
        return sum(
            _seconds(sum(self._chunks[number][:planes]), ahead, link)
            for ahead, number in enumerate(chunks)
        )


def _seconds(num_bytes: int, ahead: int, link: LinkState) -> float:
    assert link.bytes_per_second is not None
    # Requests that share the link receive their own chunks meanwhile.
    carried = num_bytes * link.num_sharing(ahead)
    return link.request_seconds + carried / link.bytes_per_second
