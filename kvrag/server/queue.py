"""The answers that are written now, and those that wait for their turn; tenants share both.

`Batches` works on many texts for one request, such as their vectors, while its client waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from kvrag.engine.answer import AnswerDelta
from kvrag.ingest.sentences import before_turn
from kvrag.server.problems import BusyError, ClientGoneError, RequestError

MAX_STREAMS = 8
MAX_WAITING = 128
STUCK_SECONDS = 30.0
"""Without a step of any answer for so long, the server is not ready."""
# A client that is refused may try again after this time.
_RETRY_SECONDS = 2
_STOPPING = "the server is stopping"


def share(most: int, present: Iterable[str], tenant: str) -> int:
    """Return how much of `most` a tenant may have beside those who are present."""
    return math.ceil(most / len({*present, tenant}))


@dataclass(eq=False)
class Job:
    """One answer to write.

    Attributes
    ----------
    tenant
        Who asks; tenants share the queue fairly.
    start
        Returns the engine's stream.
    tell
        Receives each piece, or the error that ended the answer.
    """

    tenant: str
    start: Callable[[], AsyncGenerator[AnswerDelta, None]]
    tell: Callable[[AnswerDelta | Exception], None]
    # To which a trace belongs.
    context: Context = field(default_factory=copy_context, init=False)
    task: asyncio.Task[None] | None = field(default=None, init=False)


class AnswerQueue:
    """Has several answers written at a time, and bounds how many others wait.

    The engine advances all open answers together. If several tenants wait, the one with the fewest
    open answers is next. Tenants that are present share the queue evenly. Only the event loop's
    thread may use it, except for the properties.

    Parameters
    ----------
    moved
        Returns when the engine made its last step, by `time.perf_counter`.
    max_streams
        Most answers that are open at the same time; each one holds its prompt's KV in memory.
    max_waiting
        Most answers that wait for their turn. A tenant that finds the queue full of others' answers
        may still fill its own share.
    """

    def __init__(
        self,
        moved: Callable[[], float],
        max_streams: int = MAX_STREAMS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._engine_moved = moved
        self._max_streams = max_streams
        self._max_waiting = max_waiting
        self._waiting: list[Job] = []  # in the order of arrival
        self._open: set[Job] = set()
        # When each tenant had its last turn: those with equally many open answers take turns.
        self._turns: Counter[str] = Counter()
        self._num_turns = 0
        self._is_stopping = False
        self._moved = 0.0

    @property
    def num_waiting(self) -> int:
        """Number of answers that wait for their turn."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Number of answers that are being written."""
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        """Whether it would accept an answer now."""
        moved = max(self._moved, self._engine_moved())
        is_stuck = bool(self._open) and time.perf_counter() - moved > STUCK_SECONDS
        return not self._is_stopping and not is_stuck and len(self._waiting) < self._room

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue a tenant's jobs, all or none.

        Raises
        ------
        BusyError
            When the tenant's share of the queue has no room.
        RequestError
            When the jobs are more than the queue ever holds.
        """
        most = self._max_waiting + self._max_streams
        if len(jobs) > most:
            raise RequestError(
                400,
                f"the request has {len(jobs)} answers, and the server holds {most}; ask for fewer",
                param="n",
            )
        if self._is_stopping:
            raise BusyError(_STOPPING, _RETRY_SECONDS)
        tenant = jobs[0].tenant
        num_own = sum(one.tenant == tenant for one in self._waiting)
        present = (one.tenant for one in (*self._waiting, *self._open))
        if num_own + len(jobs) > share(self._room, present, tenant):
            # No numbers: they would tell how many tenants are there.
            raise BusyError("too many answers are waiting; try again later", _RETRY_SECONDS)
        if not self._open:
            self._moved = time.perf_counter()
        self._waiting += jobs
        self._begin()

    def cancel(self, job: Job) -> None:
        """Stop writing an answer; a step that has begun is finished first."""
        if job in self._waiting:
            self._waiting.remove(job)
        elif job.task is not None:
            job.task.cancel()

    async def stop(self) -> None:
        """Take nothing more; answers that are still open or waiting end with a BusyError."""
        self._is_stopping = True
        jobs = [*self._waiting, *self._open]
        for job in jobs:
            job.tell(BusyError(_STOPPING, _RETRY_SECONDS))
            self.cancel(job)
        await asyncio.gather(*(job.task for job in jobs if job.task), return_exceptions=True)

    @property
    def _room(self) -> int:
        """How many answers may wait at the moment."""
        return self._max_waiting + max(0, self._max_streams - len(self._open))

    def _begin(self) -> None:
        """Begin answers while there is room for more."""
        while self._waiting and len(self._open) < self._max_streams:
            job = self._next()
            self._waiting.remove(job)
            self._num_turns += 1
            self._turns[job.tenant] = self._num_turns
            self._open.add(job)
            job.task = asyncio.create_task(self._write(job), context=job.context)
            job.task.add_done_callback(partial(self._end, job))

    def _next(self) -> Job:
        num_open = Counter(one.tenant for one in self._open)
        return min(self._waiting, key=lambda one: (num_open[one.tenant], self._turns[one.tenant]))

    async def _write(self, job: Job) -> None:
        try:
            async with aclosing(job.start()) as pieces:
                async for delta in pieces:
                    job.tell(delta)
        except Exception as error:
            job.tell(error)

    def _end(self, job: Job, _: asyncio.Task[None]) -> None:
        self._open.discard(job)
        self._begin()


MAX_BATCHES = 512  # Open WebUI sends a request for each part of a document, all at once
"""Most requests whose texts are worked on, or wait for that; tenants share it evenly."""
STUCK_BATCHES_SECONDS = 10.0
"""Without a turn of any of them for so long, the server is not ready."""
_THREADS = 4  # a tenant has two
_RETRY_BATCH_SECONDS = 5

T = TypeVar("T")


asking: ContextVar[str] = ContextVar("asking", default="")
"""The tenant whose request this context belongs to."""


class Pool:
    """Threads, of which one tenant has at most half; only the event loop's thread may use it.

    Parameters
    ----------
    name
        Part of the threads' names, after `kvrag-`.
    num_threads
        Their number, at least 2.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kvrag-{name}")
        self._share = num_threads // 2
        # There are as many as keys.
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def run(self, call: Callable[[], T]) -> T:
        """Call in a thread what takes time, while the event loop runs on."""
        turn = self._turns.setdefault(asking.get(), asyncio.Semaphore(self._share))
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, copy_context().run, call)

    def close(self) -> None:
        """Stop the threads after the work in progress."""
        self._threads.shutdown(cancel_futures=True)


class Batches:
    """Runs such work in its own threads, and ends it when its client leaves."""

    def __init__(self) -> None:
        self._pool = Pool("texts", _THREADS)
        self._open: Counter[str] = Counter()
        self._moved = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether it would take more, and what it has taken goes on."""
        num_open = self._open.total()
        is_stuck = num_open > 0 and time.monotonic() - self._moved > STUCK_BATCHES_SECONDS
        return num_open < MAX_BATCHES and not is_stuck

    def close(self) -> None:
        """Stop the threads after the work in progress."""
        self._pool.close()

    async def run(self, http: Request, call: Callable[[], T]) -> T:
        """Return what `call` returns; it ends before its next batch when the client leaves.

        Raises
        ------
        BusyError
            When there is too much such work.
        ClientGoneError
            When the client has left.
        """
        tenant = asking.get()
        if self._open[tenant] >= share(MAX_BATCHES, self._open, tenant):
            raise BusyError("too many texts are being read; try again later", _RETRY_BATCH_SECONDS)
        has_left = False

        def turn() -> None:
            self._moved = time.monotonic()
            if has_left:
                raise ClientGoneError

        def work() -> T:
            before_turn.set(turn)
            turn()
            return call()

        def ended(task: asyncio.Task[T]) -> None:
            self._open[tenant] -= 1
            self._open += Counter()  # drops tenants without any
            if not task.cancelled():
                task.exception()  # else asyncio logs it when the client has left

        if not self._open.total():
            self._moved = time.monotonic()
        self._open[tenant] += 1
        # It is not cancelled: a thread that works goes on until its next batch.
        done = asyncio.create_task(self._pool.run(work))
        done.add_done_callback(ended)
        leaving = asyncio.create_task(left(http))
        try:
            await asyncio.wait((done, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientGoneError
            return done.result()
        finally:
            has_left = True
            leaving.cancel()


async def left(http: Request) -> None:
    """Return when the client has left."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
