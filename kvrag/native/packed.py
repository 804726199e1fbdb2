"""Keys and values as numbers of fixed width: rows of bytes to the fused buffer, and back.

A band is some channels of a layer's keys or values. Its channels are
``mean + scale * power * (basis^T c)``, where the basis has 8 bits and ``power`` is the token's,
by a byte. A number u of w bits stands for ``c = 2 LEVELS[2^w + u] - 127``, of no bits for 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError
from kvrag.native.kernels import IS_COMPILED, ArrayLike, kernels, view
from kvrag.native.reconstruction import ELEMENT_TYPES, Rotation, check_tables_width

GROUP = 8
"""Numbers that lie together, and have one width."""
MOST_BITS = 6
SLACK = 8
"""Bytes that must be readable after the last row."""
POWERS = np.exp2((np.arange(256) - 128) / 8).astype(np.float32)
"""What the byte of a token's scale stands for."""

MIDDLE = 127
"""What twice a level has more than what it stands for."""
_POSITIVE = (
    (17,),
    (9, 33),
    (7, 19, 35, 57),
    (5, 13, 21, 31, 41, 53, 67, 89),
    (3, 7, 13, 17, 23, 29, 35, 39, 47, 53, 61, 69, 79, 89, 105, 127),
    (*range(1, 37, 2), 39, 41, 45, 49, 53, 57, 61, 67, 73, 79, 87, 95, 109, 127),
)
"""What numbers of 1 to 6 bits stand for, besides their negatives: those of a normal distribution
that lose least (Lloyd 1982; Max 1960), as odd numbers."""
USUAL = np.array([1.0, 21.31, 21.85, 26.37, 32.62, 39.31, 31.39], np.float32)
"""What numbers of 0 to 6 bits usually measure, where `LEVELS` lose least."""


def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    levels, nearest = np.zeros(128, np.uint8), np.zeros((MOST_BITS + 1, 256), np.uint8)
    meanings = np.zeros(nearest.shape, np.float32)
    for width, positive in enumerate(_POSITIVE, 1):
        odd = np.array(positive)
        own = (np.concatenate([-odd[::-1], odd]) + MIDDLE) // 2
        levels[1 << width : 2 << width] = own
        nearest[width] = np.searchsorted(own[1:] + own[:-1], np.arange(256), "right")
        meanings[width] = 2.0 * own[nearest[width]] - MIDDLE
    return levels, nearest, meanings


LEVELS, _NEAREST, _MEANINGS = _tables()
"""uint8 ``[128]``: see above."""
_PANEL = 32


class PackedBands:
    """The bases of one layer's keys or values, prepared for decoding.

    Parameters
    ----------
    widths
        uint8 ``[bands, K / 8]``, at most 6; they add up to the same in all bands.
    basis
        int8 ``[bands, K, n]``: K numbers to n channels.
    scales
        float32 ``[bands]``.
    mean
        float32 ``[bands n]``.

    Attributes
    ----------
    row_bytes
        Bytes of a token: for each band its scale, then its numbers.
    num_channels
        Channels of a token, those of all bands.
    bands
        What the kernels take.
    """

    def __init__(
        self,
        widths: NDArray[np.uint8],
        basis: NDArray[np.int8],
        scales: NDArray[np.float32],
        mean: NDArray[np.float32],
    ) -> None:
        num_bands, num_numbers, num_channels = basis.shape
        sums = widths.sum(axis=1, dtype=np.int64)
        if widths.max(initial=0) > MOST_BITS or (sums != sums[0]).any():
            raise ParameterError(f"widths: expected at most {MOST_BITS}, the same sum in each band")
        padded = -(-num_channels // _PANEL) * _PANEL
        whole = np.zeros((num_bands, num_numbers, padded), np.int32)
        whole[..., :num_channels] = basis
        whole[np.repeat(widths == 0, GROUP, axis=1)] = 0
        starts = -MIDDLE * whole.sum(axis=1, dtype=np.int32)
        means = np.zeros((num_bands, padded), np.float32)
        means[:, :num_channels] = mean.reshape(num_bands, num_channels)
        quads = whole.astype(np.int8).reshape(
            num_bands, num_numbers // 4, 4, padded // _PANEL, _PANEL
        )
        self.bands = kernels.Bands(
            np.ascontiguousarray(widths),
            np.ascontiguousarray(quads.transpose(0, 3, 1, 4, 2)).reshape(-1),
            starts.reshape(-1),
            means.reshape(-1),
            np.ascontiguousarray(scales),
            POWERS,
            LEVELS,
            num_channels,
        )
        self.row_bytes = num_bands + int(sums.sum())
        self.num_channels = num_bands * num_channels


def place_packed(
    rows: NDArray[np.uint8],
    first_byte: int,
    row_bytes: int,
    tokens: slice,
    keys: tuple[PackedBands, torch.Tensor],
    values: tuple[PackedBands, torch.Tensor] | None = None,
    rotation: Rotation[torch.Tensor] | None = None,
    first_position: int = 0,
) -> None:
    """Write n tokens of a chunk, with PyTorch's threads.

    Parameters
    ----------
    rows
        Bytes that hold a row for each token, keys first, and 8 more.
    first_byte, row_bytes
        Where the first row begins, and how far it is from one to the next.
    tokens
        The n tokens.
    keys, values
        What is written: ``[H, n, D]`` each, float32, bfloat16 or float16. The last stride is 1, the
        others are free. Without values, rows hold nothing else.
    rotation
        Tables of the prompt's positions, to turn keys by; None does not.
    first_position
        The first token's position.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    """
    bands, out = keys
    parts = (keys,) if values is None else (keys, values)
    shape = num_heads, count, head_dim = out.shape
    element_type = ELEMENT_TYPES.get(out.dtype, -1)
    for one, written in parts:
        is_here = written.device.type == "cpu" and written.dtype == out.dtype
        is_dense = head_dim < 2 or written.stride(2) == 1
        if not (is_here and is_dense) or written.shape != shape or element_type < 0:
            raise ParameterError(
                f"out: expected {list(shape)} of one type of floats on the CPU, channels next to "
                f"each other; found {list(written.shape)} {written.dtype} on {written.device}"
            )
        if num_heads * head_dim != one.num_channels:
            raise ParameterError(f"out: expected {one.num_channels} channels of a token")
    used = sum(one.row_bytes for one, _ in parts)
    end = first_byte + (tokens.stop - 1) * row_bytes + used + SLACK
    if tokens.stop - tokens.start != count or tokens.start < 0:
        raise ParameterError(f"out: found {list(shape)} for tokens {tokens}")
    if first_byte < 0 or row_bytes < used or end > len(rows) or rows.dtype != np.uint8:
        raise ParameterError(f"rows: expected {end} bytes, found {len(rows)}")
    angles = 0, 0, 0, 0
    if rotation is not None:
        cos, sin = rotation.cos, rotation.sin
        each = [(one.dtype, one.device.type, one.shape, one.stride()) for one in (cos, sin)]
        is_dense = cos.shape[1] < 2 or cos.stride(1) == 1
        is_fit = each[0] == each[1] and each[0][:2] == (torch.float32, "cpu") and is_dense
        if not is_fit or not 0 <= first_position <= len(cos) - count:
            raise ParameterError(
                f"rotation: expected float32 tables of {first_position + count} positions, found "
                f"{list(cos.shape)} {cos.dtype} and {list(sin.shape)} {sin.dtype}"
            )
        check_tables_width(cos.shape[1], head_dim)
        at = 4 * first_position * cos.stride(0)
        angles = cos.data_ptr() + at, sin.data_ptr() + at, cos.stride(0), cos.shape[1]
    if not count:
        return
    if not IS_COMPILED:
        whole = np.lib.stride_tricks.sliding_window_view(rows[first_byte:], used)[::row_bytes]
        _place_slowly(whole[tokens], parts, rotation, first_position)
        return
    more, into = (None, out) if values is None else (values[0].bands, values[1])
    kernels.place_packed(
        rows,
        first_byte,
        row_bytes,
        tokens.start,
        count,
        bands.bands,
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        more,
        into.data_ptr(),
        into.stride(0),
        into.stride(1),
        num_heads,
        head_dim,
        element_type,
        *angles,
        torch.get_num_threads(),
    )


def _place_slowly(
    rows: NDArray[np.uint8],
    parts: Sequence[tuple[PackedBands, torch.Tensor]],
    rotation: Rotation[torch.Tensor] | None,
    first_position: int,
) -> None:
    from kvrag.native import reference

    end = 0
    for bands, out in parts:
        begin, end = end, end + bands.row_bytes
        tables = None
        if rotation is not None and begin == 0:
            positions = slice(first_position, first_position + out.shape[1])
            tables = rotation.cos[positions].numpy(), rotation.sin[positions].numpy()
        made = cast("reference.Bands", bands.bands)
        reference.place_rows(made, rows[:, begin:end], out, tables)


def pack_rows(
    numbers: ArrayLike,
    widths: NDArray[np.uint8],
    weights: NDArray[np.float32],
    rows: NDArray[np.uint8],
) -> NDArray[np.float32]:
    """Write rows of some bands: the scale that loses least, and the numbers nearest to its.

    Parameters
    ----------
    numbers
        float32 ``[bands, T, K]``: what numbers stand for times the token's power, not rounded.
    widths
        uint8 ``[bands, K / 8]``.
    weights
        float32 ``[bands, K / 8]``: what an error of each eight numbers counts.
    rows
        uint8 ``[T, bytes]``; the last stride is 1.

    Returns
    -------
    array
        float32 ``[bands, T]``: what each row loses, squared and weighted.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    """
    num_bands, num_groups = widths.shape
    given = (num_bands, None, GROUP * num_groups)
    found = view(numbers, "numbers", np.float32, given, contiguous=True)
    shape = (found.shape[1], num_bands + int(widths.sum()))
    written = view(rows, "rows", np.uint8, shape, writable=True)
    lost = np.empty(found.shape[:2], np.float32)
    if weights.shape != widths.shape or weights.dtype != np.float32:
        raise ParameterError(f"weights: expected float32 {list(widths.shape)}")
    both = np.ascontiguousarray(widths), np.ascontiguousarray(weights)
    kernels.pack(found, *both, POWERS, _NEAREST, _MEANINGS, written, lost)
    return lost
