"""Blocks of GGUF files, taken apart: whole numbers, their scales, and what 0 stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[Any]  # of uint8: numpy's operators forget it
_Floats = npt.NDArray[np.float32]


class Parts(NamedTuple):
    """A matrix: a weight is ``number * scale + least``; without `least`, less half of the range.

    Attributes
    ----------
    bits
        Of a number.
    numbers
        ``[N, K]``.
    scale, least
        ``[N, K / 32]``; a `scale` with 6 bits is ``[N, K / 16]``.
    """

    bits: int
    numbers: _Bytes
    scale: _Floats
    least: _Floats | None

    def values(self) -> _Floats:
        """Return the weights, rounded as the ``gguf`` package rounds them."""
        found = self.numbers.astype(np.float32).reshape(*self.scale.shape, -1)
        if self.least is None:
            found -= np.float32(1 << (self.bits - 1))
        found *= self.scale[..., None]
        if self.least is not None:
            found += self.least[..., None]
        return found.reshape(self.numbers.shape)


def take_apart(kind: str, rows: _Bytes) -> Parts:
    """Return the parts of rows of blocks ``[N, bytes]`` of a type in `KINDS`."""
    block_bytes, _, take = KINDS[kind]
    bits, numbers, scale, least = take(rows.reshape(-1, block_bytes))
    num_rows = len(rows)
    return Parts(
        bits,
        numbers.reshape(num_rows, -1),
        scale.reshape(num_rows, -1),
        None if least is None else least.reshape(num_rows, -1),
    )


_Taken = tuple[int, _Bytes, _Floats, _Floats | None]


def _halves(two: _Bytes) -> _Floats:
    return np.ascontiguousarray(two).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes, width: int) -> _Bytes:
    """Return low, then high halves of each `width` bytes."""
    runs = packed.reshape(len(packed), -1, width)
    return np.stack([runs & 15, runs >> 4], 2).reshape(len(packed), -1)


def _fours(blocks: _Bytes, *, has_least: bool) -> _Taken:
    least = _halves(blocks[:, 2:4]) if has_least else None
    return 4, _nibbles(blocks[:, -16:], 16), _halves(blocks[:, :2]), least


def _fives(blocks: _Bytes, *, has_least: bool) -> _Taken:
    _, low, scale, least = _fours(blocks, has_least=has_least)
    high = np.unpackbits(np.ascontiguousarray(blocks[:, -20:-16]), axis=1, bitorder="little")
    return 5, low | high << 4, scale, least


def _eights(blocks: _Bytes) -> _Taken:
    return 8, blocks[:, 2:] ^ 128, _halves(blocks[:, :2]), None


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Return scales and least of eight groups: six bits each, in twelve bytes."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 2 & 48], 1).astype(np.float32)
    least = np.concatenate([mid & 63, high >> 4 | mid >> 2 & 48], 1).astype(np.float32)
    return _halves(blocks[:, :2]) * scale, _halves(blocks[:, 2:4]) * -least


def _k_fours(blocks: _Bytes) -> _Taken:
    return 4, _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _k_fives(blocks: _Bytes) -> _Taken:
    low, high = _nibbles(blocks[:, 48:], 32), blocks[:, None, 16:48]
    bits = high >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return 5, low | bits.reshape(low.shape) << 4, *_k_scales(blocks)


def _k_sixes(blocks: _Bytes) -> _Taken:
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    scale = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return 6, low | (high & 3).reshape(low.shape) << 4, scale, None


def greatest(kind: str, rows: _Bytes) -> Any:
    """Return a number that no scale or least of rows ``[N, bytes]`` is above."""
    block_bytes, weights, _ = KINDS[kind]
    blocks = rows.reshape(-1, block_bytes)
    halves = [blocks[:, 208:]] if kind == "Q6_K" else [blocks[:, :2], blocks[:, 2:4]]
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        halves.pop()
    return max(float(np.abs(_halves(two)).max()) for two in halves) * (128 if weights > 32 else 1)


KINDS: dict[str, tuple[int, int, Callable[[Any], _Taken]]] = {
    "Q4_0": (18, 32, lambda blocks: _fours(blocks, has_least=False)),
    "Q4_1": (20, 32, lambda blocks: _fours(blocks, has_least=True)),
    "Q5_0": (22, 32, lambda blocks: _fives(blocks, has_least=False)),
    "Q5_1": (24, 32, lambda blocks: _fives(blocks, has_least=True)),
    "Q8_0": (34, 32, _eights),
    "Q4_K": (144, 256, _k_fours),
    "Q5_K": (176, 256, _k_fives),
    "Q6_K": (210, 256, _k_sixes),
}
"""Types of blocks by name: their bytes, their weights, and what takes them apart."""
