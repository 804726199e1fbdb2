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
        self._spare: torch.Tensor | None = None
        self._lock = threading.Lock()

    def take(self, spec: KVSpec, num_tokens: int, capacity: int, device: torch.device) -> FusedKV:
        """Return a buffer, in the spare memory if that is large enough."""
        with self._lock:
            storage, self._spare = self._spare, None
        needed = FusedKV.storage_elements(spec, capacity)
        if storage is not None and storage.numel() < needed:
            storage = None
        elif storage is not None and device.type != "cpu":
            # As `FusedKV` does: an earlier prompt may have left NaN.
            storage.zero_()
        return FusedKV(spec, num_tokens, capacity, device, storage)

    def give_back(self, fused: FusedKV) -> None:
        """Keep the buffer's memory; the caller must not use the buffer afterwards."""
        with self._lock:
            if self._spare is None or self._spare.numel() < fused.storage.numel():
                self._spare = fused.storage
