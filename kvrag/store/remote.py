"""Common base of the stores whose URLs have ``//``, most of them on other machines."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from kvrag import arguments
from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.store.base import CountedStore, RecordWrapper, StoredRecord, StoreWrapper, check_range
from kvrag.store.metrics import MISS_UNREADABLE, StoreMetrics

_T = TypeVar("_T")

Options = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Maps an option's name in a URL to an argument's name and a parser (which raises ValueError)."""


class RemoteStore(CountedStore):
    """A store that `kvrag.store.registry.open_store` opens by its scheme, with a circuit breaker.

    To add one, subclass this and write ``scheme: module:class`` into the table of
    `kvrag.store.registry`, or register it from another distribution as the entry point ``scheme``
    of the group ``kvrag.stores``. It must raise StoreUnreachableError when the other side does not
    answer (kvrag turns an OSError into one), and other StoreErrors for failures that do not pass by
    themselves.

    Parameters
    ----------
    url
        ``scheme://...``, without options.
    must_answer
        Raise StoreUnreachableError if the store is unreachable now; otherwise it may become
        reachable later.
    options
        Values of those `options` that the URL has.

    Attributes
    ----------
    options
        Options that may follow ``?`` in the URL.
    url
        The URL without a password.
    metrics
        The store's counts.
    """

    options: ClassVar[Options] = {}
    url: str

    @abstractmethod
    def __init__(self, url: str, *, must_answer: bool = True, **options: Any) -> None: ...


class HeadedRecord:
    """An opened record whose head came with the answer to the opening request, if it has one."""

    def __init__(
        self, key: ChunkKey, size_bytes: int, head: bytes | memoryview, metrics: StoreMetrics
    ) -> None:
        self._key = key
        self._size_bytes = size_bytes
        self._head = head
        self._metrics = metrics

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` starting at `offset`, in at most one request.

        Raises
        ------
        StoreError
            When the store does not deliver the bytes, or the record was deleted or replaced.
        RecordError
            When the record ends before the buffer is full.
        """
        check_range(self._key, self._size_bytes, offset, buffer.nbytes)
        known = self._head[offset : offset + buffer.nbytes]
        buffer[: len(known)] = known
        if len(known) < buffer.nbytes:
            self._fetch(offset + len(known), buffer[len(known) :])
        self._metrics.read(buffer.nbytes)

    def close(self) -> None:
        """Do nothing: the store owns the connections."""

    def _fetch(self, first: int, buffer: memoryview) -> None:
        """Fill a buffer from the bytes after the head. Raises as `read_into` does."""
        raise NotImplementedError


def seconds(text: str) -> float:
    """Return an option's number of seconds. Raises ValueError."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 3600:
        raise ValueError(f"expected a number of seconds above 0, found {arguments.shown(text)}")
    return found


def file_path(text: str) -> str:
    """Return an option's file path. Raises ValueError or ParameterError."""
    if not text.strip():
        raise ValueError("expected a file, found an empty path")
    return str(arguments.path(text, "path").absolute())


# A circuit breaker: after a remote store fails, reads fail at once for a while.
#
# Without it every chunk of a prompt would wait for its own timeout. The breaker starts closed: all
# calls pass. A failure opens it: for a while it refuses reads at once. Then it is half-open: one
# read is a trial, and its success closes the breaker. Writes are always tried, because a writer
# needs to know the outcome.


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
        self._guarded(self.inner.put, key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one."""
        self._guarded(self.inner.replace, key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none. Raises StoreError."""
        with self._metrics.timing():
            record = self._guarded(self.inner.open, key, is_read=True)
        return None if record is None else _GuardedRecord(record, self._breaker, self._metrics)

    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is a record for `key`."""
        return self._guarded(self.inner.contains, key, is_read=True)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""
        return self._guarded(self.inner.delete, key)

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Remove leftovers of interrupted writes; return their number."""
        return self._guarded(self.inner.collect_garbage, min_age_seconds)

    def _guarded(self, call: Callable[..., _T], *given: Any, is_read: bool = False) -> _T:
        with self._breaker.guarding(is_read=is_read):
            return call(*given)

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and their records' sizes."""
        with self._breaker.guarding(is_read=False):
            yield from self.inner.sizes()


class _GuardedRecord(RecordWrapper):
    def __init__(self, inner: StoredRecord, breaker: Breaker, metrics: StoreMetrics) -> None:
        super().__init__(inner)
        self._breaker = breaker
        self._metrics = metrics

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._breaker.guarding(), self._metrics.timing():
            self.inner.read_into(offset, buffer)
