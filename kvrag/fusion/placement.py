"""Where stored rows on a graphics card belong in a prompt's buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch

from kvrag.native.gpu import tiled
from kvrag.positions.rotary import RotaryTable

_ALIGNED = 16
"""The kernel reads and writes this many channels at once."""

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies numbers to the card, without waiting for it."""


@dataclass(frozen=True)
class Part:
    """Rows of one record that are next to each other in the prompt.

    Attributes
    ----------
    offset
        The record's first element in the staged memory, a multiple of D.
    stride
        Elements from layer to layer, a multiple of D.
    num_tokens
        T of the record: a layer holds keys ``[H, T, D]``, then values.
    first_token, first_row, num_rows
        The rows: from which token of the record on, at which row of the prompt, how many.
    """

    offset: int
    stride: int
    num_tokens: int
    first_token: int
    first_row: int
    num_rows: int


class Placement:
    """Places staged rows: a group of layers of all records in one launch, or with PyTorch in few.

    Parameters
    ----------
    parts
        The rows; they do not overlap.
    keys, values
        ``[L, H, C, D]``, contiguous: the prompt's buffer.
    num_rotated
        The widths of the tables that `place` will get.
    upload
        Called once.
    in_kernel
        Whether the kernel places; None: where it can, and is right.

    Attributes
    ----------
    parts, keys, values
        As given.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        keys: torch.Tensor,
        values: torch.Tensor,
        num_rotated: Collection[int],
        upload: Upload,
        in_kernel: bool | None = None,
    ) -> None:
        self.parts, self.keys, self.values = tuple(parts), keys, values
        self._most_rows = max(part.num_rows for part in parts)
        head_dim = keys.shape[-1]
        self._constants = {"D": head_dim}
        if in_kernel is None:
            in_kernel = (
                not any(width % _ALIGNED for width in (head_dim, *num_rotated))
                and tiled.is_ready("place", keys.dtype, keys.device, **self._constants)
                and is_right(keys.dtype, keys.device, head_dim, frozenset(num_rotated))
            )
        self._in_kernel = in_kernel
        if self._in_kernel:
            numbers = np.array([astuple(part) for part in parts], np.int64)
        else:
            numbers = np.concatenate([_rows_of(part, head_dim) for part in parts], axis=1)
        self._numbers = upload(torch.from_numpy(numbers))

    def place(
        self, staged: torch.Tensor, num_skipped: int, layers: range, table: RotaryTable
    ) -> None:
        """Place some layers, which have one table.

        Parameters
        ----------
        staged
            The staged memory, one-dimensional, of the buffer's type, aligned to 16 bytes.
        num_skipped
            How many layers of each record are staged before the first of `layers`.
        layers
            The layers of the buffer.
        table
            Rotates their keys.
        """
        place = self._start if self._in_kernel else self._compute
        place(staged, num_skipped, layers, table)

    def _start(
        self, staged: torch.Tensor, num_skipped: int, layers: range, table: RotaryTable
    ) -> None:
        num_heads, capacity, _ = self.keys.shape[1:]
        device = self.keys.device
        block = tiled.tiling_of("place", device, **self._constants)["BT"]
        tiled.start(
            "place",
            (-(-self._most_rows // block), len(self.parts), len(layers) * num_heads),
            staged,
            self._numbers,
            table.cos.contiguous(),
            table.sin.contiguous(),
            self.keys,
            self.values,
            num_skipped,
            layers.start,
            num_heads,
            table.cos.shape[-1],
            capacity,
            dtype=self.keys.dtype,
            device=device,
            **self._constants,
        )

    def _compute(
        self, staged: torch.Tensor, num_skipped: int, layers: range, table: RotaryTable
    ) -> None:
        _, num_heads, _, head_dim = self.keys.shape
        device = self.keys.device
        first, stride, num_tokens, rows = self._numbers
        local = torch.arange(num_skipped, num_skipped + len(layers), device=device)
        # Keys of all heads, then values of all heads.
        heads = torch.arange(2 * num_heads, device=device)
        at = first + local[:, None, None] * stride + heads[:, None] * num_tokens
        shape = (len(layers), 2, num_heads, len(rows), head_dim)
        taken = staged.view(-1, head_dim).index_select(0, at.flatten()).view(shape)
        into = slice(layers.start, layers.stop)
        placed = torch.empty_like(taken[:, 0])
        table.place(taken[:, 0], rows, placed)
        self.keys[into].index_copy_(2, rows, placed)
        self.values[into].index_copy_(2, rows, taken[:, 1])


def is_right(
    dtype: torch.dtype, device: torch.device, head_dim: int, num_rotated: frozenset[int]
) -> bool:
    """Return whether the kernel places as PyTorch does here; tried once for each kind."""
    return tiled.is_trusted(
        "placing",
        dtype,
        device,
        head_dim,
        num_rotated,
        error=lambda: max(_difference(dtype, device, head_dim, one) for one in num_rotated),
    )


@torch.no_grad()
def _difference(dtype: torch.dtype, device: torch.device, head_dim: int, num_rotated: int) -> float:
    """Return how far the kernel is from PyTorch, over some rows of two records."""
    made, num_heads = torch.Generator().manual_seed(0), 2
    parts, offset, row = [], 0, 2
    for num_tokens, first, num_rows in ((90, 3, 80), (5, 0, 5)):
        stride = 2 * num_heads * num_tokens * head_dim
        parts.append(Part(offset, stride, num_tokens, first, row, num_rows))
        offset, row = offset + 3 * stride, row + num_rows + 1
    staged = torch.randn(offset, generator=made).to(device, dtype)
    angles = torch.randn(row, num_rotated // 2, generator=made).repeat(1, 2).to(device)
    table = RotaryTable(angles.cos(), angles.sin())
    results = []
    for in_kernel in (True, False):
        keys, values = torch.zeros(2, 3, num_heads, row + 3, head_dim, dtype=dtype, device=device)
        placement = Placement(
            parts, keys, values, (num_rotated,), lambda one: one.to(device, copy=True), in_kernel
        )
        placement.place(staged, 1, range(1, 3), table)
        results.append((keys, values))
    return max(tiled.distance(*pair) for pair in zip(*results, strict=True))


def _rows_of(part: Part, head_dim: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return ``[4, n]``: for each row its first vector in staged memory, strides of layers and
    heads in vectors, and its row in the prompt.
    """
    at = np.arange(part.num_rows)
    return np.stack(
        [
            part.offset // head_dim + part.first_token + at,
            np.full_like(at, part.stride // head_dim),
            np.full_like(at, part.num_tokens),
            part.first_row + at,
        ]
    )
