"""Memory that keeps stored KV from prompt to prompt: a graphics card's, or page-locked memory.

Prompts place chunks from it as they are. Each is named by what its record's header says, checksums
of all blocks included. A prompt opens the record first, so KV of one that was deleted or replaced
is never found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from kvrag.store.metrics import MISS_ABSENT, StoreCounts, StoreMetrics

Allocate = Callable[[int], torch.Tensor | None]
"""Returns this many bytes, or None where there is no room."""


@dataclass(eq=False)
class HotChunk:
    """A chunk's memory. A tier makes it.

    Attributes
    ----------
    name
        What the record is, content included.
    memory
        ``uint8``, one-dimensional.
    written
        What a card has to reach before it may read the memory; None: nothing.
    """

    name: Hashable
    memory: torch.Tensor
    written: torch.cuda.Event | None = None
    _num_holders: int = 1
    _uses: list[torch.cuda.Event] = field(default_factory=list)

    def _is_free(self) -> bool:
        """Whether neither a prompt nor the card uses the memory."""
        if self._num_holders:
            return False
        self._uses = [event for event in self._uses if not is_over(event)]
        return not self._uses


class HotTier:
    """Chunks in one kind of memory, the least recently used of which leave first.

    Nothing leaves while a prompt holds it, or a card still reads it. Safe for several threads.

    Parameters
    ----------
    name
        Its name in counts.
    limit_bytes
        The most that all chunks take.
    allocate
        Called while other threads wait.
    """

    def __init__(self, name: str, limit_bytes: int, allocate: Allocate) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._kept: dict[Hashable, HotChunk] = {}  # the least recently used first
        self._coming: dict[Hashable, HotChunk] = {}
        self._leaving: list[HotChunk] = []
        self._size_bytes = 0
        self._lock = threading.Lock()
        self._metrics = StoreMetrics(name)

    @property
    def size_bytes(self) -> int:
        """The bytes of all chunks, those that are being written or still read included."""
        with self._lock:
            return self._size_bytes

    def counts(self) -> StoreCounts:
        """Return the counts so far: read are the bytes that no store was asked for."""
        return self._metrics.counts()

    def find(self, name: Hashable) -> HotChunk | None:
        """Return a chunk that is here, whole, and hold it until `release`."""
        with self._lock:
            chunk = self._kept.pop(name, None)
            if chunk is None:
                self._metrics.miss(MISS_ABSENT)
                return None
            self._kept[name] = chunk
            chunk._num_holders += 1
        self._metrics.hit()
        self._metrics.read(chunk.memory.numel())
        return chunk

    def make(self, name: Hashable, num_bytes: int) -> HotChunk | None:
        """Return memory to write a chunk to, held until `release`; others find it after `keep`.

        None if there is no room, or if another prompt has or writes the chunk.
        """
        with self._lock:
            self._sweep()
            if name in self._kept or name in self._coming or not self._make_room(num_bytes):
                return None
            memory = self._allocate(num_bytes)
            if memory is None:
                return None
            self._size_bytes += num_bytes
            chunk = self._coming[name] = HotChunk(name, memory)
            return chunk

    def keep(self, chunk: HotChunk, written: torch.cuda.Event | None = None) -> None:
        """Say that a chunk is whole, once a card has reached an event."""
        chunk.written = written
        with self._lock:
            self._kept[chunk.name] = self._coming.pop(chunk.name)
        self._metrics.wrote(chunk.memory.numel())

    def release(self, chunk: HotChunk, uses: Sequence[torch.cuda.Event] = ()) -> None:
        """Hold a chunk no longer.

        Parameters
        ----------
        uses
            What a card has to reach before the memory may be used for something else.
        """
        with self._lock:
            chunk._num_holders -= 1
            chunk._uses = [event for event in chunk._uses if not is_over(event)] + list(uses)
            if self._coming.get(chunk.name) is chunk:
                # It never became whole.
                del self._coming[chunk.name]
                self._leaving.append(chunk)
            self._sweep()

    def _make_room(self, num_bytes: int) -> bool:
        """Let chunks leave until there is room; none if that is not enough."""
        over = self._size_bytes + num_bytes - self.limit_bytes
        going: list[HotChunk] = []
        for chunk in self._kept.values():
            if over <= 0:
                break
            if chunk._is_free():
                going.append(chunk)
                over -= chunk.memory.numel()
        if over > 0:
            return False
        for chunk in going:
            del self._kept[chunk.name]
            self._metrics.evicted(chunk.memory.numel())
            self._size_bytes -= chunk.memory.numel()
        return True

    def _sweep(self) -> None:
        """Free chunks that never became whole, once nothing reads or writes them."""
        gone = [chunk for chunk in self._leaving if chunk._is_free()]
        self._leaving = [chunk for chunk in self._leaving if chunk not in gone]
        self._size_bytes -= sum(chunk.memory.numel() for chunk in gone)


def is_over(event: torch.cuda.Event | None) -> bool:
    """Return whether a card has reached an event."""
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]
