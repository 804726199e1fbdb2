"""What the stores have in common that a URL with ``//`` names: another machine's, as a rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvrag.chunk import ChunkKey
from kvrag.store.base import StoredRecord, check_range
from kvrag.store.metrics import CountedStore, StoreMetrics

Options = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Of a URL: name there to the name of an argument, and to what makes it of text (ValueError)."""


class RemoteStore(CountedStore, ABC):
    """A store that `kvrag.store.registry.open_store` opens by its scheme, behind a circuit breaker.

    To add one, subclass this and write ``scheme: module:class`` into the table of
    `kvrag.store.registry`, or register it from another distribution as the entry point ``scheme``
    of the group ``kvrag.stores``. It raises StoreUnreachableError where the other side does not
    answer, and other StoreErrors for what will not pass by itself.

    Parameters
    ----------
    url
        ``scheme://...``, without options.
    must_answer
        Raise StoreUnreachableError when it is unreachable now; otherwise it may become reachable
        later.
    options
        Those of `options` that the URL has.

    Attributes
    ----------
    options
        What may stand behind ``?`` in the URL.
    url
        The URL without a password.
    metrics
        What it counts.
    """

    options: ClassVar[Options] = {}
    url: str

    @abstractmethod
    def __init__(self, url: str, *, must_answer: bool = True, **options: Any) -> None: ...

    @abstractmethod
    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; a key that is present keeps its record."""

    @abstractmethod
    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the one `key` has."""

    @abstractmethod
    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None where there is none."""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a record; say whether there was one."""

    @abstractmethod
    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""

    def keys(self) -> Iterator[ChunkKey]:
        """Iterate over the keys, in no particular order."""
        return (key for key, _ in self.sizes())

    def size_bytes(self) -> int:
        """Bytes held by all records."""
        return sum(size for _, size in self.sizes())

    def collect_garbage(self, min_age_seconds: float = 3600.0) -> int:
        """Return 0: what interrupted writes leave behind is the other side's to clean up."""
        del min_age_seconds
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class HeadedRecord:
    """An opened record whose head came with the answer that opened it."""

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
        """Fill `buffer` from `offset` on, in one request at the most.

        Raises
        ------
        StoreError
            When the store does not deliver, or the record was deleted or replaced.
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
        """Do nothing: connections are the store's."""

    def _fetch(self, first: int, buffer: memoryview) -> None:
        """Fill a buffer from what is behind the head. Raises as `read_into` does."""
        raise NotImplementedError


def seconds(text: str) -> float:
    """Return an option that is a number of seconds. Raises ValueError."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 3600:
        raise ValueError(f"expected a number of seconds above 0, found {text!r}")
    return found


def file_path(text: str) -> str:
    """Return an option that is the path of a file."""
    return str(Path(text).expanduser().absolute())
