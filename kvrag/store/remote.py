"""Common base of the stores whose URLs have ``//``, most of them on other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from kvrag import arguments
from kvrag.chunk import ChunkKey
from kvrag.store.base import CountedStore, StoredRecord, check_range
from kvrag.store.metrics import StoreMetrics

Options = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Maps an option's name in a URL to an argument's name and a parser (which raises ValueError)."""


_BYTES_PER_TIMEOUT = 1 << 20


def upload_seconds(timeout_seconds: float, num_bytes: int) -> float:
    """Return how long an upload may take: the timeout, and once more for each MiB.

    The answer follows the upload, so its time looks like a server's silence.
    """
    return timeout_seconds * (1 + num_bytes / _BYTES_PER_TIMEOUT)


class RemoteStore(CountedStore, ABC):
    """A store that `kvrag.store.registry.open_store` opens by its scheme, with a circuit breaker.

    To add one, subclass this and write ``scheme: module:class`` into the table of
    `kvrag.store.registry`, or register it from another distribution as the entry point ``scheme``
    of the group ``kvrag.stores``. It must raise StoreUnreachableError when the other side does not
    answer (kvrag turns an OSError into one), and other StoreErrors for failures that do not pass by
    themselves.

    `kvrag.store.capabilities` reserves these names, and `open_store` refuses other uses of them:
    ``admits``, ``check_writable``, ``derive``, ``flush``, ``is_in_memory``, ``limit_bytes``,
    ``path``, ``pin``, ``tier_of``, ``tiers``, ``unpin``.

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

    @abstractmethod
    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays."""

    @abstractmethod
    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one."""

    @abstractmethod
    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none."""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is a record for `key`."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""

    @abstractmethod
    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Return 0: the other side cleans up after interrupted writes."""
        del min_age_seconds
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class HeadedRecord:
    """An opened record whose head came with the answer to the opening request."""

    def __init__(self, key: ChunkKey, size_bytes: int, head: bytes, metrics: StoreMetrics) -> None:
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
