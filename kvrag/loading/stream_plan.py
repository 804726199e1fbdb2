"""Which bytes of a context to ask for next, so that its first token comes in time.

Source: CacheGen (SIGCOMM 2024) §5.3 and Algorithm 1: of each chunk the least lossy configuration
(text, which is computed and has no loss, or a level of the codec) with which it and all chunks
behind it are expected within the time left, at the throughput of the last chunk.

Deviations, all of them because the levels of a record are its planes, so that a coarser level is a
part of the finer one: a level finer than the coarsest is taken at once only if the rest would need
a quarter of the time left. What time is left when every chunk is there is spent on the planes left
out, the coarsest chunk first, so a link that turns out faster than it was is not wasted, and one
that turns out slower has not been spent on the first chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

TEXT = 0
"""Planes of a chunk that is computed from its text."""

# Of the time left, what all chunks may be expected to take at more than their first plane.
_PRUDENCE = 0.25


@dataclass(frozen=True)
class ChunkSize:
    """What may be asked for of one chunk.

    Attributes
    ----------
    plane_bytes
        Bytes of each of its planes, from coarse to fine.
    has_text
        Whether it can be computed instead.
    """

    plane_bytes: tuple[int, ...]
    has_text: bool = True


@dataclass(frozen=True)
class LinkState:
    """What is known of the link now.

    Attributes
    ----------
    bytes_per_second
        Of all who share it together; None: nothing is known.
    request_seconds
        What every request costs beside its bytes.
    num_sharing
        From k to how many requests, this one included, have more than k chunks left.
    """

    bytes_per_second: float | None
    request_seconds: float = 0.0
    num_sharing: Callable[[int], int] = lambda ahead: 1  # noqa: ARG005


@dataclass(frozen=True)
class Step:
    """What to do next.

    Attributes
    ----------
    chunk
        Its number.
    num_planes
        Planes to have of it then; `TEXT`: compute it.
    expected_seconds
        What that will take on the link; 0 of text, None where nothing is known of the link.
    is_needed
        Whether the chunk has nothing yet; what is not needed may be broken off.
    """

    chunk: int
    num_planes: int
    expected_seconds: float | None
    is_needed: bool


ComputeSeconds = Callable[[Collection[int]], float | None]
"""From the numbers of the chunks that are computed to the seconds of everything that is computed
when streaming is over; None where that is not known.
"""


class StreamPlan:
    """Chooses, step by step, what to stream of one context.

    Parameters
    ----------
    chunks
        The chunks, in the order in which they are streamed.
    compute_seconds
        What computing takes; where that is not known, nothing is chosen as text.

    Attributes
    ----------
    num_planes
        What each chunk has: planes, `TEXT`, or None for nothing yet.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkSize],
        compute_seconds: ComputeSeconds,
    ) -> None:
        self._chunks = chunks
        self._compute_seconds = compute_seconds
        self._lost: set[int] = set()
        self._has_measured = False
        self.num_planes: list[int | None] = [None] * len(chunks)

    @property
    def computed(self) -> set[int]:
        """Chunks that are computed: by choice, or because they are lost."""
        chosen = {number for number, planes in enumerate(self.num_planes) if planes == TEXT}
        return chosen | self._lost

    @property
    def undecided(self) -> list[int]:
        """Chunks that have nothing yet."""
        return [
            number
            for number, planes in enumerate(self.num_planes)
            if planes is None and number not in self._lost
        ]

    def tail_seconds(self) -> float:
        """Return the seconds of computing behind what has been chosen so far; 0 if not known."""
        return self._compute_seconds(self.computed) or 0.0

    def done(self, step: Step) -> None:
        """Note that a step has been taken."""
        self.num_planes[step.chunk] = step.num_planes
        self._has_measured = self._has_measured or step.num_planes != TEXT

    def lose(self, chunk: int) -> None:
        """Note that a chunk cannot be had: it will be computed."""
        self._lost.add(chunk)

    def next(self, seconds_left: float, link: LinkState) -> Step | None:
        """Return the next step, or None: what is there is all there is time for.

        Parameters
        ----------
        seconds_left
            Until the first token is due.
        """
        undecided = self.undecided
        left = seconds_left - self.tail_seconds()
        if not undecided:
            return self._refine(left, link)
        chunk = undecided[0]
        if all(self._chunks[number].has_text for number in undecided):
            computing = self._compute_seconds(self.computed | set(undecided))
            if computing is not None and computing <= seconds_left:
                return Step(chunk, TEXT, 0.0, is_needed=True)
        if link.bytes_per_second is None:
            # Nothing is known: the least that is of use tells most.
            return Step(chunk, 1, None, is_needed=True)
        finest = len(self._chunks[chunk].plane_bytes)
        for planes in range(finest, 1, -1):
            if self._delay(undecided, planes, link) <= _PRUDENCE * left:
                return self._step(chunk, planes, link)
        coarsest = self._step(chunk, 1, link)
        if self._delay(undecided, 1, link) <= left or not self._chunks[chunk].has_text:
            return coarsest
        if not self._has_measured:
            # The link was slow for another request: it may have changed.
            return coarsest
        # It will be late: of each chunk what takes less.
        assert coarsest.expected_seconds is not None
        more = self._more_seconds(chunk)
        if more is not None and more < coarsest.expected_seconds:
            return Step(chunk, TEXT, 0.0, is_needed=True)
        return coarsest

    def _refine(self, left: float, link: LinkState) -> Step | None:
        """Return what to do with the time left when every chunk is there."""
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
            if self._chunks[number].has_text:
                more = self._more_seconds(number)
                if more is not None and more <= min(left, finest.expected_seconds or 0.0):
                    return Step(number, TEXT, 0.0, is_needed=False)
            step = self._step(number, (self.num_planes[number] or 0) + 1, link)
            if step.expected_seconds is not None and step.expected_seconds <= left:
                return step
        return None

    def _num_planes(self, chunk: int) -> int:
        return len(self._chunks[chunk].plane_bytes)

    def _more_seconds(self, chunk: int) -> float | None:
        """Return what computing a chunk adds to what is computed in any case."""
        now, then = (
            self._compute_seconds(chosen) for chosen in (self.computed, self.computed | {chunk})
        )
        return None if now is None or then is None else then - now

    def _step(self, chunk: int, planes: int, link: LinkState) -> Step:
        known = self.num_planes[chunk] or 0
        num_bytes = sum(self._chunks[chunk].plane_bytes[known:planes])
        return Step(chunk, planes, _seconds(num_bytes, 0, link), is_needed=not known)

    def _delay(self, chunks: Sequence[int], planes: int, link: LinkState) -> float:
        """Return the expected seconds of the chunks, all at one level."""
        return sum(
            _seconds(sum(self._chunks[number].plane_bytes[:planes]), ahead, link)
            for ahead, number in enumerate(chunks)
        )


def _seconds(num_bytes: int, ahead: int, link: LinkState) -> float:
    assert link.bytes_per_second is not None
    # Who shares the link has its own chunks carried meanwhile.
    carried = num_bytes * link.num_sharing(ahead)
    return link.request_seconds + carried / link.bytes_per_second
