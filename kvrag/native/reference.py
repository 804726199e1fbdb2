"""The kernels in numpy and torch, for where none were compiled: the same functions, slower.

Only ``Layers`` is missing: a model's own modules compute instead.

The arguments are those of ``kvrag/_native.pyi``; callers have checked them. The entropy coder's
bytes are those of the compiled one. Other results agree within rounding, since sums have another
order. ``threads`` counts for nothing: numpy and torch decide on theirs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kvrag.native.reference_coder import Model, decode, encode, first_uncodable, ideal_bits

__all__ = [
    "INT8_PANEL",
    "Model",
    "attend",
    "attend_each",
    "channels",
    "contexts",
    "decode",
    "encode",
    "first_uncodable",
    "gate",
    "ideal_bits",
    "instruction_set",
    "instruction_sets",
    "int8_linear",
    "linear",
    "norm",
    "refine",
    "rotate",
    "transform",
    "use_instruction_set",
]

INT8_PANEL = 64

_NAME = "reference"
_ELEMENTS = {1: torch.bfloat16, 2: torch.float16}
# Sums of this many products of 8 bits are whole numbers in float32.
_EXACT_INPUTS = 1024
_SMALLEST_PEAK = 1e-30
# Scores that exist at once take at most this many numbers.
_MAX_SCORES = 1 << 24

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


def attend(
    query: _Elements,
    key: _Elements,
    value: _Elements,
    last_keys: NDArray[np.int64],
    out: _Elements,
    window: int,
    scale: float,
    softcap: float,
    mass: _Floats | None,
    first_counted: int,
    threads: int,
) -> None:
    del threads
    num_heads, num_rows, _ = query.shape
    num_kv_heads, num_keys, value_dim = value.shape
    if mass is not None:
        mass[:] = 0
    if not out.size:
        return
    keys, values = _tensor(key).float(), _tensor(value).float()
    # The query heads of one key head are rows next to each other.
    asked = _tensor(query).float().reshape(num_kv_heads, -1, num_rows, query.shape[2]) * scale
    lasts = torch.from_numpy(last_keys.copy())
    written = _tensor(out)
    block = max(1, _MAX_SCORES // (num_heads * num_keys))
    for first in range(0, num_rows, block):
        rows = slice(first, min(first + block, num_rows))
        last = lasts[rows, None]
        # Rows see no keys outside these.
        seen = slice(max(0, int(last[0]) - window + 1), int(last[-1]) + 1)
        scores = asked[:, :, rows] @ keys[:, None, seen].transpose(2, 3)
        if softcap:
            scores = (scores / softcap).tanh_().mul_(softcap)
        places = torch.arange(seen.start, seen.stop)
        hidden = (places > last) | (places <= last - window)
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        found = weights @ values[:, None, seen]
        shape = (-1, num_heads, value_dim)
        written[rows] = found.permute(2, 0, 1, 3).reshape(shape).to(written.dtype)
        if mass is not None:
            counted = weights[:, :, max(0, first_counted - first) :]
            mass[:, seen] += counted.sum((1, 2)).numpy()


def attend_each(
    query: _Elements,
    key: _Elements,
    value: _Elements,
    key_addresses: NDArray[np.int64],
    value_addresses: NDArray[np.int64],
    capacities: NDArray[np.int64],
    places: NDArray[np.int64],
    out: _Elements,
    window: int,
    scale: float,
    softcap: float,
    threads: int,
) -> None:
    num_kv_heads, num_rows, dim = key.shape
    for row in range(num_rows):
        shape = (num_kv_heads, int(capacities[row]), dim)
        place = int(places[row])
        buffers = []
        for addresses, new in ((key_addresses, key), (value_addresses, value)):
            buffer = _at(int(addresses[row]), shape, key.dtype)
            buffer[:, place] = new[:, row]
            buffers.append(buffer[:, : place + 1])
        one = slice(row, row + 1)
        attend(
            query[:, one],
            buffers[0],
            buffers[1],
            places[one],
            out[one],
            window,
            scale,
            softcap,
            None,
            0,
            threads,
        )


def linear(
    input: int,
    weight: int,
    bias: int,
    out: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: bool,
    threads: int,
) -> None:
    del threads
    kind = np.dtype(np.int16 if is_bfloat16 else np.float32)
    rows, weights = (
        _tensor(_at(address, (count, num_inputs), kind))
        for address, count in ((input, num_rows), (weight, num_outputs))
    )
    added = _tensor(_at(bias, (num_outputs,), kind)) if bias else None
    written = _tensor(_at(out, (num_rows, num_outputs), kind))
    written.copy_(functional.linear(rows, weights, added))


def norm(
    input: int,
    weight: int,
    out: int,
    num_rows: int,
    width: int,
    epsilon: float,
    adds_one: bool,
    is_bfloat16: bool,
    threads: int,
) -> None:
    del threads
    kind = np.dtype(np.int16 if is_bfloat16 else np.float32)
    rows, factors, written = (
        _tensor(_at(address, shape, kind))
        for address, shape in (
            (input, (num_rows, width)),
            (weight, (width,)),
            (out, (num_rows, width)),
        )
    )
    wide = rows.float()
    made = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    written.copy_(made * (1 + factors.float()) if adds_one else made.to(rows.dtype) * factors)


def gate(
    gate: int, up: int, out: int, count: int, is_gelu: bool, is_bfloat16: bool, threads: int
) -> None:
    del threads
    kind = np.dtype(np.int16 if is_bfloat16 else np.float32)
    opening, passing, written = (
        _tensor(_at(address, (count,), kind)) for address in (gate, up, out)
    )
    opened = functional.gelu(opening, approximate="tanh") if is_gelu else functional.silu(opening)
    written.copy_(opened * passing)


def rotate(
    input: int,
    out: int,
    cos: int,
    sin: int,
    input_head_stride: int,
    input_token_stride: int,
    out_head_stride: int,
    out_token_stride: int,
    angle_stride: int,
    num_heads: int,
    num_tokens: int,
    head_dim: int,
    num_rotated: int,
    is_bfloat16: bool,
) -> None:
    kind = np.dtype(np.int16 if is_bfloat16 else np.float32)
    shape = (num_heads, num_tokens, head_dim)
    rows = _spread(input, shape, (input_head_stride, input_token_stride, 1), kind)
    written = _spread(out, shape, (out_head_stride, out_token_stride, 1), kind)
    half = num_rotated // 2
    cosines, sines = (
        _spread(angle, (num_tokens, half), (angle_stride, 1), np.dtype(np.float32))
        for angle in (cos, sin)
    )
    first, second = rows[..., :half].float(), rows[..., half:num_rotated].float()
    written[..., :half] = first * cosines - second * sines
    written[..., half:num_rotated] = second * cosines + first * sines
    written[..., num_rotated:] = rows[..., num_rotated:]


def int8_linear(
    input: int,
    weight: int,
    scale: int,
    bias: int,
    out: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: bool,
    threads: int,
) -> None:
    del threads
    kind = np.dtype(np.int16 if is_bfloat16 else np.float32)
    rows = _tensor(_at(input, (num_rows, num_inputs), kind)).float()
    panels, quads = -(-num_outputs // INT8_PANEL), -(-num_inputs // 4)
    laid = torch.from_numpy(_at(weight, (panels, quads, INT8_PANEL, 4), np.dtype(np.uint8)))
    scales, added = (
        torch.from_numpy(_at(address, (num_outputs,), np.dtype(np.float32)))
        for address in (scale, bias)
    )
    peak = rows.abs().amax(1, keepdim=True)
    is_finite = peak.isfinite()
    factor = torch.where(is_finite & (peak > _SMALLEST_PEAK), 127 / peak, 0)
    # Zeros in place of numbers that are not finite: the row's scale says that they give NaN.
    whole = (torch.where(is_finite, rows, 0) * factor).round_()
    sums = torch.zeros(num_rows, num_outputs, dtype=torch.float64)
    for first in range(0, num_inputs, _EXACT_INPUTS):
        inputs = slice(first, min(first + _EXACT_INPUTS, num_inputs))
        part = laid[:, inputs.start // 4 : -(-inputs.stop // 4)].transpose(1, 2).flatten(0, 1)
        weights = part[:num_outputs].flatten(1)[:, : inputs.stop - inputs.start].float() - 128
        sums += whole[:, inputs] @ weights.T
    row_scales = torch.where(is_finite, torch.where(factor > 0, peak / 127, 0), float("nan"))
    written = _tensor(_at(out, (num_rows, num_outputs), kind))
    written.copy_(sums.float() * (row_scales * scales) + added)


def _at(address: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return the array at an address; the caller keeps the memory alive."""
    size = int(np.prod(shape)) * kind.itemsize
    if not size:
        return np.empty(shape, kind)
    memory = memoryview((ctypes.c_uint8 * size).from_address(address))
    return np.frombuffer(memory, kind).reshape(shape)


def _spread(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: np.dtype[Any]
) -> torch.Tensor:
    """Return the tensor with these strides at an address."""
    size = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    return _tensor(_at(address, (size,), kind)).as_strided(shape, strides)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor over an array's memory; 16 bits are those of bfloat16."""
    found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if array.dtype == np.int16 else found


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
