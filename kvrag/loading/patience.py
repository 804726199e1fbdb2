"""How long a prompt waits for a store: no longer than computing what it stores would take."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from kvrag.errors import StoreError
from kvrag.process import after_fork
from kvrag.store.base import RecordWrapper, StoredRecord, cancel_reading

LEAST_SECONDS = 2.0
"""The shortest default: a store that answers sooner is not given up, however small the model."""
UNKNOWN_SECONDS = 10.0
"""The default until a prompt has shown what computing costs."""

# Threads that wait for stores, or were abandoned to one; with all of them abandoned, none waits.
_MAX_HANDS = 256

T = TypeVar("T")


class SlowStoreError(StoreError):
    """Reading a record was given up, for this prompt."""


class Patience:
    """The time that one prompt gives each of its stored records; any thread may use it.

    Once a record has taken longer, all others are given up too: a prompt waits in vain only once.

    Parameters
    ----------
    seconds
        The time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False

    def open(self, open_record: Callable[[], StoredRecord | None]) -> StoredRecord | None:
        """Open a record whose reads, and the opening itself, raise SlowStoreError in time."""
        left = _TimeLeft(self)
        record = left.call(open_record, _close)
        return None if record is None else _PatientRecord(record, left)


def _close(record: StoredRecord | None) -> None:
    if record is not None:
        record.close()


class _TimeLeft:
    """What is left of one record's time."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seconds = patience.seconds

    def call(self, work: Callable[[], T], drop: Callable[[T], object]) -> T:
        """Return what `work` returns in another thread; `drop` gets it if it comes too late."""
        if self._patience.is_over:
            raise SlowStoreError("another record of the prompt was given up before")
        future: Future[T] = Future()
        started = time.perf_counter()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if not _hands.take(run) or not wait([future], max(self._seconds, 0.0)).done:
            self._patience.is_over = True
            future.add_done_callback(lambda late: late.exception() or drop(late.result()))
            raise SlowStoreError(f"a record took more than {self._patience.seconds:.3g} s")
        self._seconds -= time.perf_counter() - started
        return future.result()


class _PatientRecord(RecordWrapper):
    """A record that is read into memory of its reader's, which an abandoned one may fill late."""

    def __init__(self, inner: StoredRecord, left: _TimeLeft) -> None:
        super().__init__(inner)
        self._left = left

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` starting at `offset`. Raises SlowStoreError."""
        inner = self.inner

        def read() -> bytearray:
            content = bytearray(buffer.nbytes)
            inner.read_into(offset, memoryview(content))
            return content

        try:
            content = self._left.call(read, lambda _: inner.close())
        except SlowStoreError:
            cancel_reading(inner)
            raise
        buffer.cast("B")[:] = content


class _Hands:
    """Threads that are kept; they end with the process, whatever they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Any]] = []
        self._num = 0

    def take(self, task: Callable[[], None]) -> bool:
        """Let a thread do it; return False if all are abandoned."""
        with self._lock:
            if self._idle:
                hand = self._idle.pop()
            elif self._num < _MAX_HANDS:
                hand = SimpleQueue()
                # A loop without Python frames: a thread that waits is in no code of kvrag.
                loop = map(self._run, iter(hand.get, None))
                threading.Thread(
                    target=deque, args=(loop, 0), name="kvrag-store", daemon=True
                ).start()
                self._num += 1
            else:
                return False
        hand.put((hand, task))
        return True

    def _run(self, job: tuple[Any, Callable[[], None]]) -> None:
        hand, task = job
        task()
        with self._lock:
            self._idle.append(hand)


_hands = _Hands()


def _forget() -> None:
    """Forget the threads: a forked process has none of them."""
    global _hands
    _hands = _Hands()


after_fork(_forget)
