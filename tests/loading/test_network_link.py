"""What requests know of the link, and of what computing takes."""

import pytest

from kvrag.loading.pace import Pace
from kvrag.loading.streaming import NetworkLink


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def carry(link: NetworkLink, clock: Clock, num_bytes: int, seconds: float) -> None:
    with link.carrying(num_bytes):
        clock.now += seconds


def test_a_link_that_has_become_slow() -> None:
    """One slow chunk is not taken for the whole way; several are."""
    clock = Clock()
    link = NetworkLink(clock)
    for _ in range(20):
        carry(link, clock, 100_000, 0.1)
    carry(link, clock, 10_000, 0.1)
    once = link.state.bytes_per_second
    assert 1.2e5 < once < 3e5
    for _ in range(100):
        carry(link, clock, 10_000, 0.1)
    assert link.state.bytes_per_second == pytest.approx(1e5, rel=0.01)


def test_small_answers_and_requests_do_not_count_as_speed() -> None:
    clock = Clock()
    link = NetworkLink(clock)
    carry(link, clock, 100, 0.001)
    assert link.state.bytes_per_second == pytest.approx(1e5)  # better than nothing
    carry(link, clock, 100_000, 0.1)
    link.note_request(0.05)
    for _ in range(50):
        carry(link, clock, 100_000, 0.15)
        carry(link, clock, 100, 0.06)
    assert link.state.bytes_per_second == pytest.approx(1e6, rel=0.01)


def test_what_is_carried_at_the_same_time_is_the_links() -> None:
    clock = Clock()
    link = NetworkLink(clock)
    with link.carrying(100_000):
        carry(link, clock, 300_000, 0.1)
    last = link.state.bytes_per_second
    assert last > 3e6  # 400 kB in a tenth of a second, by what ended last


def test_who_shares_it() -> None:
    link = NetworkLink()
    with link.shared(3) as mine, link.shared(1):
        sharing = link.state.num_sharing
        assert [sharing(ahead) for ahead in range(4)] == [2, 1, 1, 1]
        mine.num_left = 0
        assert link.state.num_sharing(0) == 1
    assert link.state.num_sharing(0) == 1


def test_a_line_that_says_that_nothing_takes_nothing() -> None:
    pace = Pace()
    pace.observe(0.0, 5.0)
    for _ in range(15):
        pace.observe(10.0, 1.0)
        pace.observe(20.0, 10.0)
    assert pace.seconds(10.0) is not None
