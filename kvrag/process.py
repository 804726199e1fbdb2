"""What belongs to one process: it is not copied, not used after a fork, and rests at exit.

Some inputs are programs: a chat template may loop for hours, and one multiplication of it may take
all memory while it holds the interpreter's lock. Only another process can be ended then: `Child`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
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


# The parent's own search path: the child finds the same kvrag.
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {0}; {0}.main()"
_MAX_ANSWER_BYTES = 1 << 28
_IDLE_FACTOR = 30.0  # wall seconds allowed for a second of computing, on a busy machine


class ChildError(Exception):
    """The process ended instead of answering; the message says why."""


class Child:
    """A process that answers one request at a time; it starts with the first, and after its end.

    Requests and answers are JSON, so a child that has been taken over can send text alone. Any
    thread may ask. A forked process starts its own.

    Parameters
    ----------
    module
        Its function ``main()`` calls `serve`.
    seconds
        CPU time for a request, so that a busy machine changes nothing.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self._module = module
        self._seconds = seconds
        self._forget()
        after_fork(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any) -> Any:
        """Return the answer. Raise ChildError if the process ends first, or cannot be started."""
        content = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            process = self._process
            timer = threading.Timer(_IDLE_FACTOR * self._seconds, process.kill)
            timer.daemon = True
            timer.start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(OSError):  # it ended: its answer is missing too
                    process.stdin.write(content)
                    process.stdin.flush()
                line = process.stdout.readline(_MAX_ANSWER_BYTES)
            except BaseException:  # an interrupt: the answer would be taken for the next one's
                self._end(process)
                raise
            finally:
                timer.cancel()
            if not line.endswith(b"\n"):
                raise ChildError(self._end(process))
        return json.loads(line)

    def _started(self) -> subprocess.Popen[bytes]:
        from multiprocessing.spawn import get_executable  # the child itself needs none

        command = [get_executable(), "-c", _MAIN.format(self._module), json.dumps(sys.path)]
        try:
            return subprocess.Popen(
                [*command, str(self._seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # an interrupt at the terminal is for the parent alone
            )
        except OSError as error:
            raise ChildError(
                f"the process for it cannot be started ({error.strerror or error})"
            ) from error

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """End the process, and return why it gave no answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            return f"it takes more than {self._seconds:g} s"
        how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        return f"its process ended ({how})"


def serve(answer: Any, memory_bytes: int) -> None:
    """Answer the parent, in the child, until it closes the pipe or exits.

    Parameters
    ----------
    answer
        Takes a request and returns its answer, both JSON.
    memory_bytes
        Memory beyond what the process has now, where the system limits it. Without it, `answer`
        raises MemoryError.
    """
    seconds = float(sys.argv[2])
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed goes nowhere
    limit_memory(memory_bytes)
    for line in requests:
        _limit_time(seconds)
        content = json.dumps(answer(json.loads(line))).encode()
        _limit_time(0.0)
        answers.write(content + b"\n")
        answers.flush()


def _limit_time(seconds: float) -> None:
    # The signal ends the process, also within one long operation.
    signal.setitimer(signal.ITIMER_PROF, seconds)


_DEFAULT_BASE_BYTES = 512 << 20
"""The address space of an interpreter, for systems that do not report it."""


def limit_memory(memory_bytes: int) -> None:
    """Limit this process to `memory_bytes` beyond its current memory, if the system can."""
    try:
        base = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        base = _DEFAULT_BASE_BYTES
    try:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = base + memory_bytes
        if most != resource.RLIM_INFINITY:
            wanted = min(wanted, most)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError):
        pass  # the system enforces no such limit
