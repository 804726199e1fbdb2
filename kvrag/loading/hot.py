"""Memory that keeps stored KV from prompt to prompt: a graphics card's, or page-locked memory.

Prompts place chunks from it as they are. Each is named by what its record's header says, checksums
of all blocks included. A prompt opens the record first, so KV of one that was deleted or replaced
is never found.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from kvrag.loading import LOAD_THREADS
from kvrag.process import after_fork
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


# -- page-locked memory --------------------------------------------------------------------------

_LEAST_BYTES = 1 << 20


@dataclass(eq=False)
class Pinned:
    """A buffer of bytes on the host.

    Attributes
    ----------
    memory
        The bytes, page-locked, so that a card copies from them by itself.
    copied
        What a card has to reach before the memory may be written again; None: nothing.
    """

    memory: torch.Tensor
    copied: torch.cuda.Event | None = None


class PinnedBuffers:
    """Buffers that readers fill in turn: while the card copies one, its reader fills another.

    `take` waits for the card only if two buffers for each reader are still being copied.
    Page-locking takes longer than a copy, so buffers are kept.

    Parameters
    ----------
    num_readers
        How many threads fill buffers at the same time.
    """

    def __init__(self, num_readers: int = LOAD_THREADS) -> None:
        self._most = 2 * num_readers
        self._num_made = 0
        self._free: deque[Pinned] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Pinned:
        """Return a buffer of at least `num_bytes` bytes, which nobody reads or writes."""
        with self._lock:
            done = [one for one in self._free if is_over(one.copied)]
            fitting = [one for one in done if one.memory.numel() >= num_bytes]
            taken = next(iter(fitting), None)
            if taken is None and self._num_made < self._most:
                self._num_made += 1
            elif taken is None:
                taken = next(iter(done or self._free), None)
            if taken is not None:
                self._free.remove(taken)
        if taken is not None and taken.copied is not None:
            if not is_over(taken.copied):
                taken.copied.synchronize()
            taken.copied = None
        if taken is not None and taken.memory.numel() >= num_bytes:
            return taken
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        return Pinned(page_locked(size))

    def give_back(self, pinned: Pinned, copied: torch.cuda.Event | None = None) -> None:
        """Take a buffer back, which is free once the card has reached an event."""
        pinned.copied = copied
        with self._lock:
            self._free.append(pinned)


def page_locked(num_bytes: int) -> torch.Tensor:
    """Return new page-locked memory, which takes longer to get than to copy."""
    # Not an inference tensor, even if the caller is in inference mode: others write it later.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def registered(num_bytes: int) -> torch.Tensor | None:
    """Return page-locked memory of this very size; None if the system has none to lock.

    What PyTorch keeps page-locked is rounded up to powers of two.
    """
    try:
        with torch.inference_mode(False):
            memory = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:  # no memory at all
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    if int(runtime.cudaHostRegister(address, num_bytes, 0)):
        return None
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
"""The streams of this process besides those that compute, by their work."""
_making = threading.Lock()


def start_copy(into: torch.Tensor, memory: torch.Tensor) -> None:
    """Have page-locked memory copied to a card, on the current stream, without waiting for it."""
    into.copy_(memory, non_blocking=True)


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which everything is copied to a card, so that copies follow in order."""
    return _stream("copy", device)


def decode_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which what was copied is decoded, while more is copied."""
    return _stream("decode", device)


def _stream(work: str, device: torch.device) -> torch.cuda.Stream:
    with _making:  # threads that ask at the same time get the same one
        if (work, device) not in streams:
            streams[work, device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return streams[work, device]


@cache
def buffers() -> PinnedBuffers:
    """Return the buffers of this process."""
    return PinnedBuffers()


after_fork(buffers.cache_clear)
after_fork(streams.clear)
