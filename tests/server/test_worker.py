"""The worker alone: turns, fairness, bounds, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvrag.engine.answer import AnswerDelta
from kvrag.server.problems import BusyError, RequestError
from kvrag.server.worker import Job, Worker
from tests.support.waiting import wait_until

LAST: Any = object()


class Script:
    """Jobs whose pieces wait for permission, and what happened in which order."""

    def __init__(self) -> None:
        self.may_go = threading.Semaphore(0)
        self.happened: list[str] = []
        self.told: dict[str, list[Any]] = {}
        self.ended: dict[str, threading.Event] = {}
        self.closed: dict[str, threading.Event] = {}

    def job(self, name: str, tenant: str = "", num_pieces: int = 2, error: Any = None) -> Job:
        self.told[name] = []
        self.ended[name] = threading.Event()
        self.closed[name] = threading.Event()

        def start() -> Iterator[AnswerDelta]:
            try:
                for number in range(1, num_pieces + 1):
                    assert self.may_go.acquire(timeout=120)
                    self.happened.append(f"{name}{number}")
                    if error is not None:
                        raise error
                    yield AnswerDelta(name, LAST if number == num_pieces else None)
            finally:
                self.closed[name].set()

        def tell(event: Any) -> None:
            self.told[name].append(event)
            if isinstance(event, Exception) or event.answer is not None:
                self.ended[name].set()

        return Job(tenant, start, tell)

    def go(self, num_pieces: int = 100) -> None:
        self.may_go.release(num_pieces)

    def wait_for(self, num_pieces: int) -> None:
        """Wait until so many pieces have been generated."""
        wait_until(lambda: len(self.happened) >= num_pieces)


@contextmanager
def working(**bounds: int) -> Iterator[tuple[Worker, Script]]:
    worker, script = Worker(**bounds), Script()
    try:
        yield worker, script
    finally:
        script.go()
        worker.stop()


def finish(script: Script) -> list[str]:
    script.go()
    assert all(one.wait(120) for one in script.ended.values())
    return script.happened


def test_open_answers_advance_once_after_each_first_piece() -> None:
    with working(max_streams=3) as (worker, script):
        worker.submit([script.job("a", num_pieces=3), script.job("b"), script.job("c")])
        assert finish(script) == ["a1", "b1", "a2", "c1", "b2", "a3", "c2"]


def test_answers_of_one_piece_starve_nobody() -> None:
    with working(max_streams=3) as (worker, script):
        worker.submit([script.job("x", num_pieces=3), *(script.job(f"a{n}", "", 1) for n in "123")])
        assert finish(script) == ["x1", "a11", "x2", "a21", "x3", "a31"]


def test_a_cancelled_answer_is_closed_before_others_advance() -> None:
    with working(max_streams=3) as (worker, script):
        cancelled = script.job("c", num_pieces=50)
        worker.submit([script.job("a", num_pieces=9), script.job("b", num_pieces=9), cancelled])
        script.go(7)
        script.wait_for(7)
        assert script.happened == ["a1", "b1", "a2", "c1", "b2", "a3", "c2"]
        worker.cancel(cancelled)
        script.go(1)
        # "a" waits for permission, and would be before "c".
        assert script.closed["c"].wait(120)
        script.ended["c"].set()
        script.wait_for(8)
        assert script.happened[7:] == ["b3"]
        finish(script)


def test_answers_beyond_the_open_ones_wait() -> None:
    with working(max_streams=2) as (worker, script):
        worker.submit([script.job("a"), script.job("b"), script.job("c")])
        assert finish(script) == ["a1", "b1", "a2", "c1", "b2", "c2"]


def test_tenants_take_turns_whatever_they_queue() -> None:
    with working(max_streams=1) as (worker, script):
        worker.submit([script.job(f"a{n}", "ann", 1) for n in range(3)])
        worker.submit([script.job("b0", "bob", 1)])
        worker.submit([script.job("c0", "cid", 1)])
        assert finish(script) == ["a01", "b01", "c01", "a11", "a21"]


def test_the_tenant_with_fewer_open_answers_is_next() -> None:
    with working(max_streams=2) as (worker, script):
        worker.submit([script.job("x", "ann", 3), script.job("a", "ann", 1)])
        worker.submit([script.job("b", "bob", 3), script.job("c", "bob", 1)])
        assert finish(script)[:2] == ["x1", "b1"]


def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    with working(max_streams=1, max_waiting=2) as (worker, script):
        worker.submit([script.job("a")])
        wait_until(lambda: worker.num_open)
        worker.submit([script.job("b")])
        with pytest.raises(BusyError, match="too many answers are waiting") as caught:
            worker.submit([script.job("c"), script.job("d")])
        assert caught.value.status == 503
        assert int(caught.value.headers["Retry-After"]) > 0
        worker.submit([script.job("f")])
        assert not worker.is_ready
        for name in "cd":
            script.ended[name].set()
        finish(script)
        assert not {one[0] for one in script.happened} & set("cd")
        assert worker.is_ready


def test_a_cancelled_answer_is_closed_and_others_continue() -> None:
    with working(max_streams=2) as (worker, script):
        first, waiting = script.job("a", num_pieces=50), script.job("w")
        worker.submit([first, script.job("b", num_pieces=3), waiting])
        script.go(2)
        script.wait_for(2)
        worker.cancel(waiting)
        worker.cancel(first)
        for name in "aw":
            script.ended[name].set()
        finish(script)
        assert script.closed["a"].wait(120)
        assert script.happened.count("b3") == 1
        assert len([one for one in script.happened if one.startswith("a")]) < 5
        assert not [one for one in script.happened if one.startswith("w")]
    assert worker.num_open == 0


def test_an_error_ends_its_answer_alone() -> None:
    with working() as (worker, script):
        error = ValueError("broken")
        worker.submit([script.job("a", error=error), script.job("b")])
        finish(script)
        assert script.told["a"] == [error]
        assert [one.text for one in script.told["b"]] == ["b", "b"]


def test_a_stopped_worker_takes_nothing_and_closes_what_is_open() -> None:
    with working() as (worker, script):
        worker.submit([script.job("a", num_pieces=1000)])
        script.go(3)
        script.wait_for(3)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        script.go(1)
        stopping.join(120)
        assert not stopping.is_alive()
        assert script.closed["a"].is_set()
        assert not worker.is_ready
        with pytest.raises(BusyError, match="stopping"):
            worker.submit([script.job("b")])


def test_a_tenant_that_fills_the_queue_keeps_nobody_out() -> None:
    with working(max_streams=1, max_waiting=4) as (worker, script):
        worker.submit([script.job(f"a{n}", "ann", 1) for n in range(5)])
        wait_until(lambda: worker.num_open)
        worker.submit([script.job("b0", "bob", 1), script.job("b1", "bob", 1)])
        for tenant in ("ann", "bob"):
            with pytest.raises(BusyError):
                worker.submit([script.job("x", tenant, 1)])
        script.ended["x"].set()
        assert len(finish(script)) == 7


def test_more_jobs_than_it_ever_holds_are_no_matter_of_time() -> None:
    with working(max_streams=1, max_waiting=2) as (worker, script):
        with pytest.raises(RequestError, match="4 answers, and the server holds 3") as caught:
            worker.submit([script.job(str(n)) for n in range(4)])
        assert caught.value.status == 400
