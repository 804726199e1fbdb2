"""What the kernels of ``cuda/triton/codec.py`` do, on the host, from the tables that they read."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import RecordError
from kvrag.native.entropy import RansModel, decode_rows
from kvrag.native.reconstruction import contexts, refine

_SLOTS = 4096
_NUMBERS = {
    ctypes.c_int32: np.int32,
    ctypes.c_int16: np.int16,
    ctypes.c_int8: np.int8,
    ctypes.c_float: np.float32,
}


def play(name: str, *arguments: Any, **constants: int) -> None:
    """Do what a kernel does, with the arguments that it is given."""
    played: dict[str, Callable[..., None]] = {
        "rans": _rans,
        "escapes": _escapes,
        "synthesise": _synthesise,
        "kept": _kept,
        "unpack": _unpack,
    }
    played[name](*arguments, **constants)


def _at(address: int, kind: Any, count: int) -> NDArray[Any]:
    return np.frombuffer((kind * count).from_address(address), _NUMBERS[kind])


@cache
def _model(tables: bytes) -> RansModel:
    """Return the model that decode tables were made from."""
    entries = np.frombuffer(tables, np.uint32).reshape(-1, _SLOTS)
    frequencies = np.zeros((len(entries), 256), np.uint16)
    for row, of_class in zip(frequencies, entries, strict=True):
        row[of_class & 255] = (of_class >> 8 & (_SLOTS - 1)) + 1
    return RansModel(frequencies)


def _rows(numbers: torch.Tensor, first: int, shape: tuple[int, int], stride: int) -> torch.Tensor:
    return numbers.as_strided(shape, (stride, 1), numbers.storage_offset() + first)


def _rans(
    payload: torch.Tensor,
    jobs: torch.Tensor,
    numbers: torch.Tensor,
    flags: torch.Tensor,
    counts: torch.Tensor,
    REFINES: int,  # noqa: N803  # as the kernel has it
) -> None:
    halves = payload.numpy()
    for place, job in enumerate(jobs.view(-1, 11).tolist()):
        where, num_words, tables, classes, first, num_rows, tokens, stride, *more = job
        known, flag, num_escaped = more
        row_classes = _at(classes, ctypes.c_int16, num_rows).astype(np.uint16)
        most = int(row_classes.max(initial=0)) + 1 + (2 if REFINES else 0)
        model = _model(_at(tables, ctypes.c_int32, most * _SLOTS).tobytes())
        stream = halves[where : where + 64 + num_words].tobytes()
        into = _rows(numbers, first, (num_rows, tokens), stride)
        before = into.contiguous() if REFINES else torch.zeros_like(into)
        before[known:] = 0
        context = np.empty((num_rows, tokens), np.uint8)
        contexts(before, context)
        symbols = np.full((num_rows, tokens), 128, np.uint8)
        try:
            given = struct.pack("<II", 1, len(stream)) + stream
            decode_rows(model, given, row_classes, symbols, context=context if REFINES else None)
        except RecordError:
            flags[flag] = 5
        if REFINES:
            refine(before, symbols)
            into.copy_(before)
        else:
            made = torch.from_numpy(symbols.astype(np.int16) - 128)
            counts[place] = int((made == -128).sum())
            if counts[place] and not num_escaped:
                flags[flag] = 8
            into.copy_(made)


def _escapes(
    payload: torch.Tensor,
    jobs: torch.Tensor,
    numbers: torch.Tensor,
    flags: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    for job in jobs.view(-1, 10).tolist():
        where, num_escaped, stream, start, stop, first, num_rows, tokens, stride, flag = job
        if int(counts[start:stop].sum()) != num_escaped:
            flags[flag] = 8
            continue
        before = int(counts[start:stream].sum())
        into = _rows(numbers, first, (num_rows, tokens), stride)
        found = into == -128
        into[found] = payload[where + before : where + before + int(found.sum())]


def _synthesise(
    numbers: torch.Tensor, entries: torch.Tensor, like: torch.Tensor, num_heads: int, **more: int
) -> None:
    head_dim, sums = more["D"], more["SUMS"]
    width = num_heads * head_dim
    for entry in entries.view(-1, 10).tolist():
        first, rows, tokens, basis, stride, shrink, steps, factors, means, into = entry
        points = _rows(numbers, first, (rows, tokens), tokens).float()
        points = points - points.sign() * torch.from_numpy(_floats(shrink, rows))[:, None]
        points *= torch.from_numpy(_floats(steps, rows))[:, None]
        if sums:
            count = (rows - 1) * stride + width if rows else 0
            held = _at(basis, ctypes.c_int16, count).view(np.float16)
            vectors = torch.from_numpy(held.copy()).as_strided((rows, width), (stride, 1))
            channels = vectors.float().T @ points
        else:
            whole = torch.zeros(max(rows, basis + width), tokens)
            whole[:rows] = points
            channels = whole[basis : basis + width]
        channels = channels * torch.from_numpy(_floats(factors, width))[:, None]
        channels = channels + torch.from_numpy(_floats(means, width))[:, None]
        made = channels.view(num_heads, head_dim, tokens).transpose(1, 2)
        size = made.numel() * like.itemsize
        _memory(into, size).view(like.dtype)[:] = made.to(like.dtype).flatten()


def _unpack(
    payload: torch.Tensor,
    entries: torch.Tensor,
    levels: torch.Tensor,
    powers: torch.Tensor,
    like: torch.Tensor,
    head_dim: int,
) -> None:
    for entry in entries.view(-1, 14).tolist():
        first, row_bytes, tokens, into, bands, band_bytes, numbers, channels = entry[:8]
        *addresses, begin, end = entry[8:]
        places = _at(addresses[0], ctypes.c_int32, bands * numbers).reshape(bands, numbers)
        bases = _at(addresses[1], ctypes.c_int8, bands * numbers * channels)
        means = _floats(addresses[3], bands * channels).reshape(bands, 1, channels)
        size = (tokens - 1) * row_bytes + bands * band_bytes
        whole = payload[first : first + size].numpy()
        shape, strides = (bands, tokens, band_bytes), (band_bytes, row_bytes, 1)
        rows = np.lib.stride_tricks.as_strided(whole, shape, strides).astype(np.int64)
        rows = np.pad(rows, ((0, 0), (0, 0), (0, 1)))
        width, at = places & 7, (places >> 6)[:, None]
        low, high = (np.take_along_axis(rows, at + more, axis=2) for more in (0, 1))
        number = (low | high << 8) >> (places >> 3 & 7)[:, None] & ((1 << width) - 1)[:, None]
        given = levels.numpy()[(1 << width)[:, None] + number] * (width > 0)[:, None]
        sums = given @ bases.reshape(bands, numbers, channels).astype(np.int64)
        factors = _floats(addresses[2], bands)[:, None] * powers.numpy()[rows[..., 0]]
        made = torch.from_numpy(sums.astype(np.float32) * factors[..., None] + means)
        wanted = made.transpose(0, 1).reshape(tokens, -1)[:, begin:end]
        heads = wanted.reshape(tokens, -1, head_dim).transpose(0, 1)
        target = _memory(into, heads.numel() * like.itemsize).view(like.dtype)
        target[:] = heads.to(like.dtype).flatten()


def _floats(address: int, count: int) -> NDArray[np.float32]:
    return _at(address, ctypes.c_float, count).copy()


def _memory(address: int, num_bytes: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _kept(payload: torch.Tensor, jobs: torch.Tensor) -> None:
    for job in jobs.view(-1, 7).tolist():
        where, num_channels, width, heads, first, by_head, by_layer = job
        shape, strides = (num_channels // width // heads, heads, width), (by_layer, by_head, 1)
        last = sum((num - 1) * step for num, step in zip(shape, strides, strict=True))
        into = _memory(first, 2 * (last + 1)).view(torch.int16).as_strided(shape, strides)
        into.copy_(payload[where : where + num_channels].view(shape))
