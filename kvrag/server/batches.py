"""Threads for a request's waiting and computing, which no tenant can take for itself.

`Batches` works on many texts for one request, such as their vectors, while its client waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TypeVar

from starlette.requests import Request

from kvrag.ingest.turns import before_turn
from kvrag.server.problems import BusyError, ClientGoneError
from kvrag.server.queue import share

MAX_BATCHES = 512  # Open WebUI sends a request for each part of a document, all at once
"""Most requests whose texts are worked on, or wait for that; tenants share it evenly."""
STUCK_SECONDS = 10.0
"""Without a turn of any of them for so long, the server is not ready."""
_THREADS = 4  # a tenant has two
_RETRY_SECONDS = 5

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
        is_stuck = num_open > 0 and time.monotonic() - self._moved > STUCK_SECONDS
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
            raise BusyError("too many texts are being read; try again later", _RETRY_SECONDS)
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
