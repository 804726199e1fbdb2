"""A circuit breaker: after a remote store fails, reads fail at once for a while.

Without it every chunk of a prompt would wait for its own timeout. The breaker starts closed: all
calls pass. A failure opens it: for a while it refuses reads at once. Then it is half-open: one read
is a trial, and its success closes the breaker. Writes are always tried, because a writer needs to
know the outcome.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.store.base import RecordWrapper, StoredRecord, StoreWrapper
from kvrag.store.metrics import MISS_UNREADABLE, StoreMetrics
from kvrag.store.remote import RemoteStore

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 8.0


class Breaker:
    """Lets calls pass until one fails, then refuses them for a while, then passes one as a trial.

    Parameters
    ----------
    name
        Name of the guarded service, for messages.
    metrics
        Counts the refused calls.
    clock
        Monotonic clock, in seconds.
    """

    def __init__(
        self, name: str, metrics: StoreMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        # Seconds that the breaker stays open before the next trial; 0 while it is closed.
        self._pause = 0.0
        self._open_until = 0.0

    @contextmanager
    def guarding(self, *, is_read: bool = True) -> Iterator[None]:
        """Run a call; a read is refused while the breaker is open.

        An OSError that the call raises becomes StoreUnreachableError. If it was a read, it is
        counted as a miss.
        """
        if is_read:
            self._require_closed()
        with self._lock:
            num_failures = self._num_failures
        try:
            yield
        except StoreUnreachableError:
            self._open(num_failures)
            raise
        except (StoreError, RecordError):
            self._close()  # a refusal is an answer
            raise
        except OSError as error:
            self._open(num_failures)
            if is_read:
                self._metrics.miss(MISS_UNREADABLE)
            raise unreachable(self._name, error) from error
        self._close()

    def _open(self, num_failures: int) -> None:
        """Refuse reads for a while. `num_failures` is the count when the failed call began."""
        with self._lock:
            # When several calls fail together, only the first one counts.
            if num_failures == self._num_failures:
                self._num_failures += 1
                self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
                self._open_until = self._clock() + self._pause

    def _close(self) -> None:
        with self._lock:
            self._pause = 0.0

    def _require_closed(self) -> None:
        """Return if a call may pass, including a trial. Raises StoreUnreachableError."""
        with self._lock:
            if not self._pause:
                return
            now = self._clock()
            if now >= self._open_until:
                # Half-open: this call is the trial; the others wait for its outcome.
                self._open_until = now + self._pause
                return
            left = self._open_until - now
        self._metrics.miss(MISS_UNREADABLE)
        raise StoreUnreachableError(
            f"{self._name} did not answer a moment ago and is asked again in {left:.1f} s"
        )


def unreachable(name: str, error: OSError) -> StoreUnreachableError:
    """Return the error for a store that raised the system's error instead of a StoreError."""
    return StoreUnreachableError(
        f"{name} does not answer ({type(error).__name__}: {error}); check the host and the "
        "network, then try again"
    )


class GuardedStore(StoreWrapper):
    """A remote store guarded by a `Breaker`.

    Parameters
    ----------
    inner
        The remote store.
    query
        The part of its URL after ``?``.
    """

    def __init__(self, inner: RemoteStore, query: str = "") -> None:
        super().__init__(inner)
        self._query = query
        self._metrics = inner.metrics
        self._breaker = Breaker(inner.url, inner.metrics)

    @property
    def url(self) -> str:
        """The inner store's URL with its options."""
        return f"{self.inner.url}?{self._query}" if self._query else self.inner.url

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays."""
        with self._breaker.guarding(is_read=False):
            self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one."""
        with self._breaker.guarding(is_read=False):
            self.inner.replace(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none. Raises StoreError."""
        with self._breaker.guarding(), self._metrics.timing():
            record = self.inner.open(key)
        return None if record is None else _GuardedRecord(record, self._breaker, self._metrics)

    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is a record for `key`."""
        with self._breaker.guarding():
            return self.inner.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""
        with self._breaker.guarding(is_read=False):
            return self.inner.delete(key)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and their records' sizes."""
        with self._breaker.guarding(is_read=False):
            yield from self.inner.sizes()

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove leftovers of interrupted writes; return their number."""
        with self._breaker.guarding(is_read=False):
            return self.inner.collect_garbage(min_age_seconds)


class _GuardedRecord(RecordWrapper):
    def __init__(self, inner: StoredRecord, breaker: Breaker, metrics: StoreMetrics) -> None:
        super().__init__(inner)
        self._breaker = breaker
        self._metrics = metrics

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._breaker.guarding(), self._metrics.timing():
            self.inner.read_into(offset, buffer)
