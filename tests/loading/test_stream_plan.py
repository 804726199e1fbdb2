"""The plan on simulated links, against every assignment there is."""

import itertools
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.loading.stream_plan import TEXT, LinkState, Step, StreamPlan
from kvrag_bench.stream.trace import Trace, constant, random_trace
from tests.support.properties import examples

TAIL_SECONDS = 0.05
Planes = tuple[int, ...]


class Simulated:
    """Streams over a trace; time is simulated, the link known by its last chunk."""

    def __init__(
        self,
        plan: StreamPlan,
        sizes: Sequence[Planes],
        trace: Trace,
        deadline: float,
        speed: float | None,
        text_seconds: float,
    ) -> None:
        self.plan, self.now, self.steps = plan, 0.0, list[Step]()
        while (step := plan.next(deadline - self.now, LinkState(speed))) is not None:
            assert len(self.steps) < 1000
            self.steps.append(step)
            if step.num_planes == TEXT:
                plan.done(step)
                continue
            had = plan.num_planes[step.chunk] or 0
            assert step.num_planes > had
            assert step.is_needed == (had == 0)
            num_bytes = sum(sizes[step.chunk][had : step.num_planes])
            end = trace.finish(self.now, num_bytes)
            if not step.is_needed and end > deadline - plan.tail_seconds():
                self.now = max(self.now, deadline - plan.tail_seconds())  # broken off
                break
            speed = num_bytes / (end - self.now)
            self.now = end
            plan.done(step)
        num_text = sum(planes == TEXT for planes in plan.num_planes)
        self.seconds = self.now + TAIL_SECONDS + text_seconds * num_text

    @property
    def loss(self) -> float:
        """Of each plane that is missing a third remains."""
        return sum(0.0 if p == TEXT else 3.0**-p for p in self.plan.num_planes if p is not None)


def simulate(
    sizes: Sequence[Planes],
    trace: Trace,
    deadline: float,
    speed: float | None,
    text_seconds: float,
) -> Simulated:
    def compute(chosen: Collection[int]) -> float:
        return TAIL_SECONDS + text_seconds * len(chosen)

    return Simulated(StreamPlan(sizes, compute), sizes, trace, deadline, speed, text_seconds)


def best_loss(
    sizes: Sequence[Planes], trace: Trace, deadline: float, text_seconds: float
) -> float | None:
    """Return the least loss of all assignments in time; None where none is."""
    found = []
    for levels in itertools.product(range(len(sizes[0]) + 1), repeat=len(sizes)):
        num_bytes = sum(sum(s[:p]) for s, p in zip(sizes, levels, strict=True))
        done = trace.finish(0.0, num_bytes) if num_bytes else 0.0
        if done + TAIL_SECONDS + text_seconds * levels.count(TEXT) <= deadline:
            found.append(sum(0.0 if p == TEXT else 3.0**-p for p in levels))
    return min(found, default=None)


plane_bytes = st.tuples(*[st.integers(1_000, 50_000)] * 3)
contexts = st.lists(plane_bytes, min_size=1, max_size=4)


@settings(max_examples=examples(150))
@given(contexts, st.floats(1e4, 1e7), st.floats(0.06, 3.0), st.floats(0.001, 1.0))
def test_on_a_steady_link_that_is_known(
    sizes: list[Planes], speed: float, deadline: float, text_seconds: float
) -> None:
    """In time where the coarsest level or computing everything is, and no time that is left over
    would bring another plane.
    """
    trace = constant(speed)
    found = simulate(sizes, trace, deadline, speed, text_seconds)
    assert None not in found.plan.num_planes
    coarsest = sum(size[0] for size in sizes) / speed
    if min(coarsest, text_seconds * len(sizes)) + TAIL_SECONDS <= deadline:
        assert found.seconds <= deadline + 1e-6
    best = best_loss(sizes, trace, deadline, text_seconds)
    if found.seconds <= deadline:
        assert found.loss >= best - 1e-9
    for size, planes in zip(sizes, found.plan.num_planes, strict=True):
        if planes not in (TEXT, None, len(size)):
            assert found.seconds + size[planes] / speed > deadline - 1e-6


@settings(max_examples=examples(100))
@given(contexts, st.integers(0, 10_000), st.floats(0.2, 2.0))
def test_on_a_link_that_changes(sizes: list[Planes], seed: int, deadline: float) -> None:
    """Never later than the coarsest level of all chunks would be, where nothing is computed."""
    trace = random_trace(seed, 0.05, 30_000.0)
    found = simulate(sizes, trace, deadline, None, 1e9)
    coarsest = trace.finish(0.0, sum(size[0] for size in sizes)) + TAIL_SECONDS
    finer = any(step.is_needed and step.num_planes > 1 for step in found.steps)
    if not finer:
        assert found.seconds <= max(coarsest, deadline) + 1e-6
    best = best_loss(sizes, trace, deadline, 1e9)
    if best is not None and found.seconds <= deadline:
        assert found.loss >= best - 1e-9


def test_a_slow_link_is_measured_before_it_is_given_up() -> None:
    """Otherwise it would never be found that it has become fast again."""
    sizes = [(100_000,)] * 4
    plan = StreamPlan(sizes, lambda chosen: 0.2 + len(chosen))
    first = plan.next(1.0, LinkState(1000.0))
    assert first.num_planes == 1
    plan.done(first)
    second = plan.next(1.0, LinkState(1000.0))
    assert second.num_planes == TEXT  # a second, not a hundred


def test_requests_that_share_the_link() -> None:
    """A chunk takes as many times as long as there are requests that still have one there."""
    sizes = [(10_000, 10_000)] * 4

    def first(num_sharing: dict[int, int]) -> Step | None:
        plan = StreamPlan(sizes, lambda chosen: None)
        return plan.next(0.4, LinkState(1e6, 0.0, lambda ahead: num_sharing.get(ahead, 1)))

    alone, shared = first({}), first({0: 3, 1: 3})
    assert (alone.num_planes, alone.expected_seconds) == (2, pytest.approx(0.02))
    # 2 x 3 + 2 chunks of 10 or 20 kB: 80 ms fit a quarter of the time left, 160 do not.
    assert (shared.num_planes, shared.expected_seconds) == (1, pytest.approx(0.03))
