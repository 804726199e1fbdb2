"""A decoder's layers over few rows: only kernels run between their operations.

For few rows, Python would take as long as the kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError
from kvrag.native.arrays import check_contiguous, check_shape, view
from kvrag.native.attention import (
    ATTENTION_TYPES,
    Mass,
    Scores,
    check_ascending,
    check_places,
    check_scores,
)
from kvrag.native.kernels import kernels
from kvrag.native.linear import GroupedLinear, Int8Linear


class RowLayers:
    """A list of operations, in order, on slots: rows of numbers of one type.

    Slot 0 is the input and the output. Each operation reads slots and writes `to`, another one
    unless it goes number by number. Weights are kept alive, not copied: changes in place count,
    except in 8 bits.

    Parameters
    ----------
    dtype
        Float32 or bfloat16.
    width
        Numbers of a row of slot 0.
    """

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        if dtype not in ATTENTION_TYPES:
            known = ", ".join(map(str, ATTENTION_TYPES))
            raise ParameterError(f"dtype: expected {known}, found {dtype}")
        self._dtype = dtype
        self._widths = [width]
        self._kept: list[object] = []
        # For each layer, its key heads and their length.
        self._heads: list[tuple[int, int]] = []
        self._heads_added = 0, 0
        # For each table, the smallest heads that it rotates.
        self._smallest_heads: list[int] = []
        self._layers = kernels.Layers(dtype == torch.bfloat16, width)

    def add_slot(self, width: int) -> int:
        """Return the number of a new slot."""
        self._widths.append(width)
        return self._layers.add_slot(width)

    def linear(self, source: int, to: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Add a linear layer; the result of each row is that of `FewRowsLinear`."""
        self._check(source, to)
        kept = self._keep(weight, (self._widths[to], self._widths[source]), "weight")
        added = 0 if bias is None else self._keep(bias, (self._widths[to],), "bias")
        self._layers.linear(source, to, kept, added)

    def quantised_linear(self, source: int, to: int, layer: Int8Linear | GroupedLinear) -> None:
        """Add a linear layer in 8 bits, or by groups."""
        self._check(source, to)
        check_shape(layer.shape, (self._widths[to], self._widths[source]), "layer")
        self._kept.append(layer)
        if isinstance(layer, GroupedLinear):
            self._layers.grouped_linear(source, to, layer.kernel)
            return
        weight, scale, bias = (part.data_ptr() for part in layer.parts)
        self._layers.int8_linear(source, to, weight, scale, bias)

    def norm(
        self, source: int, to: int, weight: torch.Tensor, epsilon: float, *, adds_one: bool
    ) -> None:
        """Add a norm of rows, or of their parts of the weight's length; see `rms_norm`."""
        self._check(source, to)
        self._check_equal(source, to)
        kept = self._keep(weight, (None,), "weight")
        width = len(weight)
        if not width or self._widths[source] % width:
            raise ParameterError(f"weight: expected a divisor of {self._widths[source]} weights")
        self._layers.norm(source, to, kept, width, epsilon, adds_one)

    def gate(self, gate: int, up: int, to: int, *, is_gelu: bool) -> None:
        """Add an activation of one slot times another; see `gated`."""
        self._check_equal(gate, up, to)
        self._layers.gate(gate, up, to, is_gelu)

    def add(self, one: int, other: int, to: int) -> None:
        """Add a sum of two slots."""
        self._check_equal(one, other, to)
        self._layers.add(one, other, to)

    def rotate(self, source: int, to: int, table: int, head_dim: int) -> None:
        """Add a rotation of heads by the angles of a table; see `rotate`."""
        self._check(source, to)
        self._check_equal(source, to)
        if head_dim < 1 or self._widths[source] % head_dim:
            raise ParameterError(f"head_dim: expected a divisor of {self._widths[source]}")
        known = self._smallest_heads
        known += [head_dim] * (table + 1 - len(known))
        known[table] = min(known[table], head_dim)
        self._layers.rotate(source, to, table, head_dim)

    def attend(
        self,
        query: int,
        key: int,
        value: int,
        to: int,
        head_dim: int,
        scores: Scores,
    ) -> None:
        """Add attention to the keys of each row's own prompt, or of the prompt of all rows.

        See `attend_each` and `attend`. A layer has at most one.
        """
        check_scores(scores)
        self._check(query, to)
        self._check_equal(query, to)
        self._check_equal(key, value)
        asked, given = self._widths[query], self._widths[key]
        if head_dim < 1 or given < head_dim or given % head_dim or asked % given:
            raise ParameterError(f"slots of {asked} and {given}: expected heads of {head_dim}")
        if self._heads_added != (0, 0):
            raise ParameterError("attend: expected a layer to attend once, found twice")
        self._heads_added = given // head_dim, head_dim
        self._layers.attend(query, key, value, to, given // head_dim, head_dim, *scores.numbers())

    def end_layer(self) -> None:
        """End a layer: what was added since the last one. What no layer ends is not computed."""
        self._heads.append(self._heads_added)
        self._heads_added = 0, 0
        self._layers.end_layer()

    def run(
        self,
        hidden: torch.Tensor,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        addresses: NDArray[np.int64],
        capacities: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> None:
        """Replace a row of each prompt by what all layers make of it, with PyTorch's threads.

        Parameters
        ----------
        hidden
            ``[n, width]``, contiguous.
        tables
            For each table cosines and sines ``[n, R]`` float32, contiguous.
        addresses
            ``[2, L, n]``: where each layer's keys and values of each row's buffer are.
        capacities, places
            ``[n]``; see `Buffers`.
        """
        num_rows = self._check_rows(hidden, len(places))
        if len(tables) != len(self._smallest_heads):
            raise ParameterError(
                f"tables: expected {len(self._smallest_heads)}, found {len(tables)}"
            )
        for table, most in zip(tables, self._smallest_heads, strict=True):
            _check_table(table, num_rows, most)
        shape = (2, len(self._heads), num_rows)
        view(addresses, "addresses", np.int64, shape, contiguous=True)
        check_places(
            view(capacities, "capacities", np.int64, (num_rows,), contiguous=True),
            view(places, "places", np.int64, (num_rows,), contiguous=True),
        )
        self._layers.run(
            hidden.data_ptr(),
            [cos.numpy() for cos, _ in tables],
            [sin.numpy() for _, sin in tables],
            addresses[0],
            addresses[1],
            capacities,
            places,
            torch.get_num_threads(),
        )

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        kv: tuple[torch.Tensor, torch.Tensor],
        places: NDArray[np.int64],
        mass: Mass | None = None,
    ) -> None:
        """Replace rows of one prompt by what a layer makes of them, with PyTorch's threads.

        Parameters
        ----------
        layer
            Its number.
        hidden
            ``[n, width]``, contiguous.
        table
            The rows' cosines and sines ``[n, R]`` float32, contiguous, for any table of the layer.
        kv
            Keys and values ``[H, K, D]``, of the rows' type, each head contiguous: the rows' own
            are written there.
        places
            ``[n]``, ascending: where. A row sees the keys up to there.
        mass
            Where to write what keys get; None: nowhere.
        """
        if not 0 <= layer < len(self._heads):
            raise ParameterError(f"layer {layer}: expected one of {len(self._heads)}")
        num_rows = self._check_rows(hidden, len(places))
        _check_table(table, num_rows, min(self._smallest_heads, default=0))
        num_heads, head_dim = self._heads[layer]
        keys, values = kv
        check_shape(keys.shape, (num_heads, None, head_dim), "keys")
        check_shape(values.shape, tuple(keys.shape), "values")
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.stride() != (keys.stride(0), head_dim, 1):
                raise ParameterError(
                    f"{name}: expected equal strides of contiguous heads, found {tensor.stride()}"
                )
            if tensor.dtype != self._dtype or tensor.device.type != "cpu":
                raise ParameterError(
                    f"{name}: expected {self._dtype} on the CPU, found {tensor.dtype} on "
                    f"{tensor.device}"
                )
        num_keys = keys.shape[1]
        check_ascending(places, "places", num_rows, num_keys, distinct=True)
        taken, first_counted = None, 0
        if mass is not None:
            shape = (num_heads, num_keys)
            taken = view(mass.out, "mass", np.float32, shape, contiguous=True, writable=True)
            first_counted = mass.first_row
        cos, sin = table
        self._layers.run_layer(
            layer,
            hidden.data_ptr(),
            cos.numpy(),
            sin.numpy(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            num_keys,
            places,
            taken,
            first_counted,
            torch.get_num_threads(),
        )

    def _check_rows(self, hidden: torch.Tensor, num_rows: int) -> int:
        check_shape(hidden.shape, (num_rows, self._widths[0]), "hidden")
        check_contiguous(hidden, "hidden", self._dtype)
        return num_rows

    def _check(self, source: int, to: int) -> None:
        if source == to:
            raise ParameterError(f"slot {to}: expected another one than the operation reads")

    def _check_equal(self, *slots: int) -> None:
        widths = [self._widths[slot] for slot in slots]
        if len(set(widths)) > 1:
            raise ParameterError(f"slots: expected equal widths, found {widths}")

    def _keep(self, tensor: torch.Tensor, shape: tuple[int | None, ...], name: str) -> int:
        check_shape(tensor.shape, shape, name)
        check_contiguous(tensor, name, self._dtype)
        self._kept.append(tensor.detach())
        return tensor.data_ptr()


def _check_table(table: tuple[torch.Tensor, torch.Tensor], num_rows: int, most: int) -> None:
    """Raise ParameterError unless angles of rows rotate at most `most` channels."""
    num_rotated = table[0].shape[-1]
    if num_rotated > most or num_rotated % 2:
        raise ParameterError(
            f"tables: expected an even number of channels, at most {most}, found {num_rotated}"
        )
    for angles in table:
        check_shape(angles.shape, (num_rows, num_rotated), "tables")
        check_contiguous(angles, "tables", torch.float32)
