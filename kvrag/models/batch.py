"""One row for each of several prompts in one call of a layer, as in decoding.

A layer's matrices are read once for all rows. Each row is written to its own prompt's buffer and
attends to the keys there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrag.errors import UnsupportedModelError
from kvrag.kvcache import FusedKV
from kvrag.models.attention import RowMask, attend_rows
from kvrag.models.families import Chunked
from kvrag.models.implementations import AttentionCall, OwnMask
from kvrag.models.writers import write_rows
from kvrag.native.attention import ATTENTION_TYPES, Buffers, attend_each

# A captured step attends to whole blocks of keys, of which the last are masked.
KEY_BLOCK = 1024


@dataclass(frozen=True)
class BatchRow:
    """The next row of a prompt.

    Attributes
    ----------
    fused
        The prompt's buffer.
    addresses
        The buffer's `FusedKV.addresses`.
    place
        Which of the buffer's rows it is; those before it are filled.
    position
        Its position.
    """

    fused: FusedKV
    addresses: list[list[int]]
    place: int
    position: int


class BatchRows(OwnMask):
    """Mask and cache of one step of a batch, for all layers.

    Parameters
    ----------
    rows
        The prompts' rows; no two have the same buffer.
    windows
        Each layer's sliding window in tokens, None if it sees everything.
    at
        ``[2, B]``: places and positions, in the device's memory, if the step is to be captured:
        what it computes then depends on them, and not on those in `rows`.
    ends
        Required with `at`: for each row, the end of the keys that it attends to, those after it
        masked. Its place is in the last block of `KEY_BLOCK` keys.

    Attributes
    ----------
    positions
        ``[B]``: the rows' positions.
    in_kernel
        Whether a compiled kernel can write and attend to the rows.
    addresses, capacities, places
        ``[2, L, B]``, ``[B]`` and ``[B]`` int64 for that kernel: where each layer's keys and values
        are, and the rows' capacities and places. Absent unless `in_kernel`.
    """

    def __init__(
        self,
        rows: Sequence[BatchRow],
        windows: Sequence[int | None],
        at: torch.Tensor | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self._rows = rows
        self._windows = windows
        self._layer_index = 0
        self._shapes: tuple[torch.Size, torch.Size] | None = None
        first = rows[0].fused.storage
        device = first.device
        self._ends = ends
        if at is None:
            at = torch.tensor([[row.place, row.position] for row in rows], device=device).T
        self._at, self.positions = at
        self.in_kernel = device.type == "cpu" and first.dtype in ATTENTION_TYPES
        if self.in_kernel:
            addresses = [row.addresses for row in rows]
            self.addresses = np.ascontiguousarray(np.array(addresses).transpose(1, 2, 0))
            self.capacities = np.array([row.fused.capacity for row in rows])
            self.places = np.array([row.place for row in rows])

    def get_seq_length(self, *_: Any) -> int:
        """Return 0, as a cache whose mask is complete."""
        return 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' own K/V ``[1, H, B, D]``; `attend` writes them."""
        self._layer_index, self._shapes = layer_idx, (key_states.shape, value_states.shape)
        return key_states, value_states

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write each row to its buffer, and return what the rows gather ``[1, B, heads, D]``."""
        layer_index, window = self._layer_index, self._windows[self._layer_index]
        query, key, value = call.query, call.key, call.value
        if (key.shape, value.shape) != self._shapes:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends to other keys and values than it keeps in "
                "the cache, so rows of several prompts cannot be computed together"
            )
        if call.in_kernel and self.in_kernel and not isinstance(window, Chunked):
            keys, values = self.addresses[:, layer_index]
            buffers = Buffers(keys, values, self.capacities, self.places)
            scores = call.scores._replace(window=window)
            return attend_each(query[0], key[0], value[0], buffers, scores)[None]
        outputs = []
        for number, row in enumerate(self._rows):
            one = slice(number, number + 1)
            place = self._at[one]
            own_keys, own_values = row.fused.keys[layer_index], row.fused.values[layer_index]
            write_rows(own_keys[0], own_values[0], place, key[0, :, one], value[0, :, one], None)
            if self._ends:
                end = self._ends[number]
                least = (end - 1) // KEY_BLOCK * KEY_BLOCK + 1
            else:
                least = end = row.place + 1
            first = 0 if window is None else max(0, least - window)
            seen = own_keys[:, :, first:end], own_values[:, :, first:end]
            alone = call._replace(query=query[:, :, one], key=seen[0], value=seen[1])
            outputs.append(attend_rows(alone, RowMask(place, first, window)))
        return torch.cat(outputs, dim=1)
