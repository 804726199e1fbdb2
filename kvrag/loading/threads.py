"""Threads that read stored KV, kept from prompt to prompt.

Starting a thread waits for the interpreter's lock, which a thread that runs Python gives up
every 5 ms only: in a process that answers several prompts at a time it would be waited for again
and again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_MAX_THREADS = 256
"""Of all prompts together; what is beyond waits until one has done."""

T = TypeVar("T")
R = TypeVar("R")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def start(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a thread that is idle, or in a new one.

    Once the interpreter is about to end there are none; threads of the user's that still answer
    then do the work themselves.
    """
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_MAX_THREADS, "kvrag-load")
        try:
            return _pool.submit(work)
        except RuntimeError as error:
            # Where the system has no thread left, the pool keeps the work for one of its own.
            if "cannot schedule" not in str(error):
                raise
    done: Future[None] = Future()
    try:
        work()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


def each(work: Callable[[T], R], items: Sequence[T], num_threads: int) -> list[R]:
    """Return what `work` makes of each item, the caller and other threads working on them.

    Parameters
    ----------
    num_threads
        At work at the same time, the caller among them.

    Raises
    ------
    Exception
        The first of what `work` raises, after all that has begun has ended.
    """
    done: list[R | None] = [None] * len(items)
    left = iter(range(len(items)))
    taking = threading.Lock()

    def run() -> None:
        while True:
            with taking:
                number = next(left, None)
            if number is None:
                return
            done[number] = work(items[number])

    helpers = [start(run) for _ in range(min(num_threads, len(items)) - 1)]
    try:
        run()
    finally:
        end(helpers)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return done  # type: ignore[return-value]  # every place is filled


def end(threads: Iterable[Future[None]]) -> None:
    """Wait for work that has begun; what has not will never begin."""
    wait([thread for thread in threads if not thread.cancel()])


def _forget() -> None:
    """Start anew: a process that was forked has none of the threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
