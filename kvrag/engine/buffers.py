"""A pool that keeps one spare KV buffer between prompts.

A new buffer of a hundred megabytes costs a page fault for every four kilobytes. On a CPU, that can
take longer than loading the KV into it. So the pool keeps one prompt's memory for the next prompt.
"""

from __future__ import annotations

import threading

import torch

from kvrag.kvcache import FusedKV, KVSpec


class BufferPool:
    """Provides fused buffers and keeps the memory of one returned buffer."""

    def __init__(self) -> None:
        self._spare: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._leaving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    def take(self, spec: KVSpec, num_tokens: int, capacity: int, device: torch.device) -> FusedKV:
        """Return a buffer, in the spare memory if that is large enough."""
        with self._lock:
            spare, self._spare = self._spare, None
            self._leave()
        storage, after = spare or (None, None)
        if after is not None:
            # Not left to one stream: several fill a buffer.
            after.synchronize()
        needed = FusedKV.storage_elements(spec, capacity)
        if storage is not None and storage.numel() < needed:
            storage = None
        elif storage is not None and device.type != "cpu":
            # As `FusedKV` does: an earlier prompt may have left NaN.
            storage.zero_()
        return FusedKV(spec, num_tokens, capacity, device, storage)

    def give_back(self, fused: FusedKV, after: torch.cuda.Event | None = None) -> None:
        """Keep the buffer's memory; the caller must not use the buffer afterwards.

        Parameters
        ----------
        after
            The memory is used again only after this event; None: at once.
        """
        given = fused.storage, after
        with self._lock:
            if self._spare is None or self._spare[0].numel() < given[0].numel():
                given, self._spare = self._spare or (given[0], None), given
            storage, after = given
            if after is not None:
                self._leaving.append((storage, after))
            self._leave()

    def _leave(self) -> None:
        """Drop the memory that nothing reads any more; its allocator knows nothing of events."""
        self._leaving = [
            one
            for one in self._leaving
            if not one[1].query()  # type: ignore[no-untyped-call]
        ]
