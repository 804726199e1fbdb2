"""Work on many texts for one request, such as their vectors, while its client waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from starlette.requests import Request

from kvrag.ingest.turns import before_turn
from kvrag.server.problems import BusyError, ClientGoneError

MAX_BATCHES = 32
"""Most requests whose texts are worked on, or wait for that."""
STUCK_SECONDS = 10.0
"""Without a turn of any of them for so long, the server is not ready."""
_THREADS = 2
_RETRY_SECONDS = 5

T = TypeVar("T")


class Batches:
    """Runs such work in its own threads, and ends it when its client leaves."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvrag-texts")
        self._open: set[Future[Any]] = set()
        self._moved = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether it would take more, and what it has taken goes on."""
        is_stuck = bool(self._open) and time.monotonic() - self._moved > STUCK_SECONDS
        return len(self._open) < MAX_BATCHES and not is_stuck

    def close(self) -> None:
        """Stop the threads after the work in progress."""
        self._threads.shutdown(cancel_futures=True)

    async def run(self, http: Request, call: Callable[[], T]) -> T:
        """Return what `call` returns; it ends before its next batch when the client leaves.

        Raises
        ------
        BusyError
            When there is too much such work.
        ClientGoneError
            When the client has left.
        """
        if len(self._open) >= MAX_BATCHES:
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

        if not self._open:
            self._moved = time.monotonic()
        future = self._threads.submit(copy_context().run, work)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        leaving = asyncio.create_task(_left(http))
        done = asyncio.wrap_future(future)
        try:
            await asyncio.wait((done, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientGoneError
            return done.result()
        finally:
            has_left = True
            leaving.cancel()
            done.cancel()


async def _left(http: Request) -> None:
    """Return when the client has left."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
