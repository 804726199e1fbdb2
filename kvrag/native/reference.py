"""The codecs' kernels in numpy, for where none were compiled: the same functions, slower.

All others are missing (`ATTENTION_TYPES` is empty): a model's own modules and PyTorch compute.

The arguments are those of ``kvrag/_native.pyi``; callers have checked them. The entropy coder's
bytes are those of the compiled one. Other results agree within rounding, since sums have another
order. ``threads`` counts for nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.native.reference_coder import Model, decode, encode, first_uncodable, ideal_bits

__all__ = [
    "INT8_PANEL",
    "Model",
    "channels",
    "contexts",
    "decode",
    "encode",
    "first_uncodable",
    "ideal_bits",
    "instruction_set",
    "instruction_sets",
    "refine",
    "transform",
    "use_instruction_set",
]

INT8_PANEL = 64

_NAME = "reference"
_ELEMENTS = {1: torch.bfloat16, 2: torch.float16}

_Floats = NDArray[np.float32]
_Elements = NDArray[np.float32] | NDArray[np.int16]
_Numbers = NDArray[np.uint8] | NDArray[np.int16]
_Patches = tuple[NDArray[np.uint32], NDArray[np.uint32], _Floats]


def instruction_set() -> str:
    return _NAME


def instruction_sets() -> list[str]:
    return [_NAME]


def use_instruction_set(name: str) -> bool:
    return name == _NAME


def transform(
    numbers: _Numbers,
    shrink: _Floats | None,
    patches: _Patches | None,
    basis: _Floats,
    mean: _Floats,
    out: _Elements,
    element_type: int,
    first_token: int,
    tables: tuple[_Floats, _Floats] | None,
    threads: int,
) -> None:
    del threads
    points = _points(numbers, shrink, patches, first_token, out.shape[1])
    _place(points.T @ basis + mean[:, None], out, element_type, tables)


def channels(
    numbers: _Numbers,
    shrink: _Floats | None,
    patches: _Patches | None,
    row_scale: _Floats | None,
    token_scale: _Floats | None,
    addend: _Floats | None,
    out: _Elements,
    element_type: int,
    first_token: int,
    tables: tuple[_Floats, _Floats] | None,
    threads: int,
) -> None:
    del threads
    num_heads, num_tokens, head_dim = out.shape
    tokens = slice(first_token, first_token + num_tokens)
    points = _points(numbers, shrink, patches, first_token, num_tokens)
    if row_scale is not None:
        points *= row_scale[:, None]
    if token_scale is not None:
        points *= token_scale[tokens]
    if addend is not None:
        points += addend[:, tokens]
    rows = points.reshape(num_heads, head_dim, num_tokens).transpose(0, 2, 1)
    _place(rows, out, element_type, tables)


def contexts(values: NDArray[np.int16], out: NDArray[np.uint8]) -> None:
    out[:] = np.minimum(np.abs(values.astype(np.int32)), 2)


def refine(values: NDArray[np.int16], symbols: NDArray[np.uint8]) -> None:
    digits = symbols.astype(np.int32) - 128
    finer = 3 * values.astype(np.int32) + np.where(values < 0, -digits, digits)
    values[:] = np.clip(finer, -32767, 32767)


def _points(
    numbers: _Numbers,
    shrink: _Floats | None,
    patches: _Patches | None,
    first_token: int,
    num_tokens: int,
) -> _Floats:
    """Return the points ``[R, n]`` of the n tokens from the first one on."""
    end = first_token + num_tokens
    points = numbers[:, first_token:end].astype(np.float32)
    if numbers.dtype == np.uint8:
        points -= 128
    if shrink is not None:
        points -= np.sign(points) * shrink[:, None]
    if patches is not None:
        rows, tokens, values = patches
        inside = (tokens >= first_token) & (tokens < end)
        points[rows[inside], tokens[inside] - first_token] = values[inside]
    return points


def _place(
    rows: _Floats,
    out: _Elements,
    element_type: int,
    tables: tuple[_Floats, _Floats] | None,
) -> None:
    """Write ``[H, n, D]`` to `out`, rotated if there are tables, in its type."""
    if tables is not None:
        half = tables[0].shape[1] // 2
        cos, sin = (table[:, :half] for table in tables)
        first, second = rows[..., :half], rows[..., half : 2 * half]
        rows = np.concatenate(
            [first * cos - second * sin, second * cos + first * sin, rows[..., 2 * half :]], axis=2
        )
    if element_type:
        found = torch.from_numpy(np.ascontiguousarray(rows)).to(_ELEMENTS[element_type])
        out[:] = found.view(torch.int16).numpy()
    else:
        out[:] = rows
