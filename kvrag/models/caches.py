"""Two caches that Hugging Face models use instead of Transformers' own.

`CaptureCache` keeps what a prefill produced, and can continue an earlier one. `FusedCache` lets
generation continue from a fused buffer without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrag.errors import ParameterError
from kvrag.kvcache import FusedKV, packed, unpacked
from kvrag.models.writers import CapturedLayer


class _CaptureLayer(CapturedLayer, CacheLayerMixin):  # type: ignore[no-untyped-call,misc]
    is_sliding = False

    def __init__(self, before: Any | None, check: Callable[[], None] | None) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        CapturedLayer.__init__(self, before, check)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_before + query_length, 0

    def get_max_length(self) -> int:
        return -1


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
                f"{num_rows}: its ids are not as many as its rows (link tokens have none). "
                "Call generate(**fused.to_generate()), or let the cache count "
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
