"""Keys and values as numbers of fixed width: rows of bytes to the fused buffer, and back.

A band is some channels of a layer's keys or values. Its channels are
``mean + scale * power * (basis^T c)``, where the basis has 8 bits and ``power`` is the token's,
by a byte. A number of w bits, u, is the odd number ``c = 2 u + 1 - 2^w``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError
from kvrag.native.arrays import ArrayLike, view
from kvrag.native.kernels import kernels
from kvrag.native.reconstruction import Rotation, first_of_tokens, output, tables

GROUP = 8
"""Numbers that lie together, and have one width."""
MOST_BITS = 7
SLACK = 7
"""Bytes that must be readable behind the last row."""
POWERS = np.exp2((np.arange(256) - 128) / 8).astype(np.float32)
"""What the byte of a token's scale stands for."""
_PANEL = 64


class PackedBands:
    """The bases of one layer's keys or values, prepared for decoding.

    Parameters
    ----------
    widths
        uint8 ``[bands, K / 8]``, at most 7; they add up to the same in all bands.
    basis
        int8 ``[bands, K, n]``: K numbers to n channels.
    scales
        float32 ``[bands]``.
    mean
        float32 ``[bands n]``.

    Attributes
    ----------
    row_bytes
        Bytes of a token: of each band its scale, then its numbers.
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
        lowest = 1 - (1 << np.repeat(widths.astype(np.int32), GROUP, axis=1))
        starts = (whole * lowest[..., None]).sum(axis=1, dtype=np.int32)
        means = np.zeros((num_bands, padded), np.float32)
        means[:, :num_channels] = mean.reshape(num_bands, num_channels)
        quads = whole.astype(np.int8).reshape(
            num_bands, num_numbers // 4, 4, padded // _PANEL, _PANEL
        )
        self._bands = kernels.Bands(
            np.ascontiguousarray(widths),
            np.ascontiguousarray(quads.transpose(0, 3, 1, 4, 2)).reshape(-1),
            starts.reshape(-1),
            means.reshape(-1),
            np.ascontiguousarray(scales),
            POWERS,
            num_channels,
        )
        self.row_bytes = num_bands + int(sums.sum())
        self._num_channels = num_bands * num_channels

    def place(
        self,
        rows: NDArray[np.uint8],
        first_byte: int,
        row_bytes: int,
        num_tokens: int,
        out: torch.Tensor,
        *,
        rotation: Rotation[ArrayLike] | None = None,
        tokens: slice | None = None,
    ) -> None:
        """Write n tokens of a chunk, with PyTorch's threads.

        Parameters
        ----------
        rows
            Bytes that hold a row for each token, and 7 more.
        first_byte, row_bytes
            Where the first row begins, and how far it is from one to the next.
        num_tokens
            Tokens of the chunk.
        out
            ``[H, n, D]``, float32, bfloat16 or float16. The last stride is 1, the others are free.
        rotation
            The tables of the n tokens' positions; None does not rotate.
        tokens
            The n tokens; None for all.

        Raises
        ------
        ParameterError
            If an argument has the wrong shape or type.
        """
        placed, element_type = output(out)
        if placed.shape[0] * placed.shape[2] != self._num_channels:
            raise ParameterError(f"out: expected {self._num_channels} channels of a token")
        end = first_byte + (num_tokens - 1) * row_bytes + self.row_bytes + SLACK
        if row_bytes < self.row_bytes or end > len(rows):
            raise ParameterError(f"rows: expected {end} bytes, found {len(rows)}")
        kernels.place_packed(
            self._bands,
            rows,
            first_byte,
            row_bytes,
            num_tokens,
            placed,
            element_type,
            first_of_tokens(tokens, num_tokens, placed.shape[1]),
            tables(rotation, placed),
            torch.get_num_threads(),
        )


def pack_rows(numbers: ArrayLike, widths: NDArray[np.uint8], rows: NDArray[np.uint8]) -> None:
    """Write the rows of one band: the scale that loses least, and the numbers nearest to its.

    Parameters
    ----------
    numbers
        float32 ``[T, K]``: the odd numbers times the token's power, not rounded.
    widths
        uint8 ``[K / 8]``.
    rows
        uint8 ``[T, bytes]``; the last stride is 1.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape or type.
    """
    found = view(numbers, "numbers", np.float32, (None, GROUP * len(widths)), contiguous=True)
    shape = (len(found), 1 + int(widths.sum()))
    written = view(rows, "rows", np.uint8, shape, writable=True)
    kernels.pack(found, np.ascontiguousarray(widths), POWERS, written)
