"""Threads for a request's waiting and computing, which no tenant can take for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TypeVar

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
