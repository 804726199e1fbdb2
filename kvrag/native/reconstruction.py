"""Reconstructs keys and values from whole numbers, straight into the fused buffer.

One pass per layer and kind: dequantise, transform back, add the mean, rotate to
positions, round to the model's type, scatter. The pass allocates nothing of the KV's size.
``cuda/include/kvrag/reconstruct.h`` describes the arithmetic, which is float32. Its last bits
depend on the instruction set, because the order of the sums does.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError, RecordError
from kvrag.native.attention import ATTENTION_TYPES
from kvrag.native.kernels import ArrayLike, check_threads, kernels, view

ZERO_SYMBOL = 128

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

Array = TypeVar("Array", covariant=True)


class Patches(NamedTuple):
    """Replacements for single points, sorted by token, then by row, without duplicates.

    Attributes
    ----------
    rows, tokens
        ``[P]`` uint32: the places in the matrix of numbers.
    values
        ``[P]`` float32: the points there, in place of the shrunk numbers.
    """

    rows: ArrayLike
    tokens: ArrayLike
    values: ArrayLike


class Points(NamedTuple, Generic[Array]):
    """Whole numbers and their points: the point of a number q is q - sign(q) shrink[r].

    Attributes
    ----------
    numbers
        ``[R, T]``: symbols uint8, which represent symbol - 128, or numbers int16. Tokens are
        contiguous; rows may have any stride.
    shrink
        ``[R]`` float32, or None for 0.
    patches
        Replacements for single points.
    """

    numbers: Array
    shrink: Array | None = None
    patches: Patches | None = None


class Rotation(NamedTuple, Generic[Array]):
    """The tables of the positions of n tokens, as in `RotaryTable`.

    Attributes
    ----------
    cos, sin
        ``[n, P]`` float32, for P <= D rotated channels. Only the first P / 2 columns are used.
    """

    cos: Array
    sin: Array


def reconstruct(
    points: Points[ArrayLike],
    basis: ArrayLike,
    mean: ArrayLike | None,
    out: ArrayLike,
    *,
    rotation: Rotation[ArrayLike] | None = None,
    tokens: slice | None = None,
) -> None:
    """Write the inverse transform of n tokens of a layer's keys or values, with PyTorch's threads.

    ``out[h, t] = rotate(mean[h] + sum over r of points[r, t] basis[h, r])``.

    Parameters
    ----------
    points
        ``[R, T]``.
    basis
        ``[H, R, D]`` float32, contiguous, multiplied by the quantiser's steps. It is fast if D is
        a multiple of 8.
    mean
        ``[H, D]`` float32, or None for 0.
    out
        ``[H, n, D]``, float32, bfloat16 or float16. The last stride is 1, the others are free.
    rotation
        The tables of the n tokens' positions; None does not rotate.
    tokens
        The n of the T tokens to write; None for all.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    RecordError
        If patches are outside the matrix or out of order.
    """
    numbers, shrink = points.numbers, points.shrink
    wanted = np.uint8 if numbers.dtype in (torch.uint8, np.dtype(np.uint8)) else np.int16
    matrix = view(numbers, "numbers", wanted, (None, None))
    num_rows, num_tokens = matrix.shape
    placed, element_type = _output(out)
    num_heads, num_written, head_dim = placed.shape
    if mean is None:
        mean = np.zeros((num_heads, head_dim), np.float32)
    if shrink is not None:
        shrink = view(shrink, "shrink", np.float32, (num_rows,), contiguous=True)
    kernels.transform(
        matrix,
        shrink,
        check_patches(points.patches, num_rows, num_tokens),
        view(basis, "basis", np.float32, (num_heads, num_rows, head_dim), contiguous=True),
        view(mean, "mean", np.float32, (num_heads, head_dim), contiguous=True),
        placed,
        element_type,
        first_of_tokens(tokens, num_tokens, num_written),
        _tables(rotation, placed),
        torch.get_num_threads(),
    )


def contexts(values: ArrayLike, out: ArrayLike) -> None:
    """Write the context of each number's next digit: its magnitude, at most 2.

    Parameters
    ----------
    values
        ``[R, T]`` int16, contiguous.
    out
        ``[R, T]`` uint8, contiguous.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    """
    known = view(values, "values", np.int16, (None, None), contiguous=True)
    written = view(out, "out", np.uint8, known.shape, contiguous=True, writable=True)
    kernels.contexts(known, written)


def refine(values: ArrayLike, symbols: ArrayLike) -> None:
    """Replace numbers by those of the next plane, whose step is a third.

    A number q becomes 3 q + digit, or 3 q - digit if it is negative. The digit is symbol - 128.
    Results that exceed 16 bits, which only damage can cause, are clamped to a magnitude of 32767.

    Parameters
    ----------
    values
        ``[R, T]`` int16, contiguous, overwritten.
    symbols
        ``[R, T]`` uint8, contiguous.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    """
    known = view(values, "values", np.int16, (None, None), contiguous=True, writable=True)
    kernels.refine(known, view(symbols, "symbols", np.uint8, known.shape, contiguous=True))


def _output(out: ArrayLike) -> tuple[NDArray[Any], int]:
    """Return `out` ``[H, n, D]`` (16-bit floats as their bits) and the code of its type."""
    placed = torch.from_numpy(out) if isinstance(out, np.ndarray) else out
    code = ELEMENT_TYPES.get(placed.dtype)
    if code is None:
        known = ", ".join(map(str, ELEMENT_TYPES))
        raise ParameterError(f"out: expected {known}, found {placed.dtype}")
    shape = None, None, None
    if code == 0:
        return view(placed, "out", np.float32, shape, writable=True), code
    return view(placed.detach().view(torch.int16), "out", np.int16, shape, writable=True), code


def first_of_tokens(tokens: slice | None, num_tokens: int, num_written: int) -> int:
    """Return the start of a slice; raise ParameterError unless it has `num_written` tokens."""
    start, stop, step = (slice(None) if tokens is None else tokens).indices(num_tokens)
    if step != 1 or stop - start != num_written:
        raise ParameterError(
            f"tokens: expected {num_written} consecutive tokens of {num_tokens}, as out has, "
            f"found {tokens}"
        )
    return start


def _tables(
    rotation: Rotation[ArrayLike] | None, out: NDArray[Any]
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    if rotation is None:
        return None
    cosines = view(rotation.cos, "cos", np.float32, (out.shape[1], None))
    check_tables_width(cosines.shape[1], out.shape[2])
    return cosines, view(rotation.sin, "sin", np.float32, cosines.shape)


def check_tables_width(num_rotated: int, head_dim: int) -> None:
    """Raise ParameterError unless `num_rotated` of a head's channels can be rotated."""
    if num_rotated % 2 or num_rotated > head_dim:
        raise ParameterError(
            f"cos: expected an even number of columns, at most {head_dim}, found {num_rotated}"
        )


def check_patches(
    patches: Patches | None, num_rows: int, num_tokens: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32]] | None:
    """Return rows, tokens and values of patches, or None if there are no patches.

    Raises
    ------
    ParameterError
        If they have the wrong shapes or types.
    RecordError
        If they are outside the matrix or out of order.
    """
    if patches is None:
        return None
    rows = view(patches.rows, "rows of patches", np.uint32, (None,), contiguous=True)
    tokens = view(patches.tokens, "tokens of patches", np.uint32, rows.shape, contiguous=True)
    values = view(patches.values, "values of patches", np.float32, rows.shape, contiguous=True)
    if not rows.size:
        return None
    places = tokens.astype(np.int64) * (1 << 32) + rows
    if rows.max() >= num_rows or tokens.max() >= num_tokens or (np.diff(places) <= 0).any():
        raise RecordError(
            f"patches: expected places within {num_rows} rows and {num_tokens} tokens, sorted by "
            "token, then row, found others"
        )
    return rows, tokens, values


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, *, adds_one: bool = False
) -> torch.Tensor:
    """Return rows over the root of their mean square, times weights.

    Parameters
    ----------
    rows
        ``[..., width]`` float32 or bfloat16 on the CPU.
    weight
        ``[width]`` of the same type.
    epsilon
        Added to the mean square.
    adds_one
        Whether the weights are less by 1, and products alone are rounded, as in Gemma. Otherwise
        rows are rounded before they are multiplied, as in Llama.

    Raises
    ------
    ParameterError
        If rows and weights do not fit each other, or are of another type or device.
    """
    width = rows.shape[-1]
    if weight.shape != (width,):
        raise ParameterError(f"weight: expected shape [{width}], found {list(weight.shape)}")
    rows = _sound(rows, "rows", rows.dtype)
    weight = _sound(weight, "weight", rows.dtype)
    out = torch.empty_like(rows)
    kernels.norm(
        rows.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows.numel() // max(width, 1),
        width,
        epsilon,
        adds_one,
        rows.dtype == torch.bfloat16,
        check_threads(torch.get_num_threads()),
    )
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool = False) -> torch.Tensor:
    """Return an activation of one tensor times another of the same shape.

    Parameters
    ----------
    gate, up
        Float32 or bfloat16 on the CPU.
    is_gelu
        Whether the activation is GELU as approximated by tanh; otherwise it is SiLU.

    Raises
    ------
    ParameterError
        If the tensors differ in shape, or are of another type or device.
    """
    if gate.shape != up.shape:
        raise ParameterError(f"up: expected shape {list(gate.shape)}, found {list(up.shape)}")
    gate = _sound(gate, "gate", gate.dtype)
    up = _sound(up, "up", gate.dtype)
    out = torch.empty_like(gate)
    kernels.gate(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        gate.numel(),
        is_gelu,
        gate.dtype == torch.bfloat16,
        check_threads(torch.get_num_threads()),
    )
    return out


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> bool:
    """Rotate rows' first R channels in halves, in float32, and write them to `out`.

    Parameters
    ----------
    rows
        ``[H, n, D]`` on the CPU.
    cos, sin
        ``[n, R]`` float32, of which the first half counts.
    out
        ``[H, n, D]``; it does not overlap `rows`.

    Returns
    -------
    bool
        Whether the rows were rotated. They are not if rows and `out` are not both float32 or both
        bfloat16, if channels are not next to each other, or if gradients are wanted.
    """
    dtype = rows.dtype
    is_ours = (
        dtype == out.dtype
        and dtype in ATTENTION_TYPES
        and rows.device.type == out.device.type == cos.device.type == "cpu"
        and rows.stride(-1) == out.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
        and cos.stride() == sin.stride()
        and cos.dtype == sin.dtype == torch.float32
        and rows.dim() == 3
        and not (rows.requires_grad and torch.is_grad_enabled())
    )
    if not is_ours:
        return False
    num_tokens, head_dim = rows.shape[1:]
    num_rotated = cos.shape[1]
    if out.shape != rows.shape or cos.shape != sin.shape or len(cos) != num_tokens:
        raise ParameterError(
            f"rows, angles and out: expected shapes that fit, found {list(rows.shape)}, "
            f"{list(cos.shape)}, {list(sin.shape)} and {list(out.shape)}"
        )
    check_tables_width(num_rotated, head_dim)
    if rows.numel():
        kernels.rotate(
            rows.data_ptr(),
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows.stride(0),
            rows.stride(1),
            out.stride(0),
            out.stride(1),
            cos.stride(0),
            len(rows),
            num_tokens,
            head_dim,
            num_rotated,
            dtype == torch.bfloat16,
        )
    return True


def _sound(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.dtype != dtype or dtype not in ATTENTION_TYPES:
        known = " or ".join(map(str, ATTENTION_TYPES))
        raise ParameterError(
            f"{name}: expected {known} on the CPU, all of one type, found {tensor.dtype} on "
            f"{tensor.device}"
        )
    return tensor.detach().contiguous()
