"""Linear layers over few rows, which read each weight once; in 8 bits; and by groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from kvrag.errors import ParameterError
from kvrag.native.attention import (
    ATTENTION_TYPES,
    Mass,
    Scores,
    check_ascending,
    check_places,
    check_scores,
    mass_of,
)
from kvrag.native.kernels import (
    IS_COMPILED,
    check_contiguous,
    check_shape,
    check_threads,
    kernels,
    view,
)

INT8_PANEL: int = kernels.INT8_PANEL
"""Outputs whose weights in 8 bits lie together."""

MAX_ROWS = 32
"""With more rows, libraries for large matrices are faster, unless a matrix unit multiplies."""


MAX_INT8_INPUTS = 1 << 15
"""With more inputs, a sum of products in 8 bits might not fit 32."""

_PEAK = 127
_QUAD = 4
_PANELS_AT_ONCE = 32

GROUP: int = kernels.GROUP
"""Inputs that share a scale in `GroupedLinear`."""


class _Linear:
    """What computes a linear layer.

    Attributes
    ----------
    shape
        Numbers of outputs and inputs.
    """

    shape: tuple[int, int]
    _types: Sequence[torch.dtype] = ATTENTION_TYPES

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., num_outputs]`` for rows ``[..., num_inputs]``, in the rows' type.

        Raises
        ------
        ParameterError
            If the rows do not fit the weights, or are not of a type that can be computed, on the
            CPU.
        """
        num_outputs, num_inputs = self.shape
        if rows.shape[-1] != num_inputs or rows.dtype not in self._types:
            raise ParameterError(
                f"rows: expected {_told(self._types)} with {num_inputs} channels, found "
                f"{rows.dtype} of shape {list(rows.shape)}"
            )
        rows = rows.detach().contiguous()
        check_contiguous(rows, "rows", rows.dtype)
        out = rows.new_empty(*rows.shape[:-1], num_outputs)
        if rows.numel():
            self._compute(rows, out, rows.numel() // num_inputs, *_how(rows.dtype))
        return out

    def _compute(
        self, rows: torch.Tensor, out: torch.Tensor, count: int, is_bfloat16: bool, threads: int
    ) -> None:
        raise NotImplementedError


def _how(dtype: torch.dtype) -> tuple[bool, int]:
    """Return whether numbers are bfloat16, and how many threads kernels may use."""
    return dtype == torch.bfloat16, check_threads(torch.get_num_threads())


def _told(types: Sequence[torch.dtype]) -> str:
    return " or ".join(map(str, types))


def _filled(bias: torch.Tensor | None, num_outputs: int) -> torch.Tensor:
    """Return a copy of a bias, or zeros, for whole panels of outputs."""
    filled = torch.zeros(-(-num_outputs // INT8_PANEL) * INT8_PANEL)
    if bias is not None:
        check_shape(bias.shape, (num_outputs,), "bias")
        filled[:num_outputs] = bias.detach()
    return filled


class FewRowsLinear(_Linear):
    """Computes a linear layer over weights as they are. Sums are float32.

    A row's bits do not depend on the other rows.

    Parameters
    ----------
    weight
        ``[num_outputs, num_inputs]`` float32 or bfloat16 on the CPU, contiguous. It is not copied:
        changes in place count.
    bias
        ``[num_outputs]`` of the same type, or None.

    Raises
    ------
    ParameterError
        If the weights or the bias have another shape, type, place or order in memory.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dtype not in ATTENTION_TYPES:
            raise ParameterError(f"weight: expected {_told(ATTENTION_TYPES)}, found {weight.dtype}")
        check_shape(weight.shape, (None, None), "weight")
        check_contiguous(weight, "weight", weight.dtype)
        if bias is not None:
            check_shape(bias.shape, (weight.shape[0],), "bias")
            check_contiguous(bias, "bias", weight.dtype)
        self._weight, self._bias, self._types = weight, bias, (weight.dtype,)
        self.shape = weight.shape[0], weight.shape[1]

    def _compute(
        self, rows: torch.Tensor, out: torch.Tensor, count: int, is_bfloat16: bool, threads: int
    ) -> None:
        bias = 0 if self._bias is None else self._bias.data_ptr()
        given = rows.data_ptr(), self._weight.data_ptr(), bias, out.data_ptr()
        num_outputs, num_inputs = self.shape
        kernels.linear(*given, count, num_inputs, num_outputs, is_bfloat16, threads)


class Int8Linear(_Linear):
    """Computes a linear layer in 8 bits, for any number of rows.

    Each row of inputs and each output's weights have a scale, their greatest magnitude over 127.
    Products are summed exactly, so the result depends neither on the other rows nor on threads. A
    row with an infinite number or NaN gives NaN.

    Parameters
    ----------
    weight
        ``[num_outputs, num_inputs]`` of any floating type on the CPU, at most `MAX_INT8_INPUTS`
        inputs. It is copied: later changes do not count.
    bias
        ``[num_outputs]``, or None.

    Raises
    ------
    ParameterError
        If the weights or the bias have another shape, are elsewhere, or are not finite.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        _check_compiled("8 bits need")
        check_shape(weight.shape, (None, None), "weight")
        self.shape = num_outputs, num_inputs = weight.shape[0], weight.shape[1]
        is_fit = weight.device.type == "cpu" and weight.is_floating_point()
        if not is_fit or not 0 < num_inputs <= MAX_INT8_INPUTS:
            raise ParameterError(
                f"weight: expected floating numbers on the CPU with 1 to {MAX_INT8_INPUTS} inputs, "
                f"found {weight.dtype} of shape {list(weight.shape)} on {weight.device}"
            )
        panels, quads = -(-num_outputs // INT8_PANEL), -(-num_inputs // _QUAD)
        self._bias = _filled(bias, num_outputs)
        self._scale = torch.zeros_like(self._bias)
        self._weight = torch.full((panels, quads, INT8_PANEL, _QUAD), 128, dtype=torch.uint8)
        # A part at a time, which takes a few megabytes more than the layer.
        for first in range(0, panels, _PANELS_AT_ONCE):
            laid = self._weight[first : first + _PANELS_AT_ONCE]
            outputs = slice(first * INT8_PANEL, (first + len(laid)) * INT8_PANEL)
            values = weight.detach()[outputs].float()
            missing = quads * _QUAD - num_inputs, len(laid) * INT8_PANEL - len(values)
            values = pad(values, (0, missing[0], 0, missing[1]))
            peak = values.abs().amax(1)
            self._scale[outputs] = peak / _PEAK
            values.mul_((_PEAK / peak.clamp_min(1e-30))[:, None]).round_().add_(128)
            laid.copy_(values.view(len(laid), INT8_PANEL, quads, _QUAD).transpose(1, 2))
        if not self._scale.isfinite().all():
            raise ParameterError("weight: expected finite numbers, found infinite ones or NaN")

    @property
    def parts(self) -> tuple[int, int, int]:
        """Addresses of weights, scales and biases as kernels take them."""
        return self._weight.data_ptr(), self._scale.data_ptr(), self._bias.data_ptr()

    def _compute(
        self, rows: torch.Tensor, out: torch.Tensor, count: int, is_bfloat16: bool, threads: int
    ) -> None:
        num_outputs, num_inputs = self.shape
        given = rows.data_ptr(), *self.parts, out.data_ptr()
        kernels.int8_linear(*given, count, num_inputs, num_outputs, is_bfloat16, threads)


def _check_compiled(what: str) -> None:
    if not IS_COMPILED:
        raise ParameterError(f"{what} kvrag's compiled kernels: see 'kvrag doctor'")


class GroupedWeight(NamedTuple):
    """Weights of 4 to 8 bits with a scale for each group of inputs, laid out for the kernels.

    A weight is ``number * scale + least``, times `factor`. Without a `least` it is minus half the
    numbers' range, times the scale. The layout is that of ``GroupedLinear`` in
    ``cuda/host/kernels.h``.

    Attributes
    ----------
    bits
        4, 5, 6 or 8.
    shape
        Numbers of outputs and inputs.
    numbers
        Bytes ``[panels, groups, GROUP * INT8_PANEL * bits / 8]``.
    scale
        float16 ``[panels, groups, 1, INT8_PANEL]``; with 6 bits ``[.., 2, ..]``: one for each half
        of a group.
    least
        float16 ``[panels, groups, INT8_PANEL]``, or None.
    factor
        A power of two, so that scales fit 16 bits.
    """

    bits: int
    shape: tuple[int, int]
    numbers: torch.Tensor
    scale: torch.Tensor
    least: torch.Tensor | None
    factor: float

    @classmethod
    def pack(
        cls,
        bits: int,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        least: torch.Tensor | None,
        factor: float | None = None,
    ) -> GroupedWeight:
        """Lay out numbers.

        Parameters
        ----------
        bits
            4, 5, 6 or 8.
        numbers
            ``[N, K]`` uint8, below 2 to the power of `bits`.
        scale, least
            ``[N, ceil(K / GROUP)]`` float32, with 6 bits ``[N, ceil(K / GROUP) * 2]``.
        factor
            What `factor_of` says of these and others; None asks it of these.
        """
        num_outputs, num_inputs = numbers.shape
        panels, groups = -(-num_outputs // INT8_PANEL), -(-num_inputs // GROUP)
        if factor is None:
            given = (part for part in (scale, least) if part is not None)
            factor = cls.factor_of(max(float(part.abs().amax()) for part in given))
        pieces: list[list[torch.Tensor]] = [[], [], []]
        for first in range(0, num_outputs, _OUTPUTS_AT_ONCE):
            rows = slice(first, first + _OUTPUTS_AT_ONCE)
            pieces[0].append(_planes(numbers[rows], bits, groups))
            for known, part in zip(pieces[1:], (scale, least), strict=True):
                if part is not None:
                    laid = pad(part[rows] / factor, (0, 0, 0, -part[rows].shape[0] % INT8_PANEL))
                    laid = laid.view(-1, INT8_PANEL, groups, part.shape[1] // groups)
                    known.append(laid.permute(0, 2, 3, 1).half())
        laid_scale, laid_least = (torch.cat(known) if known else None for known in pieces[1:])
        assert laid_scale is not None
        return cls(
            bits,
            (num_outputs, num_inputs),
            torch.cat(pieces[0]).view(panels, groups, -1),
            laid_scale.contiguous(),
            None if laid_least is None else laid_least[:, :, 0].contiguous(),
            factor,
        )

    @staticmethod
    def factor_of(top: float) -> float:
        """Return the power of two that scales are divided by, to fit 16 bits, if none is above."""
        # The greatest is then below 2 ** 12, so that small ones keep all their digits.
        return float(2.0 ** (math.frexp(top)[1] - 12)) if top else 1.0

    @staticmethod
    def sizes(bits: int, shape: tuple[int, int], has_least: bool) -> tuple[int, int, int]:
        """Return how many bytes numbers, scales and least of such weights take: what `of` reads."""
        each = -(-shape[0] // INT8_PANEL) * -(-shape[1] // GROUP) * INT8_PANEL
        return each * GROUP * bits // 8, each * (4 if bits == 6 else 2), each * 2 * has_least

    @classmethod
    def of(
        cls, data: torch.Tensor, bits: int, shape: tuple[int, int], has_least: bool, factor: float
    ) -> GroupedWeight:
        """Return weights over bytes: numbers, scales and least as they lie, one after the other.

        Raises
        ------
        ParameterError
            If there are not as many bytes as `sizes` says.
        """
        sizes = cls.sizes(bits, shape, has_least)
        check_shape(data.shape, (sum(sizes),), "data")
        after, data = sizes[0] + sizes[1], data.detach()
        numbers, scale, least = data[: sizes[0]], data[sizes[0] : after], data[after:]
        panels = -(-shape[0] // INT8_PANEL)
        laid = scale.view(torch.float16).view(panels, -(-shape[1] // GROUP), -1, INT8_PANEL)
        added = least.view(torch.float16).view(*laid.shape[:2], INT8_PANEL) if has_least else None
        return cls(bits, shape, numbers.view(*laid.shape[:2], -1), laid, added, factor)

    @classmethod
    def quantise(cls, weight: torch.Tensor, bits: int) -> GroupedWeight:
        """Return weights ``[N, K]`` in 4 or 8 bits.

        Raises
        ------
        ParameterError
            If a weight is infinite or NaN.
        """
        groups = -(-weight.shape[1] // GROUP)
        values = pad(weight.detach().float(), (0, groups * GROUP - weight.shape[1]))
        values = values.view(len(weight), groups, GROUP)
        if not values.isfinite().all():
            raise ParameterError("weight: expected finite numbers, found infinite ones or NaN")
        if bits == 8:
            scale, least = values.abs().amax(2) / _PEAK, None
            numbers = (values / scale.clamp_min(1e-30)[..., None]).round_().add_(128)
        else:
            numbers, scale, least = _fitted(values)
        numbers = numbers.to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]]
        return cls.pack(bits, numbers, scale, least)

    def rows(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return weights ``[.., K]`` of outputs ``[..]`` int64 as numbers of a type.

        Raises
        ------
        ParameterError
            If there is no such output, or the type is neither float32 nor bfloat16.
        """
        if outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < self.shape[0]:
            raise ParameterError(f"outputs: expected numbers below {self.shape[0]}")
        outputs = outputs.contiguous()
        check_contiguous(outputs, "outputs", torch.int64)
        if dtype not in ATTENTION_TYPES:
            raise ParameterError(f"rows: expected {_told(ATTENTION_TYPES)}, found {dtype}")
        out = torch.empty(*outputs.shape, self.shape[1], dtype=dtype)
        kernel, count = GroupedLinear(self).kernel, outputs.numel()
        kernels.grouped_rows(outputs.data_ptr(), kernel, out.data_ptr(), count, *_how(dtype))
        return out


class GroupedLinear(_Linear):
    """Computes a linear layer over a `GroupedWeight`, for any number of rows.

    Rows are quantised to 8 bits, a group at a time. Products of a group are summed exactly, and
    groups in order, so a row's bits depend neither on the other rows nor on threads. A row with an
    infinite number or NaN gives NaN.

    Parameters
    ----------
    weight
        Is not copied.
    bias
        ``[num_outputs]``, or None. Is copied.

    Raises
    ------
    ParameterError
        If parts of the weight or the bias have another shape, or there are no compiled kernels.
    """

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None = None) -> None:
        _check_compiled("weights by groups need")
        bits, (num_outputs, num_inputs), numbers, scale, least, factor = weight
        if bits not in (4, 5, 6, 8) or (bits > 5 and least is not None):
            raise ParameterError(f"bits: expected 4 or 5, or 6 or 8 without least; found {bits}")
        panels = -(-num_outputs // INT8_PANEL), -(-num_inputs // GROUP)
        for name, part, shape, dtype in (
            ("numbers", numbers, (GROUP * INT8_PANEL * bits // 8,), torch.uint8),
            ("scale", scale, (2 if bits == 6 else 1, INT8_PANEL), torch.float16),
            ("least", least, (INT8_PANEL,), torch.float16),
        ):
            if part is not None:
                check_shape(part.shape, (*panels, *shape), name)
                check_contiguous(part, name, dtype)
        self.shape, self._weight, self._bias = weight.shape, weight, _filled(bias, num_outputs)
        self.kernel = kernels.GroupedWeights(
            numbers.data_ptr(),
            scale.data_ptr(),
            0 if least is None else least.data_ptr(),
            self._bias.data_ptr(),
            factor,
            bits,
            num_inputs,
            num_outputs,
        )

    def _compute(
        self, rows: torch.Tensor, out: torch.Tensor, count: int, is_bfloat16: bool, threads: int
    ) -> None:
        given = rows.data_ptr(), self.kernel, out.data_ptr()
        kernels.grouped_linear(*given, count, is_bfloat16, threads)


_OUTPUTS_AT_ONCE = 32 * INT8_PANEL


def _planes(numbers: torch.Tensor, bits: int, groups: int) -> torch.Tensor:
    """Return numbers ``[N, K]`` as bytes ``[panels, groups, planes, INT8_PANEL, 4]``."""
    num_outputs, num_inputs = numbers.shape
    more = (0, groups * GROUP - num_inputs, 0, -num_outputs % INT8_PANEL)
    quads = pad(numbers, more).view(-1, INT8_PANEL, groups, GROUP // _QUAD, _QUAD)
    quads = quads.permute(0, 2, 3, 1, 4)
    if bits == 8:
        return quads.contiguous()
    planes = [(quads[:, :, ::2] & 15) | (quads[:, :, 1::2] << 4)]
    if bits > 4:
        width = bits - 4  # of what is above 4 bits
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None, None]
        high = (quads >> 4).reshape(-1, groups, width, 8 // width, INT8_PANEL, _QUAD) << shifts
        planes.append(high.sum(3, dtype=torch.uint8))
    return torch.cat(planes, 2)


def _fitted(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers of 4 bits, scales and what 0 stands for, for groups ``[N, G, GROUP]``.

    Each group takes the narrower of some ranges around its middle that leaves the least squares.
    """
    low, high = values.aminmax(dim=2, keepdim=True)
    middle = (low + high) / 2
    best: tuple[torch.Tensor, ...] = (torch.full_like(low, math.inf), values, low, low)
    for share in (1.0, 0.95, 0.9, 0.85):
        least, scale = middle + (low - middle) * share, (high - low) * share / 15
        numbers = ((values - least) / scale.clamp_min(1e-30)).round_().clamp_(0, 15)
        # The line through what the numbers stand for.
        mean, center = numbers.mean(2, keepdim=True), values.mean(2, keepdim=True)
        spread = (numbers - mean).square().sum(2, keepdim=True)
        products = ((numbers - mean) * (values - center)).sum(2, keepdim=True)
        scale = torch.where(spread > 0, products / spread.clamp_min(1e-9), scale)
        least = center - scale * mean
        error = (numbers * scale + least - values).square().sum(2, keepdim=True)
        found = error, numbers, scale, least
        pairs = zip(found, best, strict=True)
        best = tuple(torch.where(error < best[0], new, old) for new, old in pairs)
    _, numbers, scale, least = best
    return numbers, scale[..., 0], least[..., 0]


# -- layers of a model ---------------------------------------------------------------------------
#
# For few rows, Python would take as long as the kernels do.


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
            raise ParameterError(f"dtype: expected {_told(ATTENTION_TYPES)}, found {dtype}")
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
        self._check_other(source, to)
        kept = self._keep(weight, (self._widths[to], self._widths[source]), "weight")
        added = 0 if bias is None else self._keep(bias, (self._widths[to],), "bias")
        self._layers.linear(source, to, kept, added)

    def quantised_linear(self, source: int, to: int, layer: Int8Linear | GroupedLinear) -> None:
        """Add a linear layer in 8 bits, or by groups."""
        self._check_other(source, to)
        check_shape(layer.shape, (self._widths[to], self._widths[source]), "layer")
        self._kept.append(layer)
        if isinstance(layer, GroupedLinear):
            self._layers.grouped_linear(source, to, layer.kernel)
        else:
            self._layers.int8_linear(source, to, *layer.parts)

    def norm(
        self, source: int, to: int, weight: torch.Tensor, epsilon: float, *, adds_one: bool
    ) -> None:
        """Add a norm of rows, or of their parts of the weight's length; see `rms_norm`."""
        self._check_other(source, to)
        self._check_equal(source, to)
        self._check_parts(source, len(weight), "weight")
        kept = self._keep(weight, (None,), "weight")
        self._layers.norm(source, to, kept, len(weight), epsilon, adds_one)

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
        self._check_other(source, to)
        self._check_equal(source, to)
        self._check_parts(source, head_dim, "head_dim")
        known = self._smallest_heads
        known += [head_dim] * (table + 1 - len(known))
        known[table] = min(known[table], head_dim)
        self._layers.rotate(source, to, table, head_dim)

    def attend(
        self, query: int, key: int, value: int, to: int, head_dim: int, scores: Scores
    ) -> None:
        """Add attention to the keys of each row's own prompt, or of the prompt of all rows.

        See `attend_each` and `attend`. A layer has at most one.
        """
        check_scores(scores)
        self._check_other(query, to)
        self._check_equal(query, to)
        self._check_equal(key, value)
        if self._heads_added != (0, 0):
            raise ParameterError("attend: expected a layer to attend once, found twice")
        given = self._widths[key]
        self._check_parts(key, head_dim, "head_dim")
        self._check_parts(query, given, "query")
        self._heads_added = num_heads, _ = given // head_dim, head_dim
        self._layers.attend(query, key, value, to, num_heads, head_dim, *scores.numbers())

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
        check_shape((len(tables),), (len(self._smallest_heads),), "tables")
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
        for name, part in (("keys", keys), ("values", values)):
            is_here = part.dtype == self._dtype and part.device.type == "cpu"
            if not is_here or part.stride() != (keys.stride(0), head_dim, 1):
                raise ParameterError(
                    f"{name}: expected {self._dtype} on the CPU with equal strides of contiguous "
                    f"heads, found {part.dtype} on {part.device} with strides {part.stride()}"
                )
        num_keys = keys.shape[1]
        check_ascending(places, "places", num_rows, num_keys, distinct=True)
        taken, first_counted = mass_of(mass, num_heads, num_keys)
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

    def _check_other(self, source: int, to: int) -> None:
        if source == to:
            raise ParameterError(f"slot {to}: expected another one than the operation reads")

    def _check_equal(self, *slots: int) -> None:
        widths = [self._widths[slot] for slot in slots]
        if len(set(widths)) > 1:
            raise ParameterError(f"slots: expected equal widths, found {widths}")

    def _check_parts(self, slot: int, width: int, name: str) -> None:
        if width < 1 or self._widths[slot] % width:
            raise ParameterError(f"{name}: expected a divisor of {self._widths[slot]}")

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
