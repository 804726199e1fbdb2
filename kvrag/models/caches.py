"""Three caches that Hugging Face layers use instead of Transformers' caches.

`CaptureCache` keeps what a prefill produced, and can continue an earlier one. `RowWriter` scatters
the K/V of selected rows into a fused buffer. `FusedCache` lets generation continue from that buffer
without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvrag.errors import ParameterError
from kvrag.kvcache import FusedKV, packed, unpacked

# Transformers 5.24 renamed it; earlier versions know only the old name.
CACHE_ARGUMENT = (
    "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
)
"""What models and their outputs call a cache."""


class _CaptureLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Remembers one layer's K/V of a forward pass, and of the pass that it continues."""

    is_sliding = False

    def __init__(self, before: Any | None, check: Callable[[], None] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check
        self._before = before
        self._num_before = 0 if before is None else before.keys.shape[2]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._check is not None:
            self._check()
        if self._before is not None:
            key_states = _joined(self._before.keys, key_states)
            value_states = _joined(self._before.values, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_before + query_length, 0

    def get_seq_length(self) -> int:
        return self._num_before

    def get_max_length(self) -> int:
        return -1


def _joined(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return K/V ``[1, H, P, D]`` of one sequence, followed in each by K/V ``[B, H, n, D]``."""
    return torch.cat([before.expand(after.shape[0], -1, -1, -1), after], dim=2)


class CaptureCache(Cache):
    """The K/V of one forward pass over whole sequences, all layers, nothing dropped.

    Transformers' own dynamic cache would drop whatever is outside a sliding window.

    Parameters
    ----------
    num_layers
        Number of layers.
    before
        The cache of one sequence that all sequences of this pass continue; None: they begin here.
    check
        Called in each layer; an error that it raises ends the pass.
    """

    def __init__(
        self,
        num_layers: int,
        before: CaptureCache | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        earlier: list[Any] = [None] * num_layers if before is None else list(before.layers)
        super().__init__(layers=[_CaptureLayer(layer, check) for layer in earlier])


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
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
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
        *args: Any,
        **kwargs: Any,
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


class _FusedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    is_sliding = False
    is_croppable = True

    def __init__(self, fused: FusedKV, layer_index: int, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fused = fused
        self._layer_index = layer_index
        self._num_tokens = num_tokens
        self._num_left = max(0, fused.num_tokens - num_tokens)
        self.is_initialized = True
        self._show()

    def _show(self) -> None:
        self.keys = self._fused.keys[self._layer_index][:, :, : self._num_tokens]
        self.values = self._fused.values[self._layer_index][:, :, : self._num_tokens]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffer exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[0] != 1:
            raise ParameterError(
                f"a fused prompt continues one sequence, found a batch of {key_states.shape[0]}: "
                "generate without beams and with num_return_sequences=1"
            )
        latent = self._fused.spec.latent
        key_states, value_states = packed(latent, key_states, value_states)
        num_rows = key_states.shape[2]
        if self._num_left and num_rows > self._num_left:
            raise ParameterError(
                f"a fused prompt of which {self._num_left} rows are left to compute was given "
                f"{num_rows}: its ids are not as many as its rows (link tokens and compressed "
                "chunks have none). Call generate(**fused.to_generate()), or let the cache count "
                "all rows and give what follows them"
            )
        self._num_left = max(0, self._num_left - num_rows)
        end = self._num_tokens + num_rows
        if end > self._fused.keys[self._layer_index].shape[2]:
            self._grow(end)
        written = slice(self._num_tokens, end)
        self._fused.keys[self._layer_index][:, :, written] = key_states
        self._fused.values[self._layer_index][:, :, written] = value_states
        self._num_tokens = end
        self._show()
        assert self.keys is not None
        assert self.values is not None
        return unpacked(latent, self.keys, self.values)

    def _grow(self, needed: int) -> None:
        # Only a caller that generates beyond the capacity it requested pays for this copy.
        for tensors in (self._fused.keys, self._fused.values):
            old = tensors[self._layer_index]
            shape = (*old.shape[:2], max(needed, 2 * old.shape[2]), old.shape[3])
            new = old.new_empty(shape)
            new[:, :, : self._num_tokens] = old[:, :, : self._num_tokens]
            tensors[self._layer_index] = new

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (Transformers passes a negative count)."""
        self._num_tokens -= abs(tokens_to_remove)
        self._show()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self._num_tokens

    def get_max_length(self) -> int:
        return -1


class FusedCache(Cache):
    """A Transformers cache over a `FusedKV`: new tokens are written in place, nothing is copied.

    Parameters
    ----------
    fused
        The buffer; the cache grows into its spare capacity.
    num_tokens
        How many of its rows count as cached. ``fused.num_tokens - 1`` leaves the last prompt
        token to the engine, which then computes the first logits itself; for Transformers'
        ``generate``, `kvrag.fusion.fuser.FusedPrompt.to_generate` returns the matching ids.
    """

    def __init__(self, fused: FusedKV, num_tokens: int) -> None:
        super().__init__(
            layers=[_FusedLayer(fused, i, num_tokens) for i in range(fused.spec.num_layers)]
        )
