"""The thread that generates: it advances the open answers, which the engine writes together."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrag.engine.answer import AnswerDelta
from kvrag.server.problems import BusyError, RequestError

logger = logging.getLogger("kvrag.server")

MAX_STREAMS = 8
MAX_WAITING = 128
STUCK_SECONDS = 30.0
"""Without a step of any answer for so long, the server is not ready."""
# A client that is refused may try again after this time.
_RETRY_SECONDS = 2
_STOPPING = "the server is stopping"


@dataclass(eq=False)
class Job:
    """One answer to generate.

    Attributes
    ----------
    tenant
        Who asks; tenants share the worker fairly.
    start
        Starts the engine's stream, in which None means a step without a piece; called in the
        worker's thread.
    tell
        Receives each piece, or the error that ended the answer; called in the worker's thread.
    """

    tenant: str
    start: Callable[[], Iterator[AnswerDelta | None]]
    tell: Callable[[AnswerDelta | Exception], None]
    is_cancelled: bool = field(default=False, init=False)
    stream: Iterator[AnswerDelta | None] | None = field(default=None, init=False)


class Worker:
    """Generates answers in one thread, several at a time, and keeps a bounded queue of others.

    A step of the engine advances all open answers, so each finds its pieces ready. After the first
    step of an answer, all others have their turn before the next waiting answer begins. If several
    tenants wait, the one with the fewest open answers is next. Tenants that are present share the
    queue evenly.

    Parameters
    ----------
    max_streams
        Most answers that are open at the same time; each one holds its prompt's KV in memory.
    max_waiting
        Most answers that wait for their turn. A tenant that finds the queue full of others' answers
        may still fill its own share.
    """

    def __init__(self, max_streams: int = MAX_STREAMS, max_waiting: int = MAX_WAITING) -> None:
        self._max_streams = max_streams
        self._max_waiting = max_waiting
        # By tenant, in the order of arrival; no queue is empty.
        self._waiting: dict[str, deque[Job]] = {}
        self._open: deque[Job] = deque()
        self._num_open: Counter[str] = Counter()
        # Open answers that advance before a waiting one begins.
        self._num_due = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvrag-worker", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of answers that wait for their turn."""
        with self._changed:
            return self._count_waiting()

    @property
    def num_open(self) -> int:
        """Number of answers that are being generated."""
        with self._changed:
            return self._num_open.total()

    @property
    def is_ready(self) -> bool:
        """Whether it would accept an answer now."""
        with self._changed:
            has_room = not self._stopping and self._count_waiting() < self._room
            is_busy = self._num_open.total() > 0 or bool(self._waiting)
        is_stuck = is_busy and time.monotonic() - self._moved > STUCK_SECONDS
        return has_room and not is_stuck and self._thread.is_alive()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue a tenant's jobs, all or none.

        Raises
        ------
        BusyError
            When the tenant's share of the queue has no room.
        RequestError
            When the jobs are more than the worker ever holds.
        """
        most = self._max_waiting + self._max_streams
        if len(jobs) > most:
            raise RequestError(
                400,
                f"the request has {len(jobs)} answers, and the server holds {most}; ask for fewer",
                param="n",
            )
        with self._changed:
            if self._stopping:
                raise BusyError(_STOPPING, _RETRY_SECONDS)
            tenant = jobs[0].tenant
            present = self._waiting.keys() | self._num_open.keys() | {tenant}
            share = math.ceil(self._room / len(present))
            num_own = len(self._waiting.get(tenant, ()))
            if num_own + len(jobs) > share:
                # No numbers: they would tell how many tenants are there.
                raise BusyError("too many answers are waiting; try again later", _RETRY_SECONDS)
            for job in jobs:
                self._waiting.setdefault(job.tenant, deque()).append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop generating an answer; a step that has begun is finished first."""
        with self._changed:
            job.is_cancelled = True
            if job in (queue := self._waiting.get(job.tenant, deque())):
                queue.remove(job)
                if not queue:
                    del self._waiting[job.tenant]

    def stop(self) -> None:
        """End the thread; answers that are still open or waiting end with a BusyError."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _count_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def _room(self) -> int:
        """How many answers may wait at the moment."""
        return self._max_waiting + max(0, self._max_streams - self._num_open.total())

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._moved = time.monotonic()
            if self._advance(job):
                with self._changed:
                    self._open.append(job)
            else:
                self._close(job)
        for job in self._open:
            self._tell(job, BusyError(_STOPPING, _RETRY_SECONDS))
            self._close(job)
        for queue in self._waiting.values():
            for job in queue:
                self._tell(job, BusyError(_STOPPING, _RETRY_SECONDS))

    def _next(self) -> Job | None:
        """Return the job whose turn it is, when there is one; None when the worker stops."""
        with self._changed:
            while not self._stopping:
                for job in self._open:
                    if job.is_cancelled:
                        self._open.remove(job)
                        return job
                self._num_due = min(self._num_due, len(self._open))
                has_room = len(self._open) < self._max_streams
                if self._waiting and has_room and self._num_due == 0:
                    tenant = min(self._waiting, key=lambda one: self._num_open[one])
                    # Back to the end, so that tenants with equally many take turns.
                    queue = self._waiting.pop(tenant)
                    job = queue.popleft()
                    if queue:
                        self._waiting[tenant] = queue
                    self._num_open[tenant] += 1
                    self._num_due = len(self._open)
                    return job
                if self._open:
                    self._num_due = max(0, self._num_due - 1)
                    return self._open.popleft()
                self._changed.wait()
                self._moved = time.monotonic()
            return None

    def _advance(self, job: Job) -> bool:
        """Generate the next piece; return whether there is more to come."""
        if job.is_cancelled:
            return False
        try:
            if job.stream is None:
                job.stream = job.start()
            delta = next(job.stream)
        except Exception as error:
            self._tell(job, error)
            return False
        return delta is None or (self._tell(job, delta) and delta.answer is None)

    def _tell(self, job: Job, event: AnswerDelta | Exception) -> bool:
        """Return whether somebody still listens."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            job.tell(event)
            return True
        return False

    def _close(self, job: Job) -> None:
        """Free what an answer holds."""
        try:
            if job.stream is not None:
                job.stream.close()  # type: ignore[attr-defined]
        except Exception:
            logger.exception("an answer could not be closed")
        with self._changed:
            self._num_open[job.tenant] -= 1
            self._num_open += Counter()  # drops tenants without any
