"""A separate process for work on foreign input, within limits of time and memory.

Some inputs are programs: a chat template may loop for hours, and one multiplication of it may take
all memory while it holds the interpreter's lock. Only another process can be ended then.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any

from kvrag.process import after_fork

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
