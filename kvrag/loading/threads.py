"""Threads that read stored KV, or work beside the model, kept from prompt to prompt.

Starting a thread waits for the interpreter's lock, which a thread that runs Python releases only
every 5 ms. A process that answers several prompts at a time would wait for it again and again.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from kvrag.loading import LOAD_THREADS
from kvrag.process import after_fork
from kvrag.store.base import Store, capability, is_in_memory, tiers_of
from kvrag.store.file import FileStore

LOADING, READING, KEEPING, ASIDE = "load", "read", "keep", "aside"
_MOST = {LOADING: 256, READING: 4, KEEPING: 1, ASIDE: 64}
"""The most threads of each kind, for all prompts together. Further work waits for a free one."""

T = TypeVar("T")
R = TypeVar("R")

_lock = threading.Lock()
# How many threads the calling thread computes with while it shares no cores.
_alone = threading.local()
_pools: dict[str, ThreadPoolExecutor] = {}


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _set_number() -> Any:
    """Return what sets how many threads the calling thread computes with; None if nothing does.

    PyTorch's own function sets it for threads to come as well, and forgets compiled kernels.
    """
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None


def num_computing() -> int:
    """Return how many threads the calling thread computes with while it shares no cores."""
    number: int = getattr(_alone, "number", 0)
    return number or torch.get_num_threads()


def can_share() -> bool:
    """Return whether threads can take a share of the cores."""
    return _set_number() is not None


@contextmanager
def computing_with(num_sharing: int, place: int = 0, number: int | None = None) -> Iterator[None]:
    """Compute with this thread's share of the cores inside the block.

    Parameters
    ----------
    num_sharing
        How many threads compute at the same time, this one among them.
    place
        Which of them this is, from 0; the first ones take what is left over.
    number
        How many cores they share; None: with how many this thread computes.
    """
    own, set_number = torch.get_num_threads(), _set_number()
    number = number or own
    if set_number is None:
        yield
        return
    try:  # from here on: an interrupted thread gets all cores back
        _alone.number = number
        set_number(max(1, number // num_sharing + (place < number % num_sharing)))
        yield
    finally:
        set_number(own)
        _alone.number = 0


def suitable(store: Store, device: torch.device) -> int:
    """Return how many of a prompt's records to read at the same time; 0: none while computing.

    Threads wait for another machine's answers without taking a core. Those that read a local store
    need one. Without an idle core they hold up the threads that compute, which wait for each other
    after each operator: more is lost than hidden.
    """
    if device.type != "cpu" or not is_local(store):
        return LOAD_THREADS
    return min(max(num_cores() - num_computing(), 0), LOAD_THREADS)


def is_local(store: Store) -> bool:
    """Return whether all of a store is in this machine's memory or folders."""
    return all(
        capability(tier, FileStore) is not None or is_in_memory(tier) for tier in tiers_of(store)
    )


def start(work: Callable[[], T], kind: str = LOADING) -> Future[T]:
    """Run `work` in an idle thread, or in a new one.

    Reading whole prompts has other threads: it takes a core, and loading must not wait for it.
    While the interpreter shuts down, there are no such threads. A thread of the user that still
    answers a prompt then does the work itself.
    """
    with _lock:
        if kind not in _pools:
            _pools[kind] = ThreadPoolExecutor(_MOST[kind], f"kvrag-{kind}")
        try:
            return _pools[kind].submit(work)
        except RuntimeError as error:
            # If the system has no thread left, the pool keeps the work for one of its threads.
            if "cannot schedule" not in str(error):
                raise
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


def each(work: Callable[[T], R], items: Sequence[T], num_threads: int) -> list[R]:
    """Return the result of `work` for each item. The caller and other threads share the items.

    Parameters
    ----------
    num_threads
        How many threads work at the same time, including the caller.

    Raises
    ------
    Exception
        The first exception of `work`, once all work that has begun has ended.
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
    """Wait for work that has begun; cancel the rest."""
    wait([thread for thread in threads if not thread.cancel()])


def _forget() -> None:
    """Forget the pools: a forked process has none of their threads."""
    global _lock
    _pools.clear()
    _lock = threading.Lock()


after_fork(_forget)
