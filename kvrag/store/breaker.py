"""A remote store that is not asked again and again while it does not answer.

Without this every chunk of a prompt would wait for its own timeout. After a failure reads are
refused at once for a while; then one of them is let through, and its success opens the way for
all. Writes are always tried: whoever writes wants to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.store.base import StoredRecord
from kvrag.store.metrics import MISS_UNREADABLE, StoreMetrics
from kvrag.store.wrapper import RecordWrapper, StoreWrapper

if TYPE_CHECKING:
    from kvrag.store.http import HttpStore
    from kvrag.store.objects import ObjectStore
    from kvrag.store.redis import RedisStore

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 8.0


class Breaker:
    """Lets calls through until one fails, then none for a while, then one to try.

    Parameters
    ----------
    name
        Of what is called, for messages.
    metrics
        Where calls that are refused are counted.
    clock
        Seconds, ever rising.
    """

    def __init__(
        self, name: str, metrics: StoreMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._pause = 0.0
        self._closed_until = 0.0

    @contextmanager
    def guarding(self, *, is_read: bool = True) -> Iterator[None]:
        """Run a call, unless the last ones failed. Raises StoreUnreachableError."""
        if is_read:
            self._enter()
        with self._lock:
            num_failures = self._num_failures
        try:
            yield
        except StoreUnreachableError:
            with self._lock:
                # Of calls that were under way together the first one tells what there is to tell.
                if num_failures == self._num_failures:
                    self._num_failures += 1
                    self._pause = min(
                        max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS
                    )
                    self._closed_until = self._clock() + self._pause
            raise
        except (StoreError, RecordError):
            self._open()  # a refusal is an answer
            raise
        self._open()

    def _open(self) -> None:
        with self._lock:
            self._pause = 0.0

    def _enter(self) -> None:
        with self._lock:
            if not self._pause:
                return
            now = self._clock()
            if now >= self._closed_until:
                # This call tries; the others wait for what comes of it.
                self._closed_until = now + self._pause
                return
            left = self._closed_until - now
        self._metrics.miss(MISS_UNREADABLE)
        raise StoreUnreachableError(
            f"{self._name} did not answer a moment ago and is asked again in {left:.1f} s"
        )


class GuardedStore(StoreWrapper):
    """A remote store behind a `Breaker`.

    Parameters
    ----------
    inner
        The remote store.
    """

    def __init__(self, inner: RedisStore | ObjectStore | HttpStore) -> None:
        super().__init__(inner)
        self._metrics = inner.metrics
        self._breaker = Breaker(inner.url, inner.metrics)

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; a key that is present keeps its record."""
        with self._breaker.guarding(is_read=False):
            self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the one `key` has."""
        with self._breaker.guarding(is_read=False):
            self.inner.replace(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None where there is none. Raises StoreError."""
        with self._breaker.guarding(), self._metrics.timing():
            record = self.inner.open(key)
        return None if record is None else _GuardedRecord(record, self._breaker, self._metrics)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        with self._breaker.guarding():
            return self.inner.contains(key)


class _GuardedRecord(RecordWrapper):
    def __init__(self, inner: StoredRecord, breaker: Breaker, metrics: StoreMetrics) -> None:
        super().__init__(inner)
        self._breaker = breaker
        self._metrics = metrics

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._breaker.guarding(), self._metrics.timing():
            self.inner.read_into(offset, buffer)
