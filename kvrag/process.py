"""What belongs to one process: it is not copied, not used after a fork, and rests at exit."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self

from kvrag.errors import ProcessError

# Where Linux tells the limit of a control group, in version 2 and 1.
_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_EXIT_SECONDS = 30.0  # of one piece of work, such as a layer over a prompt


class OfProcess:
    """Base class of objects with threads, locks and open files, which no copy could share."""

    _process: int
    _kind = ""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Note the process."""
        made = super().__new__(cls)
        made._process = os.getpid()
        return made

    def require_here(self) -> None:
        """Raise ProcessError in a process that was forked from the one that made this."""
        if os.getpid() != self._process:
            kind = self._kind or type(self).__name__
            raise ProcessError(
                f"this {kind} belongs to process {self._process}, and process {os.getpid()} was "
                "forked from it, without the threads that hold its locks. Start processes afresh "
                "(multiprocessing.set_start_method('spawn')), pass them the index's path, and call "
                "Index.open there"
            )

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse to be pickled and copied: both call this."""
        raise ProcessError(
            f"this {type(self).__name__} cannot be copied or pickled: it has open files, threads "
            "and a model. Threads may share it; pass other processes the index's path, and call "
            "Index.open there"
        )


class TurnLock:
    """A re-entrant lock whose holder can see that others wait, and let one of them go first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # written by the holder
        self._changed = threading.Condition()
        self._num_waiting = self._num_taken = 0

    def __enter__(self) -> None:
        """Take the lock."""
        if not self._lock.acquire(blocking=False):
            with self._changed:
                self._num_waiting += 1
            try:
                self._lock.acquire()
            finally:
                with self._changed:
                    self._num_waiting -= 1
                    self._num_taken += 1
                    self._changed.notify_all()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self._depth -= 1
        self._lock.release()

    @property
    def is_wanted(self) -> bool:
        """Whether others wait for what its holder would free at once."""
        return self._num_waiting > 0 and self._depth == 1

    def step_aside(self) -> None:
        """Return when one of those who wait has taken the lock, or nobody waits. Do not hold it."""
        with self._changed:
            before = self._num_taken
            self._changed.wait_for(lambda: self._num_taken != before or not self._num_waiting)


_resting = threading.Condition()
_depth = threading.local()
_num_at_work = 0
_is_exiting = False


@contextmanager
def working() -> Iterator[None]:
    """Compute inside; at the interpreter's exit, a daemon thread stops before or after it for good.

    Python ends daemon threads when they ask for its lock again. In the middle of compiled code of
    C++ or Rust, that ends the whole process with an error.
    """
    global _num_at_work
    if getattr(_depth, "at_work", False):
        yield
        return
    with _resting:
        _rest()
        _num_at_work += 1
    _depth.at_work = True
    try:
        yield
    finally:
        _depth.at_work = False
        with _resting:
            _num_at_work -= 1
            _resting.notify_all()
            _rest()


def _rest() -> None:
    """Wait for ever if the interpreter ends and this is another thread than its main one."""
    while _is_exiting and threading.current_thread() is not threading.main_thread():
        _resting.wait()


def _exit() -> None:
    global _is_exiting
    with _resting:
        _is_exiting = True
        _resting.wait_for(lambda: not _num_at_work, _EXIT_SECONDS)


def _in_child() -> None:
    global _resting, _depth, _num_at_work
    _resting, _depth, _num_at_work = threading.Condition(), threading.local(), 0


def memory_bytes() -> int:
    """Return the memory that this process may have: its container's, if that has a limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # "max": there is none
            sizes.append(int(path.read_text()))
    return min(sizes)


def after_fork(forget: Callable[[], None]) -> None:
    """Call `forget` in each forked process: another thread may have held what it replaces."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


after_fork(_in_child)
atexit.register(_exit)
