"""A decoder layer's operations over rows of one prompt, besides products of matrices.

`RowKernels` starts the kernels of ``cuda/triton/rows.py``. `RowTensors` computes the same in
PyTorch: it says what the kernels compute, and is compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.functional import gelu, silu

from kvrag.native.attention import Scores
from kvrag.native.gpu.tiled import start, tiling_of

MOST_SPLITS = 16
"""Into how many parts a row's keys are split at most."""
MOST_TABLES = 2
"""Tables of cosines and sines that the layers of a model may have."""
# Programs that keep a card busy: some for each of its processors.
_PROGRAMS = 264


QKV: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Norm(NamedTuple):
    """Weights of a norm, its epsilon, and whether it adds 1 to its weights."""

    weight: torch.Tensor
    epsilon: float
    adds_one: bool


@dataclass
class RowPlaces:
    """Where rows of a prompt belong, and what they attend to.

    Attributes
    ----------
    positions
        ``[B]`` int64: the rows' places in the buffer, ascending; those from `num_rows` on mean
        nothing.
    num_rows
        How many there are.
    tables
        Cosines and sines ``[N, D]`` float32 of the buffer's rows, at most two.
    keys, values
        ``[L, H, C, D]``, each contiguous.
    last
        The last row's place.
    mass
        ``[M, N]`` float32: what each key gets in each layer, to be added to; None: nobody asks.
    first_counted
        The first of the rows whose attention counts there.
    first_mass
        The layer of the mass's first row.
    """

    positions: torch.Tensor
    num_rows: int
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]]
    keys: torch.Tensor
    values: torch.Tensor
    last: int
    mass: torch.Tensor | None = None
    first_counted: int = 0
    first_mass: int = 0

    def state(self) -> list[int]:
        """Return what kernels read (``cuda/triton/rows.py``)."""
        num_layers, _, capacity, _ = self.keys.shape
        mass, num_keys = (0, 0), self.last + 1
        if self.mass is not None:
            row = self.mass.stride(0)
            # Where layer 0's would be.
            mass = self.mass.data_ptr() - 4 * row * self.first_mass, row
            num_keys = min(num_keys, self.mass.shape[1])
        numbers = [self.num_rows, capacity, self.first_counted, num_keys, *mass]
        for index in range(MOST_TABLES):
            numbers += [part.data_ptr() for part in self.tables[min(index, len(self.tables) - 1)]]
        firsts = self.keys.data_ptr(), self.values.data_ptr()
        size = self.keys.stride(0) * self.keys.itemsize
        return numbers + [first + index * size for index in range(num_layers) for first in firsts]


class RowTensors:
    """Operations over rows ``[B, width]`` in PyTorch; they may leave rows that mean nothing."""

    def __init__(self, places: RowPlaces) -> None:
        self._places = places

    def norm(self, rows: torch.Tensor, norm: Norm, out: torch.Tensor, *, adds: bool) -> None:
        """Write each row's norm to `out`, or add it there."""
        made = _normed(rows, norm)
        out.copy_(out + made if adds else made)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, is_gelu: bool) -> None:
        """Write the activation of one slot times another; `out` may be either."""
        opened = gelu(gate, approximate="tanh") if is_gelu else silu(gate)
        torch.mul(opened, up, out=out)

    def rotate(
        self, qkv: QKV, norms: tuple[Norm, Norm] | None, layer: int, table: int, head_dim: int
    ) -> None:
        """Norm and rotate queries in place, and write keys, so treated, and values to the buffer.

        Keys and values are not used afterwards.
        """
        places = self._places
        rows = slice(0, places.num_rows)
        at = places.positions[rows]
        # [n, heads, D], views of the slots
        query, key, value = (part.view(len(part), -1, head_dim)[rows] for part in qkv)
        if norms is not None:
            query.copy_(_normed(query, norms[0]))
            key = _normed(key, norms[1])
        cos, sin = (part[at, None, : head_dim // 2] for part in places.tables[table])
        query.copy_(_rotated(query, cos, sin))
        places.keys[layer][:, at] = _rotated(key, cos, sin).transpose(0, 1)
        places.values[layer][:, at] = value.transpose(0, 1)

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, layer: int, scores: Scores, head_dim: int
    ) -> None:
        """Write to `out` what rows gather from the buffer's rows up to their own."""
        weights, values = self._weights(query, layer, scores, head_dim)
        gathered = (weights.flatten(1, 2) @ values).view(*weights.shape[:3], head_dim)
        # [H, G, n, D] -> [n, H * G * D]
        out[: self._places.num_rows] = gathered.permute(2, 0, 1, 3).flatten(1).to(out.dtype)

    def mass(self, query: torch.Tensor, layer: int, scores: Scores, head_dim: int) -> None:
        """Add to the mass what keys got in the `attend` before, times their values' norms."""
        places = self._places
        assert places.mass is not None
        weights, values = self._weights(query, layer, scores, head_dim)
        taken = weights[:, :, places.first_counted :].sum((1, 2)) * values.norm(dim=-1)
        into = places.mass[layer - places.first_mass, : places.last + 1]
        into += taken.sum(0)[: len(into)]

    def _weights(
        self, query: torch.Tensor, layer: int, scores: Scores, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 weights ``[H, G, n, K]`` and values ``[H, K, D]``."""
        places = self._places
        seen, rows = slice(0, places.last + 1), slice(0, places.num_rows)
        keys, values = (kv[layer][:, seen].float() for kv in (places.keys, places.values))
        asked = query.view(len(query), len(keys), -1, head_dim)[rows].permute(1, 2, 0, 3).float()
        found = (asked.flatten(1, 2) @ keys.transpose(1, 2)).view(*asked.shape[:3], -1)
        found = found * scores.scale
        if scores.softcap:
            found = torch.tanh(found / scores.softcap) * scores.softcap
        at = places.positions[rows, None]
        key = torch.arange(places.last + 1, device=at.device)
        allowed = key <= at
        if scores.window is not None:
            allowed &= key > at - scores.window
        return found.masked_fill(~allowed, -math.inf).softmax(-1), values


class RowKernels:
    """What `RowTensors` does, by kernels.

    Parameters
    ----------
    positions
        ``[B]`` int64: the rows' places, which may change between calls.
    state
        `RowPlaces.state`, on the card; it may change between calls.
    dtype
        The type of all slots, weights, keys and values.
    num_heads
        Query heads and key heads.
    most_splits
        Into how many parts a row's keys are split at most.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        state: torch.Tensor,
        dtype: torch.dtype,
        num_heads: tuple[int, int],
        most_splits: int = MOST_SPLITS,
    ) -> None:
        self._positions, self._state = positions, state
        self._dtype, self._device = dtype, positions.device
        self._most_rows, self._most_splits = len(positions), most_splits
        self._asked, self._given = num_heads
        self._lse = torch.empty(self._asked, self._most_rows, device=self._device)
        self._partial: torch.Tensor | None = None
        # One for each tile of rows and key head; kernels leave them at 0.
        most_tiles = self._most_rows * self._asked // self._given + 1
        self._counters = torch.zeros(
            most_tiles * self._given, dtype=torch.int32, device=self._device
        )

    def norm(self, rows: torch.Tensor, norm: Norm, out: torch.Tensor, *, adds: bool) -> None:
        width = rows.shape[-1]
        given = rows, norm.weight, out, self._state, width, norm.epsilon
        flags = {"ADDS_ONE": int(norm.adds_one), "ADDS": int(adds)}
        self._start("norm", (self._most_rows,), *given, **flags)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, is_gelu: bool) -> None:
        tiling = tiling_of("gated", self._device, GELU=int(is_gelu))
        grid = (-(-gate.numel() // tiling["BLOCK"]),)
        self._start("gated", grid, gate, up, out, self._state, gate.shape[-1], GELU=int(is_gelu))

    def rotate(
        self, qkv: QKV, norms: tuple[Norm, Norm] | None, layer: int, table: int, head_dim: int
    ) -> None:
        flags = {"NORMS": int(norms is not None), "ADDS_ONE": 0, "D": head_dim}
        weights, epsilon = (qkv[0], qkv[1]), 0.0
        if norms is not None:
            weights, epsilon = (norms[0].weight, norms[1].weight), norms[0].epsilon
            flags["ADDS_ONE"] = int(norms[0].adds_one)
        block = tiling_of("rotate", self._device, **flags)["BT"]
        grid = -(-self._most_rows // block), self._asked + 2 * self._given
        numbers = layer, table, self._asked, self._given, epsilon
        self._start("rotate", grid, *qkv, *weights, self._positions, self._state, *numbers, **flags)

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, layer: int, scores: Scores, head_dim: int
    ) -> None:
        flags = {"D": head_dim, "SOFTCAP": int(bool(scores.softcap))}
        group = self._asked // self._given

        def num_tiles(whole: int) -> int:
            # Tiles whose keys are split may have fewer rows.
            block = tiling_of("attend", self._device, **flags, WHOLE=whole)["BM"]
            return -(-self._most_rows * group // block)

        splits = min(self._most_splits, num_splits(num_tiles(1) * self._given))
        whole = int(splits == 1)
        partial = counters = self._counters
        if splits > 1:
            shape = (splits, self._asked, self._most_rows, head_dim + 16)
            if self._partial is None or self._partial.shape != shape:
                self._partial = torch.empty(shape, device=self._device)
            partial = self._partial
        given = query, self._positions, self._state, out, self._lse, partial, counters
        numbers = layer, self._asked, group, self._most_rows, *scores.numbers()
        grid = num_tiles(whole), self._given, splits
        self._start("attend", grid, *given, *numbers, **flags, WHOLE=whole)

    def mass(self, query: torch.Tensor, layer: int, scores: Scores, head_dim: int) -> None:
        group = self._asked // self._given
        given = query, self._positions, self._state, self._lse
        numbers = layer, self._asked, self._given, group, self._most_rows, *scores.numbers()
        flags = {"D": head_dim, "SOFTCAP": int(bool(scores.softcap))}
        self._start("mass", (_PROGRAMS,), *given, *numbers, **flags)

    def _start(
        self, name: str, grid: tuple[int, ...], *given: torch.Tensor | float, **constants: int
    ) -> None:
        start(name, grid, *given, dtype=self._dtype, device=self._device, **constants)


RowOperations: TypeAlias = RowTensors | RowKernels


def num_splits(num_programs: int) -> int:
    """Return into how many parts keys are split, if this many programs have the rows."""
    # A few programs too few cost less than the launch that joins splits.
    if 2 * num_programs > _PROGRAMS:
        return 1
    return min(MOST_SPLITS, -(-_PROGRAMS // num_programs))


def _normed(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    numbers = rows.float()
    numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.adds_one:
        return (numbers * (1.0 + norm.weight.float())).to(rows.dtype)
    return norm.weight * numbers.to(rows.dtype)


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads ``[n, heads, D]`` rotated by angles ``[n, 1, D / 2]``."""
    first, second = rows.float().chunk(2, dim=-1)
    made = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return made.to(rows.dtype)
