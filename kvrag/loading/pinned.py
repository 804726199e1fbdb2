"""Page-locked memory through which readers copy to a graphics card, and the stream they copy on."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvrag.loading import LOAD_THREADS
from kvrag.loading.hot import is_over
from kvrag.process import after_fork

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
            taken = self._choose(num_bytes)
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

    def _choose(self, num_bytes: int) -> Pinned | None:
        """Take a free buffer out, the oldest first; None for a new one."""
        done = [one for one in self._free if is_over(one.copied)]
        fitting = [one for one in done if one.memory.numel() >= num_bytes]
        if not fitting and self._num_made < self._most:
            self._num_made += 1
            return None
        with suppress(StopIteration):
            chosen = next(iter(fitting or done or self._free))
            self._free.remove(chosen)
            return chosen
        return None


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


def start_copy(into: torch.Tensor, memory: torch.Tensor) -> None:
    """Have page-locked memory copied to a card, on the current stream, without waiting for it."""
    into.copy_(memory, non_blocking=True)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which everything is copied to a card, so that copies follow in order."""
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


@cache
def decode_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which what was copied is decoded, while more is copied."""
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


@cache
def buffers() -> PinnedBuffers:
    """Return the buffers of this process."""
    return PinnedBuffers()


after_fork(buffers.cache_clear)
after_fork(copy_stream.cache_clear)
after_fork(decode_stream.cache_clear)
