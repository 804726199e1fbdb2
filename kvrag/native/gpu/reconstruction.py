"""Reconstructs keys and values from whole numbers on a GPU.

Arguments mean the same as in `kvrag.native.reconstruction`. The sum over rows is one of torch's
matrix products, between a kernel that dequantises and one that places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvrag.errors import ParameterError
from kvrag.native.gpu.compiling import Argument, blocks_for, launch
from kvrag.native.gpu.tensors import check, check_optional
from kvrag.native.reconstruction import (
    ELEMENT_TYPES,
    Points,
    Rotation,
    check_patches,
    check_tables_width,
    first_of_tokens,
)

_NUMBER_TYPES = {torch.uint8: 0, torch.int16: 1}
_TILE_TOKENS = 32
# The most channels that fit into a block's default shared memory.
MAX_CHANNELS_DIM = 256


class _Target(NamedTuple):
    """Arguments of a kernel that places: the tables, then the destination."""

    out: torch.Tensor
    tables: tuple[Argument, ...]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        strides = (self.out.stride(0), self.out.stride(1))
        return (*self.tables, self.out, ELEMENT_TYPES[self.out.dtype], *strides)


def reconstruct(
    points: Points[torch.Tensor],
    basis: torch.Tensor,
    mean: torch.Tensor | None,
    out: torch.Tensor,
    *,
    rotation: Rotation[torch.Tensor] | None = None,
    tokens: slice | None = None,
) -> None:
    """Write the inverse transform of n tokens of one layer's keys or values.

    Parameters
    ----------
    points, mean, out, rotation, tokens
        As for `kvrag.native.reconstruct`, on one GPU, except for patches: these are in the host's
        memory.
    basis
        ``[H, R, D]`` float32, bfloat16 or float16. The product has the same type.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape, type or device.
    RecordError
        If patches are outside the matrix or out of order.
    """
    first_token, target = _checked(points.numbers, out, rotation, tokens)
    numbers, shrink = points.numbers, points.shrink
    device = out.device
    num_heads, count, head_dim = out.shape
    num_rows = numbers.shape[0]
    check_optional(shrink, "shrink", torch.float32, (num_rows,), device)
    check_optional(mean, "mean", torch.float32, (num_heads, head_dim), device)
    if basis.dtype not in ELEMENT_TYPES:
        raise ParameterError(f"basis: expected a float type of 16 or 32 bits, found {basis.dtype}")
    check(basis, "basis", basis.dtype, (num_heads, num_rows, head_dim), device)

    dequantised = torch.empty(num_rows, count, dtype=basis.dtype, device=device)
    point_type = ELEMENT_TYPES[basis.dtype]
    launch(
        "dequantise",
        device,
        blocks_for(num_rows * count),
        numbers,
        _NUMBER_TYPES[numbers.dtype],
        numbers.stride(0),
        shrink,
        num_rows,
        first_token,
        count,
        dequantised,
        point_type,
        count,
    )
    placed = _patches_on(points, device)
    num_patches = 0 if placed is None else len(placed[0])
    if placed is not None:
        where = (num_patches, num_rows, first_token, count, dequantised, point_type, count)
        launch("patch", device, blocks_for(num_patches), *placed, *where)
    product = torch.matmul(dequantised.T, basis).float()
    units = num_heads * count * head_dim
    shape = (num_heads, count, head_dim)
    launch("place", device, blocks_for(units), product, mean, *shape, *target.arguments)


def place_channels(
    points: Points[torch.Tensor],
    out: torch.Tensor,
    *,
    row_scale: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    rotation: Rotation[torch.Tensor] | None = None,
    tokens: slice | None = None,
) -> None:
    """Write n tokens of one layer's keys or values; here rows are channels.

    Parameters
    ----------
    points, out, row_scale, token_scale, addend, rotation, tokens
        As for `kvrag.native.place_channels`, on one GPU. D is at most 256.

    Raises
    ------
    ParameterError, RecordError
        As `reconstruct` does.
    """
    first_token, target = _checked(points.numbers, out, rotation, tokens)
    numbers, shrink = points.numbers, points.shrink
    device = out.device
    num_heads, count, head_dim = out.shape
    num_rows, num_tokens = numbers.shape
    if num_rows != num_heads * head_dim:
        raise ParameterError(f"numbers: expected {num_heads} x {head_dim} rows, found {num_rows}")
    if head_dim > MAX_CHANNELS_DIM:
        raise ParameterError(f"out: expected at most {MAX_CHANNELS_DIM} channels, found {head_dim}")
    shape = (num_rows, num_tokens)
    check_optional(shrink, "shrink", torch.float32, (num_rows,), device)
    check_optional(row_scale, "row_scale", torch.float32, (num_rows,), device)
    check_optional(token_scale, "token_scale", torch.float32, (num_tokens,), device)
    check_optional(addend, "addend", torch.float32, shape, device, contiguous=False)
    placed = _patches_on(points, device)
    launch(
        "channels",
        device,
        (-(-count // _TILE_TOKENS), num_heads),
        numbers,
        _NUMBER_TYPES[numbers.dtype],
        numbers.stride(0),
        shrink,
        row_scale,
        token_scale,
        addend,
        0 if addend is None else addend.stride(0),
        *(placed or (None, None, None)),
        0 if placed is None else len(placed[0]),
        first_token,
        count,
        head_dim,
        *target.arguments,
        shared_bytes=4 * _TILE_TOKENS * (head_dim + 1),
    )


def contexts(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the context of each number's next digit; see `kvrag.native.contexts`."""
    device = values.device
    check(values, "values", torch.int16, (None, None), device)
    check(out, "out", torch.uint8, tuple(values.shape), device)
    count = values.numel()
    launch("magnitude_contexts", device, blocks_for(count), values, out, count)


def refine(values: torch.Tensor, symbols: torch.Tensor) -> None:
    """Replace numbers by those of the next plane; see `kvrag.native.refine`."""
    device = values.device
    check(values, "values", torch.int16, (None, None), device)
    check(symbols, "symbols", torch.uint8, tuple(values.shape), device)
    count = values.numel()
    launch("refine", device, blocks_for(count), values, symbols, count)


def _checked(
    numbers: torch.Tensor,
    out: torch.Tensor,
    rotation: Rotation[torch.Tensor] | None,
    tokens: slice | None,
) -> tuple[int, _Target]:
    """Return the first token to write, and its destination."""
    device = out.device
    if out.dtype not in ELEMENT_TYPES:
        raise ParameterError(f"out: expected a float type of 16 or 32 bits, found {out.dtype}")
    check(out, "out", out.dtype, (None, None, None), device, contiguous=False)
    if numbers.dtype not in _NUMBER_TYPES:
        raise ParameterError(f"numbers: expected uint8 or int16, found {numbers.dtype}")
    check(numbers, "numbers", numbers.dtype, (None, None), device, contiguous=False)
    _, count, head_dim = out.shape
    first_token = first_of_tokens(tokens, numbers.shape[1], count)
    if rotation is None:
        return first_token, _Target(out, (None, 0, None, 0, 0))
    cos, sin = rotation
    check(cos, "cos", torch.float32, (count, None), device, contiguous=False)
    check(sin, "sin", torch.float32, tuple(cos.shape), device, contiguous=False)
    check_tables_width(cos.shape[1], head_dim)
    return first_token, _Target(out, (cos, cos.stride(0), sin, sin.stride(0), cos.shape[1]))


def _patches_on(
    points: Points[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    checked = check_patches(points.patches, *points.numbers.shape)
    if checked is None:
        return None
    rows, tokens, values = (torch.from_numpy(field.copy()).to(device) for field in checked)
    return rows, tokens, values
