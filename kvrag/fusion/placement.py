"""Where stored rows on a graphics card belong in a prompt's buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvrag.native.gpu import tiled
from kvrag.positions.rotary import RotaryTable

_ALIGNED = 16
"""The kernel reads and writes this many channels at once."""

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies numbers to the card, without waiting for it."""


class Part(NamedTuple):
    """Rows of one record that are next to each other in the prompt.

    Attributes
    ----------
    memory
        The record's layers, one-dimensional, of the buffer's type, aligned to 16 bytes.
    offset
        The first element of the record's `first_layer` there, a multiple of D and of 16 bytes.
    stride
        Elements from layer to layer, such a multiple, too.
    first_layer
        The first layer that the memory holds.
    num_tokens
        T of the record: a layer holds keys ``[H, T, D]``, then values.
    first_token, first_row, num_rows
        The rows: from which token of the record on, at which row of the prompt, how many.
    """

    memory: torch.Tensor
    offset: int
    stride: int
    first_layer: int
    num_tokens: int
    first_token: int
    first_row: int
    num_rows: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the kernel reads."""
        offset = self.offset - self.first_layer * self.stride
        address = self.memory.data_ptr() + offset * self.memory.itemsize
        return (
            *(address, self.stride, self.num_tokens),
            *(self.first_token, self.first_row, self.num_rows),
        )


class Placement:
    """Places rows: a group of layers of all records in one launch, or with PyTorch in few.

    Parameters
    ----------
    groups
        For each group of layers the rows, which do not overlap.
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
    groups, keys, values
        As given.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Part]],
        keys: torch.Tensor,
        values: torch.Tensor,
        num_rotated: Collection[int],
        upload: Upload,
        in_kernel: bool | None = None,
    ) -> None:
        self.groups, self.keys, self.values = groups, keys, values
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
            numbers = np.array([one.numbers for parts in groups for one in parts], np.int64)
            self._numbers = upload(torch.from_numpy(numbers))
            return
        # PyTorch looks one memory up after the other.
        self._sources = [
            (number, parts[0], [_rows_of(part, head_dim) for part in parts])
            for number, group in enumerate(groups)
            for parts in _by_memory(group)
        ]
        rows = [one for _, _, some in self._sources for one in some]
        self._numbers = upload(torch.from_numpy(np.concatenate(rows, axis=1)))

    def place(self, number: int, layers: range, table: RotaryTable) -> None:
        """Place some layers of a group, which have one table.

        Parameters
        ----------
        number
            The group.
        layers
            The layers of the buffer, and of the records.
        table
            Rotates their keys.
        """
        place = self._start if self._in_kernel else self._compute
        if self.groups[number]:
            place(number, layers, table)

    def _start(self, number: int, layers: range, table: RotaryTable) -> None:
        num_heads, capacity, _ = self.keys.shape[1:]
        device, parts = self.keys.device, self.groups[number]
        block = tiled.tiling_of("place", device, **self._constants)["BT"]
        before = sum(map(len, self.groups[:number]))
        tiled.start(
            "place",
            (-(-max(one.num_rows for one in parts) // block), len(parts), len(layers) * num_heads),
            self._numbers[before : before + len(parts)],
            table.cos.contiguous(),
            table.sin.contiguous(),
            self.keys,
            self.values,
            layers.start,
            num_heads,
            table.cos.shape[-1],
            capacity,
            dtype=self.keys.dtype,
            device=device,
            **self._constants,
        )

    def _compute(self, number: int, layers: range, table: RotaryTable) -> None:
        end = 0
        for group, first, rows in self._sources:
            begin, end = end, end + sum(one.shape[1] for one in rows)
            if group == number:
                local = range(layers.start - first.first_layer, layers.stop - first.first_layer)
                self._compute_from(first.memory, self._numbers[:, begin:end], local, layers, table)

    def _compute_from(
        self,
        memory: torch.Tensor,
        numbers: torch.Tensor,
        local: range,
        layers: range,
        table: RotaryTable,
    ) -> None:
        _, num_heads, _, head_dim = self.keys.shape
        device = self.keys.device
        first, stride, num_tokens, rows = numbers
        there = torch.arange(local.start, local.stop, device=device)
        # Keys of all heads, then values of all heads.
        heads = torch.arange(2 * num_heads, device=device)
        at = first + there[:, None, None] * stride + heads[:, None] * num_tokens
        shape = (len(layers), 2, num_heads, len(rows), head_dim)
        # The last vector may end before the memory does.
        whole = memory[: len(memory) // head_dim * head_dim].view(-1, head_dim)
        taken = whole.index_select(0, at.flatten()).view(shape)
        into = slice(layers.start, layers.stop)
        placed = torch.empty_like(taken[:, 0])
        table.place(taken[:, 0], rows, placed)
        self.keys[into].index_copy_(2, rows, placed)
        self.values[into].index_copy_(2, rows, taken[:, 1])


def _by_memory(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield parts together that have their layers in the same memory."""
    by_memory: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        by_memory.setdefault((id(part.memory), part.first_layer), []).append(part)
    yield from by_memory.values()


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
    parts, row = [], 2
    # One in separate memory, from layer 0 on, and one whose layer 0 is not there.
    for num_tokens, first, num_rows, held in ((90, 3, 80, 0), (5, 0, 5, 1)):
        stride = 2 * num_heads * num_tokens * head_dim
        memory = torch.randn((3 - held) * stride, generator=made).to(device, dtype)
        parts.append(Part(memory, 0, stride, held, num_tokens, first, row, num_rows))
        row += num_rows + 1
    angles = torch.randn(row, num_rotated // 2, generator=made).repeat(1, 2).to(device)
    table = RotaryTable(angles.cos(), angles.sin())
    results = []
    for in_kernel in (True, False):
        keys, values = torch.zeros(2, 3, num_heads, row + 3, head_dim, dtype=dtype, device=device)
        placement = Placement(
            [parts], keys, values, (num_rotated,), lambda one: one.to(device, copy=True), in_kernel
        )
        placement.place(0, range(1, 3), table)
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
