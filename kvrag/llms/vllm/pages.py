"""Writing fused rows into the engine's cache, after the engine's own work on its device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvrag.errors import EngineError
from kvrag.fusion.report import FusionReport

if TYPE_CHECKING:
    from kvrag.llms.vllm.plan import Load

_KNOWN_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""Backends whose caches are ``[blocks, H, block size, 2 D]``: keys, and values after them."""


class Brought:
    """The first rows of a prompt, to be written into the engine's cache, perhaps several times.

    Parameters
    ----------
    keys, values
        For each layer of the model ``[H, n, D]``, of this worker's heads; keys are placed. Only
        the worker's own layers are used.
    report
        The fusion's report.
    free
        Frees the memory. It is given the event after which nothing reads the rows any more, since
        copies that were started may not have run; None if there are no such copies.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        report: FusionReport,
        free: Callable[[torch.cuda.Event | None], None],
    ) -> None:
        self.keys, self.values, self.report = keys, values, report
        self._free = free
        self._lock = threading.Lock()
        self._num_holders = 1
        self._last_read: torch.cuda.Event | None = None

    def hold(self) -> None:
        """Add a holder, besides those that have not released it yet."""
        with self._lock:
            self._num_holders += 1

    def note_read(self, event: torch.cuda.Event | None) -> None:
        """Note the event after the copies that were started last; all are on one stream."""
        with self._lock:
            self._last_read = event

    def release(self) -> None:
        """Remove a holder; the last one frees the memory."""
        with self._lock:
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            self._free(self._last_read)


class Pages:
    """Writes rows into the engine's cache.

    Parameters
    ----------
    layers
        Attention layers by name, from vLLM's forward context.
    caches
        Each layer's cache, by the same names.
    block_size
        Number of tokens in a block.

    Attributes
    ----------
    block_size
        Number of tokens in a block.
    layers
        Numbers of the layers that this worker has, counted through the whole model.

    Raises
    ------
    EngineError
        If a layer's name has no number, or the numbers are not consecutive.
    """

    def __init__(
        self, layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], block_size: int
    ) -> None:
        self._caches = {_layer_index(name): (layers[name], caches[name]) for name in caches}
        self.block_size = block_size
        self.layers = range(min(self._caches), max(self._caches) + 1)
        if len(caches) != len(self.layers):
            raise EngineError(
                f"the engine has {len(caches)} caches for the layers {self.layers.start} to "
                f"{self.layers.stop - 1}: kvrag needs one for each layer"
            )

    def write(self, load: Load, brought: Brought) -> Generator[None, None, None]:
        """Write a request's rows, and yield between layers.

        Where the cache's layout is known, rows go straight to their places. Otherwise the attention
        backend writes them, because each has its own layout.
        """
        _, first = self._caches[self.layers.start]
        rows = torch.arange(load.start, load.end)
        blocks = torch.tensor(load.block_ids)[rows // self.block_size]
        within = rows % self.block_size
        # Once for all layers: to wait for it would be to wait for the engine's running step.
        blocks, within, slots = _sent(
            torch.stack([blocks, within, blocks * self.block_size + within]), first.device
        )
        try:
            for index in self.layers:
                if index > self.layers.start:
                    yield
                layer, cache = self._caches[index]
                # [H, n, D] -> [n, H, D], the shape of the engine's own projections.
                keys, values = (
                    one[index][:, load.start : load.end].transpose(0, 1)
                    for one in (brought.keys, brought.values)
                )
                with torch.no_grad():
                    if _is_known(layer, cache, keys):
                        size = keys.shape[-1]
                        places = cache.transpose(1, 2)
                        places[..., :size].index_put_((blocks, within), keys.to(cache.device))
                        places[..., size:].index_put_((blocks, within), values.to(cache.device))
                    else:
                        layer.impl.do_kv_cache_update(
                            layer,
                            keys.contiguous().to(cache.device),
                            values.contiguous().to(cache.device),
                            cache,
                            slots,
                        )
        finally:
            # Also if it was given up in between: what was started still reads the rows.
            brought.note_read(_after_started(first.device))


def _sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return numbers on a device, without waiting for what it does."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def _after_started(device: torch.device) -> torch.cuda.Event | None:
    """Return the event after all that this thread's stream has been given."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _is_known(layer: Any, cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether a cache holds rows ``[n, H, D]`` as they are, keys and values side by side."""
    num_heads, size = rows.shape[1:]
    return (
        layer.attn_backend.get_name() in _KNOWN_BACKENDS
        and cache.dtype == rows.dtype
        and cache.dim() == 4
        and (cache.shape[1], cache.shape[3]) == (num_heads, 2 * size)
    )


def _layer_index(name: str) -> int:
    """Return the number in a layer's name, as in ``model.layers.7.self_attn.attn``."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise EngineError(f"layer {name!r}: expected one number in its name, the layer's index")
    return numbers[0]
