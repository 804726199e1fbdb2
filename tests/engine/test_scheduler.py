"""The scheduler alone: which prompt is fused next, for how long, and what a failure costs."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from kvrag.engine import scheduler as scheduling
from kvrag.engine.scheduler import Job, Scheduler, Start
from kvrag.fusion.slices import Slices
from kvrag.loading import threads
from tests.support.instructions import torch_threads

SLICE, STEP = 0.01, 0.02


class Clock:
    """Time goes on only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Written:
    """An answer of some tokens, as the scheduler sees it."""

    logits, coming, decoder, token = None, None, None, 0
    is_done = False

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def end_if_late(self) -> None:
        return None

    def take(self) -> list[Any]:
        self.logits, self.left = None, self.left - 1
        self.is_done = self.left <= 0
        return []

    def close(self, error: Exception | None = None) -> None:
        pass


class Script:
    """Prompts of some slices, and what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_batch: int = 8) -> None:
        self.clock = Clock()
        self.happened: list[str] = []
        self.sizes: list[int] = []
        self.errors: dict[str, Exception] = {}
        self.scheduler = Scheduler(max_batch)
        monkeypatch.setattr(scheduling, "time", self.clock)
        monkeypatch.setattr(scheduling, "step_all", self.step)

    def step(self, steps: Sequence[Any]) -> list[Any]:
        self.clock.now += STEP
        self.happened.append("|")
        self.sizes.append(len(steps))
        return [object() for _ in steps]

    def submit(
        self,
        name: str,
        num_slices: int,
        *,
        num_tokens: int = 1,
        due: float | None = None,
        is_here: Callable[[], bool] = lambda: True,
        error: Exception | None = None,
        has_target: bool = False,
    ) -> Job:
        def fuse(_: float, __: object) -> Slices[Any]:
            try:
                for _ in range(num_slices):
                    while not is_here():
                        if (yield True):
                            self.happened.append(f"({name})")
                            break
                    self.clock.now += SLICE
                    self.happened.append(name)
                    if error is not None:
                        raise error
                    yield False
                return Written(num_tokens)
            finally:
                self.happened.append(f"{name}.")

        def tell(event: Any) -> None:
            self.errors[name] = event

        due = num_slices * SLICE if due is None else due
        job = Job(Start(fuse, due, has_target), tell)
        self.scheduler.submit(job)
        return job

    def run(self) -> str:
        self.scheduler.wait_until(lambda: self.scheduler.num_open == 0)
        return "".join(self.happened)


def test_a_short_prompt_does_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch)
    long = [script.submit(name, 20) for name in "abcdefgh"[:4]]
    script.scheduler._advance()
    short = script.submit("s", 2)
    told = script.run()
    assert told.startswith("ass")
    assert all(job.is_ended for job in (*long, short))


def test_a_long_prompt_is_not_passed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts that come after it is due are fused after it."""
    script = Script(monkeypatch)
    long = script.submit("l", 10)
    for number in range(60):
        script.submit(str(number % 10), 2)
        script.scheduler._advance()
    assert long.is_ended


def test_no_more_answers_run_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, max_batch=2)
    for name in "abcde":
        script.submit(name, 1, num_tokens=5)
    assert [one for one in script.run() if one.isalpha()] == list("aabbccddee")
    assert max(script.sizes) == 2


def test_targets_order_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch)
    for name, due in (("a", 9.0), ("b", 1.0), ("c", 3.0)):
        script.submit(name, 2, due=due)
    assert script.run().replace("|", "") == "bbb.ccc.aaa."


def test_one_prompt_is_computed_while_another_waits_for_stored_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(monkeypatch)
    here: set[str] = set()
    script.submit("a", 2, due=0.0, is_here=lambda: "a" in here)
    script.submit("b", 2, due=1.0)
    script.scheduler.wait_until(lambda: "b." in script.happened)
    assert "a" not in script.happened
    here.add("a")
    assert script.run().endswith("aaa.")


@pytest.mark.parametrize(("pace", "num_slices"), [(5 * SLICE, 5), (STEP / 2, 2)])
@pytest.mark.parametrize("num_waiting", [1, 7])
def test_prompts_are_fused_for_a_while_before_each_step(
    num_waiting: int, pace: float, num_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or for as long as a step takes."""
    script = Script(monkeypatch)
    monkeypatch.setattr(scheduling, "_PACE_SECONDS", pace)
    script.submit("r", 1, num_tokens=1000)
    script.scheduler._advance()
    script.scheduler._advance()
    script.happened.clear()
    for _ in range(num_waiting):
        script.submit("w", 1000)
    for _ in range(12):
        script.scheduler._advance()
    assert max(map(len, "".join(script.happened).split("|"))) == num_slices


def test_no_prompt_begins_to_load_beside_one_with_a_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would share the link that its target was planned for."""
    script = Script(monkeypatch)
    script.submit("a", 1, due=0.0, is_here=lambda: False, has_target=True)
    script.submit("b", 1, due=1.0)
    assert script.run().startswith("(a)aa.b")


@pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("damaged")])
def test_a_failure_is_told_to_its_own_prompt_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch)
    jobs = [script.submit(name, 3, due=1.0) for name in "ab"]
    bad = script.submit("x", 3, due=0.0, error=error)
    assert script.run().startswith("xx.aaaa.bbbb.")
    assert script.errors == {"x": error}
    assert all(job.is_ended for job in (*jobs, bad))


def test_a_cancelled_prompt_leaves_while_others_join(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch)
    script.submit("a", 3)
    gone = script.submit("g", 5, due=0.0)
    script.scheduler._advance()
    script.scheduler.cancel(gone)
    assert script.happened == ["g", "g."]
    assert script.run() == "gg.aaaa."
    assert script.errors == {}


class Beside:
    """Prompts that several threads fuse: which thread and twin, and with how many threads each."""

    def __init__(self, max_batch: int = 8, num_twins: int = 9) -> None:
        def twin(number: int) -> Any:
            return f"twin {number}" if number < num_twins else None

        self.scheduler = Scheduler(max_batch, twin)
        self.twins: dict[str, object] = {}
        self.threads: dict[str, int] = {}
        self.told: dict[str, Exception] = {}
        self.closed: set[str] = set()

    def submit(
        self,
        name: str,
        during: Callable[[], object],
        *,
        due: float = 0.0,
        has_target: bool = False,
        is_over: Callable[[], bool] = lambda: True,
    ) -> tuple[Job, Written]:
        written = Written(1)
        written.close = lambda error=None: self.closed.add(name)  # type: ignore[method-assign]

        def fuse(_: float, twin: object) -> Slices[Any]:
            self.twins[name] = twin
            yield False
            self.threads[name] = torch.get_num_threads()
            during()
            yield False
            while not is_over():
                yield False
            return written

        job = Job(Start(fuse, due, has_target), lambda event: self.told.update({name: event}))
        self.scheduler.submit(job)
        return job, written

    def run(self) -> None:
        self.scheduler.wait_until(lambda: self.scheduler.num_open == 0)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scheduling, "step_all", lambda steps: [object() for _ in steps])
    with torch_threads(2):
        yield


@pytest.mark.usefixtures("two_threads")
def test_two_prompts_are_fused_at_the_same_time() -> None:
    script, both = Beside(), threading.Barrier(2, timeout=30)
    script.submit("a", both.wait)
    script.submit("b", both.wait)  # neither goes on without the other
    script.run()
    assert set(script.twins.values()) == {None, "twin 0"}
    assert script.threads == {"a": 1, "b": 1}
    script.submit("c", lambda: None)
    script.run()
    assert (script.twins["c"], script.threads["c"], torch.get_num_threads()) == (None, 2, 2)


@pytest.mark.usefixtures("two_threads")
def test_a_failure_beside_is_told_to_its_own_prompt_alone() -> None:
    def fail() -> None:
        both.wait()
        raise ValueError("damaged")

    script, both = Beside(), threading.Barrier(2, timeout=30)
    script.submit("a", fail)  # beside, since it is due first
    job, _ = script.submit("b", both.wait)
    script.run()
    assert job.is_ended
    assert list(script.told) == ["a"]
    assert script.twins["a"] == "twin 0"


@pytest.mark.usefixtures("two_threads")
def test_a_prompt_that_is_cancelled_beside_is_freed() -> None:
    script, goes_on, begun = Beside(), threading.Event(), threading.Event()
    job, _ = script.submit("a", lambda: (begun.set(), goes_on.wait(30)))
    script.submit("b", lambda: begun.wait(30))
    script.scheduler._advance()
    begun.wait(30)
    script.scheduler.cancel(job)
    goes_on.set()
    script.run()
    assert job.is_ended
    assert "a" not in script.told
    assert script.closed == {"b"}
    assert script.scheduler._aside == {}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("due", "num_threads"), [(0.0, 2), (99.0, 1)])
def test_a_prompt_with_a_target_computes_alone_if_it_is_due_first(
    due: float, num_threads: int
) -> None:
    script, slices = Beside(), itertools.count()
    seen: list[tuple[int, int]] = []

    def is_over() -> bool:
        time.sleep(0.001)
        return next(slices) > 100 and len(seen) == 10

    def target() -> bool:
        time.sleep(0.02)
        seen.append((next(slices), torch.get_num_threads()))
        return len(seen) == 10

    both = threading.Barrier(2, timeout=30)
    script.submit("a", both.wait, due=50.0, is_over=is_over)
    script.submit("b", both.wait, due=98.0)
    script.scheduler.wait_until(lambda: "b" in script.threads)
    script.submit("t", lambda: None, due=due, has_target=True, is_over=target)
    script.run()
    assert script.twins == {"a": "twin 0", "b": None, "t": None}
    assert seen[-1][1] == num_threads
    assert (seen[-1][0] - seen[-2][0] == 1) == (num_threads == 2)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_a_twin_that_cannot_be_made_costs_no_prompt(error: BaseException) -> None:
    script, errors = Beside(), [error]

    def twin(number: int) -> Any:
        if errors:
            raise errors.pop()
        return f"twin {number}"

    script.scheduler._twin = twin
    for name in "abc":
        script.submit(name, lambda: None)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            script.run()
        assert script.scheduler.num_open == 3
    script.run()
    assert (script.scheduler._aside, script.told, script.closed) == ({}, {}, set("abc"))


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_cannot_be_started_costs_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    script, kept = Beside(), []

    def start(work: Callable[[], None], _: str) -> None:
        kept.append(work)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start", start)
    for name in "abc":
        script.submit(name, lambda: None)
    script.run()
    for work in kept:  # a thread was found at last
        work()
    assert (script.scheduler._aside, script.told) == ({}, {})
    assert script.twins == dict.fromkeys("abc")
    assert not script.scheduler._fused


@pytest.mark.usefixtures("two_threads")
def test_an_interrupted_piece_costs_no_other_prompt() -> None:
    def fail() -> None:
        raise ValueError("damaged")

    script, fused = Beside(), []
    for name, during in (("a", lambda: None), ("x", fail)):
        job, written = script.submit(name, during)
        script.scheduler._waiting.remove(job)
        script.scheduler._aside[0] = job
        script.scheduler._fuse_aside(0, job)
        fused.append(written)
    take, errors = fused[0].take, [KeyboardInterrupt()]

    def interrupted() -> list[Any]:
        if errors:
            raise errors.pop()
        return take()

    fused[0].take = interrupted  # type: ignore[method-assign]
    fused[0].logits = object()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        script.run()
    script.run()
    assert (list(script.told), script.closed) == (["x"], {"a"})


def test_few_prompts_wait_for_stored_kv_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all wait, the first one is waited for, and no further one takes a buffer."""
    script = Script(monkeypatch)
    for name, due in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        script.submit(name, 1, due=due, is_here=lambda: False)
    script.scheduler._advance()
    assert (script.happened, len(script.scheduler._joining)) == (["(a)", "a"], 2)
    told = script.run()
    assert told.index("(a)a") < told.index("(b)b") < told.index("(c)c")


@pytest.mark.usefixtures("two_threads")
def test_many_prompts_by_several_threads() -> None:
    with torch_threads(3):
        script = Beside(max_batch=4)
        jobs = [script.submit(f"{number}", lambda: None)[0] for number in range(40)]
        script.run()
    assert all(job.is_ended for job in jobs)
    assert (len(script.twins), len(script.closed), script.told) == (40, 40, {})


def failing(error: Exception | None = None) -> None:
    raise MemoryError("no room")


@pytest.mark.usefixtures("two_threads")
def test_what_cannot_be_freed_beside_stops_no_other_prompt() -> None:
    script, begun, goes_on = Beside(), threading.Event(), threading.Event()

    def lasts() -> bool:
        begun.set()
        return goes_on.wait(30)

    def leave() -> None:
        assert begun.wait(30)
        script.scheduler.cancel(job)

    job, written = script.submit("a", lambda: None, is_over=lasts)
    written.close = failing  # type: ignore[method-assign]
    script.submit("b", leave, is_over=lambda: goes_on.set() or True)
    for name in "cd":
        script.submit(name, lambda: None)
    script.run()
    assert (script.closed, script.told, script.scheduler._aside) == (set("bcd"), {}, {})


def test_nor_does_it_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch)
    job, other = (script.submit(name, 1, num_tokens=9) for name in "ab")
    script.scheduler.wait_until(lambda: len(script.scheduler._running) == 2)
    assert job.answer is not None
    job.answer.close = failing  # type: ignore[method-assign]
    script.scheduler.cancel(job)
    script.run()
    assert other.is_ended
    assert script.errors == {}


def test_prompts_are_submitted_while_others_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, which meets the driver while it looks at those that wait."""
    script, adding = Script(monkeypatch), []

    class Reading(Future[Start]):
        def done(self) -> bool:
            if len(adding) < 9 and script.scheduler._joining:
                adding.append(threading.Thread(target=script.submit, args=(f"{len(adding)}", 1)))
                adding[-1].start()
                adding[-1].join(0.1)
            return False

    script.submit("a", 3)
    script.scheduler._advance()
    reading = Job(Reading(), lambda _: None)
    script.scheduler.submit(reading)
    for _ in range(4):
        script.scheduler._advance()
    script.scheduler.cancel(reading)
    for one in adding:
        one.join()
    script.run()
    assert adding
    assert not script.errors
