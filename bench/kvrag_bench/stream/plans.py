"""What is compared with the adaptive plan: a level for all chunks, and one that knows the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement

from kvrag.loading.stream_plan import TEXT, ComputeSeconds, LinkState, Step, StreamPlan
from kvrag_bench.stream.trace import Trace


class GivenPlan(StreamPlan):
    """Streams a given number of planes for each chunk, whatever the link does."""

    def __init__(
        self,
        given: Sequence[int],
        chunks: Sequence[tuple[int, ...]],
        compute_seconds: ComputeSeconds,
    ) -> None:
        super().__init__(chunks, compute_seconds)
        self._given = given

    def next(self, seconds_left: float, link: LinkState) -> Step | None:
        """Return the next chunk at its level."""
        del seconds_left, link
        for chunk in self.undecided:
            return Step(chunk, self._given[chunk], None, is_needed=True)
        return None


def given_plan(
    given: Sequence[int],
) -> Callable[[Sequence[tuple[int, ...]], ComputeSeconds], StreamPlan]:
    """Return a function that makes a plan with the given number of planes for each chunk."""
    return partial(GivenPlan, given)


def best_levels(
    trace: Trace,
    level_bytes: Sequence[float],
    quality: Sequence[float],
    num_chunks: int,
    deadline: float,
    begin: float,
    tail_seconds: Callable[[int], float],
) -> list[int]:
    """Return the planes of each chunk, `TEXT` for computing it, that are best for a known trace.

    That is the best mean quality that is there in time, or where none is, what is there first.

    Parameters
    ----------
    level_bytes
        Mean bytes of a chunk with 1, 2, ... planes.
    quality
        With `TEXT`, 1, 2, ... planes.
    begin
        When the first byte is carried.
    tail_seconds
        From the number of chunks that are computed to what follows the last byte.
    """
    found: list[tuple[bool, float, float, tuple[int, ...]]] = []
    sizes = (0.0, *level_bytes)
    for levels in combinations_with_replacement(range(len(sizes)), num_chunks):
        num_bytes = sum(sizes[level] for level in levels)
        num_text = levels.count(TEXT)
        done = trace.finish(begin, num_bytes) if num_bytes else begin
        seconds = done + tail_seconds(num_text)
        is_late = seconds > deadline
        mean = sum(quality[level] for level in levels) / num_chunks
        # In time: the better, then the sooner. Late: the sooner.
        found.append((is_late, seconds if is_late else -mean, seconds, levels))
    return list(min(found)[3])
