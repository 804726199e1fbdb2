"""The queue alone: turns, fairness, bounds, cancelling."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kvrag.engine.answer import AnswerDelta
from kvrag.server import queue as module
from kvrag.server.problems import BusyError, RequestError
from kvrag.server.queue import AnswerQueue, Job

LAST: Any = object()
pytestmark = pytest.mark.asyncio


class Script:
    """Jobs that end when they may, and what happened in which order."""

    def __init__(self, **bounds: int) -> None:
        self.queue = AnswerQueue(lambda: self.moved, **bounds)
        self.moved = 0.0
        self.happened: list[str] = []
        self.told: dict[str, list[Any]] = {}
        self.may_end: dict[str, asyncio.Event] = {}

    def job(self, name: str, tenant: str = "", error: Exception | None = None) -> Job:
        told, may_end = self.told.setdefault(name, []), asyncio.Event()
        self.may_end[name] = may_end

        async def start() -> AsyncGenerator[AnswerDelta, None]:
            self.happened.append(name)
            try:
                yield AnswerDelta(name)
                await may_end.wait()
                if error is not None:
                    raise error
                yield AnswerDelta(name, LAST)
            finally:
                self.happened.append(f"{name}.")

        return Job(tenant, start, told.append)

    def submit(self, *names: str, tenant: str = "") -> list[Job]:
        jobs = [self.job(name, tenant) for name in names]
        self.queue.submit(jobs)
        return jobs

    async def end(self, *names: str) -> None:
        for name in names:
            self.may_end[name].set()
        await self.rest()

    async def rest(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            await asyncio.sleep(0)


async def test_answers_beyond_the_open_ones_wait() -> None:
    script = Script(max_streams=2)
    script.submit("a", "b", "c")
    await script.rest()
    assert (script.happened, script.queue.num_open, script.queue.num_waiting) == (["a", "b"], 2, 1)
    await script.end("b")
    assert script.happened == ["a", "b", "b.", "c"]
    await script.end("a", "c")
    assert (script.queue.num_open, script.queue.num_waiting) == (0, 0)
    assert [one.answer for one in script.told["c"]] == [None, LAST]


async def test_tenants_take_turns_whatever_they_queue() -> None:
    script = Script(max_streams=1)
    script.submit("a0", "a1", "a2", tenant="ann")
    script.submit("b0", tenant="bob")
    script.submit("c0", tenant="cid")
    await script.rest()
    for name in ("a0", "b0", "c0", "a1", "a2"):
        assert script.happened[-1] == name
        await script.end(name)


async def test_the_tenant_with_fewer_open_answers_is_next() -> None:
    """Also if its last turn was later than the others'."""
    script = Script(max_streams=2)
    script.submit("x", tenant="ann")
    script.submit("b", tenant="bob")
    script.submit("a", tenant="ann")
    script.submit("b2", tenant="bob")
    await script.rest()
    await script.end("b")
    assert script.happened == ["x", "b", "b.", "b2"]


async def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    script = Script(max_streams=1, max_waiting=2)
    script.submit("a", "b")
    with pytest.raises(BusyError, match="too many answers are waiting") as caught:
        script.submit("c", "d")
    assert caught.value.status == 503
    assert int(caught.value.headers["Retry-After"]) > 0
    assert script.queue.is_ready
    script.submit("f")
    assert not script.queue.is_ready
    for name in "abf":
        await script.end(name)
    assert script.happened == ["a", "a.", "b", "b.", "f", "f."]
    with pytest.raises(RequestError, match="4 answers, and the server holds 3") as never:
        script.submit(*"wxyz")
    assert never.value.status == 400


async def test_a_tenant_that_fills_the_queue_keeps_nobody_out() -> None:
    script = Script(max_streams=1, max_waiting=4)
    script.submit(*(f"a{n}" for n in range(5)), tenant="ann")
    script.submit("b0", "b1", tenant="bob")
    for tenant in ("ann", "bob"):
        with pytest.raises(BusyError):
            script.submit("x", tenant=tenant)


async def test_a_cancelled_answer_is_closed_and_others_continue() -> None:
    script = Script(max_streams=2)
    first, _, waiting = script.submit("a", "b", "w")
    script.submit("c")
    await script.rest()
    script.queue.cancel(waiting)
    script.queue.cancel(first)
    await script.rest()
    assert script.happened == ["a", "b", "a.", "c"]
    await script.end("b", "c")
    assert [one.answer for one in script.told["b"]] == [None, LAST]
    assert script.told["w"] == []


async def test_an_error_ends_its_answer_alone() -> None:
    script, error = Script(), ValueError("broken")
    script.queue.submit([script.job("a", error=error), script.job("b")])
    await script.rest()
    await script.end("a", "b")
    assert script.told["a"][1:] == [error]
    assert [one.answer for one in script.told["b"]] == [None, LAST]


async def test_a_stopped_queue_takes_nothing_and_closes_what_is_open() -> None:
    script = Script(max_streams=1)
    script.submit("a", "b")
    await script.rest()
    await script.queue.stop()
    assert script.happened == ["a", "a."]
    assert [str(script.told[name][-1]) for name in "ab"] == ["the server is stopping"] * 2
    assert not script.queue.is_ready
    with pytest.raises(BusyError, match="stopping"):
        script.submit("c")


async def test_it_is_not_ready_while_the_engine_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    script = Script()
    assert script.queue.is_ready
    script.submit("a")
    await script.rest()
    assert script.queue.is_ready  # however long ago the engine made its last step
    now[0] += 31
    assert not script.queue.is_ready
    script.moved = now[0]
    assert script.queue.is_ready
    await script.end("a")
