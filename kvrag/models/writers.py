"""What decoder layers use instead of Transformers' caches, without importing Transformers.

`CapturedKV` keeps what a prefill produced, and can continue an earlier one. `RowWriter` scatters
the K/V of selected rows into a fused buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import torch

from kvrag.kvcache import FusedKV, packed, unpacked

# Transformers 5.24 renamed it; earlier versions know only the old name.
CACHE_ARGUMENT = (
    "cache"
    if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)
    else "past_key_values"
)
"""What models and their outputs call a cache."""


class Captured(Protocol):
    """The K/V of one forward pass over whole sequences, all layers, nothing dropped."""

    layers: list[Any]


class CapturedLayer:
    """Remembers one layer's K/V of a forward pass, and of the pass that it continues."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, before: CapturedLayer | None, check: Callable[[], None] | None) -> None:
        self._check = check
        self._before = before
        self._num_before = 0 if before is None else before.keys.shape[2]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember and return K/V ``[B, H, n, D]``, after those of the pass before."""
        if self._check is not None:
            self._check()
        if self._before is not None:
            key_states = _joined(self._before.keys, key_states)
            value_states = _joined(self._before.values, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return how many tokens the pass before had."""
        return self._num_before


def _joined(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return K/V ``[1, H, P, D]`` of one sequence, followed in each by K/V ``[B, H, n, D]``."""
    return torch.cat([before.expand(after.shape[0], -1, -1, -1), after], dim=2)


class CapturedKV:
    """`Captured`, for kvrag's own layers (`kvrag.models.decoders`)."""

    def __init__(
        self, num_layers: int, before: Captured | None, check: Callable[[], None] | None
    ) -> None:
        earlier: list[Any] = [None] * num_layers if before is None else before.layers
        self.layers = [CapturedLayer(layer, check) for layer in earlier]

    def get_seq_length(self) -> int:
        """Return how many tokens the pass before had."""
        return self.layers[0].get_seq_length()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember a layer's K/V."""
        return self.layers[layer_idx].update(key_states, value_states)


class ProjectionDone(Exception):  # noqa: N818  # control flow, not an error
    """Leaves a decoder layer once its K/V are known, before its attention and MLP run."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values


class ProjectionProbe:
    """A cache whose update ends the layer's forward with `ProjectionDone`."""

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: nothing is kept."""
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise ProjectionDone(key_states, value_states)


@dataclass(frozen=True)
class Deviation:
    """Distance of fresh K/V from the K/V that they replace, row by row.

    Attributes
    ----------
    keys, values
        ``[n]`` float32: squared L2 distance over heads and channels (CacheBlend §4.1).
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Deviation:
        """Return a `Deviation` with nothing noted yet."""
        return cls(*torch.zeros(2, num_rows, device=device))

    def __getitem__(self, rows: torch.Tensor | slice) -> Deviation:
        """Return the deviation of some rows; for a slice, a view."""
        return Deviation(self.keys[rows], self.values[rows])

    def note(
        self,
        stored_keys: torch.Tensor,
        stored_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Fill in the distances of all rows, from K/V ``[H, n, D]``."""
        self.keys.copy_((keys.float() - stored_keys.float()).square().sum(dim=(0, 2)))
        self.values.copy_((values.float() - stored_values.float()).square().sum(dim=(0, 2)))


RowsChanged = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes positions ``[n]`` of rows just written, and how far their placed keys and their values
``[H, n, D]`` moved. It may change the buffer's other rows before anything attends to them.
"""


def write_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    changed: RowsChanged | None,
) -> None:
    """Write rows ``[n]`` of a layer's K/V ``[H, C, D]``, and say how far they moved if asked."""
    moved = None
    if changed is not None:
        moved = new_keys - keys[:, rows], new_values - values[:, rows]
    keys.index_copy_(1, rows, new_keys)
    values.index_copy_(1, rows, new_values)
    if changed is not None and moved is not None:
        changed(rows, *moved)


class RowWriter:
    """A cache for one call of one layer: writes selected rows, returns the keys they may see.

    Parameters
    ----------
    fused
        The buffer written to.
    rows
        ``[n]`` ascending positions of the rows in this call.
    shown
        The positions of the keys returned.
    deviation
        Where to note the distance of the rows written from the rows they replace; None: nowhere.
    writes
        False leaves the buffer as it is: the rows attend to its present K/V.
    changed
        Called after the rows are written, with how far they moved; None: nobody asks.
    """

    def __init__(
        self,
        fused: FusedKV,
        rows: torch.Tensor,
        shown: slice,
        deviation: Deviation | None = None,
        writes: bool = True,
        changed: RowsChanged | None = None,
    ) -> None:
        self._writes = writes
        self._changed = changed
        self._fused = fused
        self._rows = rows
        self._shown = shown
        self._deviation = deviation

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: MPT uses it to cut a bias that is cut already."""
        return 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._fused.keys[layer_idx], self._fused.values[layer_idx]
        latent = self._fused.spec.latent
        key_states, value_states = packed(latent, key_states, value_states)
        if self._deviation is not None:
            self._deviation.note(
                keys[0, :, self._rows], values[0, :, self._rows], key_states[0], value_states[0]
            )
        if self._writes:
            write_rows(
                keys[0], values[0], self._rows, key_states[0], value_states[0], self._changed
            )
        return unpacked(latent, keys[:, :, self._shown], values[:, :, self._shown])
