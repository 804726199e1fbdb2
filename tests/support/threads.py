"""Threads: of tests that let calls meet, and of the package."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def together(*calls: Callable[[], T]) -> list[T]:
    """Return what calls give, each in a thread of its own; raise what one of them raises."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [running.result() for running in [pool.submit(call) for call in calls]]


def at_work(prefix: str = "kvrag-") -> list[str]:
    """Return the names of the package's threads that run its code at this moment.

    Their names all begin with ``kvrag-``. A pool's thread that waits for work is in no function of
    the package. Threads of other libraries never count, wherever those are installed.
    """
    frames = sys._current_frames()
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(prefix)
        and thread.ident is not None
        and _is_in_package(frames.get(thread.ident))
    )


def _is_in_package(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("kvrag."):
            return True
        frame = frame.f_back
    return False
