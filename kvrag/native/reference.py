"""The codecs' kernels in numpy, for where none were compiled: the same functions, slower.

All others are missing (`ATTENTION_TYPES` is empty): a model's own modules and PyTorch compute.

The arguments are those of ``kvrag/_native.pyi``; callers have checked them. The entropy coder's
bytes are those of the compiled one. Other results agree within rounding, since sums have another
order. ``threads`` counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# The entropy coder in numpy: the same bytes and the same damage as the compiled one, slower.
#
# ``cuda/include/kvrag/rans.h`` describes the bytes. All streams of a payload advance together, a
# vector of 32 lanes each.


_LANES = 32
_STATE_BYTES = 4 * _LANES
_LOWER_BOUND = 1 << 16
_BITS = 12
_SLOTS = 1 << _BITS
_MAX_SYMBOLS = 256

_Bytes = NDArray[np.uint8]
_Classes = NDArray[np.uint16]
_Contexts = _Bytes | None
_Report = tuple[int, int, int, int]

# Codes of damage, as `kvrag.native.entropy` explains them.
_SOUND, _COUNT, _PAYLOAD, _STREAM, _INITIAL, _MISSING, _LEFT, _FINAL = range(8)


class Model:
    """Frequency tables ``[num_classes, num_symbols]`` and what is looked up in them."""

    def __init__(self, frequencies: _Classes) -> None:
        self.num_classes, self.num_symbols = frequencies.shape
        starts = np.cumsum(frequencies, axis=1, dtype=np.uint32) - frequencies
        self.frequencies = np.zeros((self.num_classes, _MAX_SYMBOLS), np.uint32)
        self.frequencies[:, : self.num_symbols] = frequencies
        self.starts = np.zeros_like(self.frequencies)
        self.starts[:, : self.num_symbols] = starts
        # By slot: symbol | (frequency - 1) << 8 | (slot - start) << 20.
        entry = np.arange(self.num_symbols, dtype=np.uint32) | (
            (frequencies.astype(np.uint32) - 1) & (_SLOTS - 1)
        ) << np.uint32(8)
        slots = np.tile(np.arange(_SLOTS, dtype=np.uint32), self.num_classes)
        counts = frequencies.reshape(-1)
        offsets = slots - np.repeat(starts.reshape(-1), counts)
        self.slots = np.repeat(entry.reshape(-1), counts) | offsets << np.uint32(20)


def encode(
    model: Model,
    symbols: _Bytes,
    classes: _Classes,
    contexts: _Contexts,
    num_streams: int,
    threads: int,  # noqa: ARG001
) -> bytes | None:
    places = _places(classes, contexts, symbols.shape, _MAX_SYMBOLS) + symbols
    frequencies, starts = model.frequencies.reshape(-1), model.starts.reshape(-1)
    if not frequencies[places].all():
        return None
    ends = _first_rows(num_streams, len(symbols))[1:]
    counts = np.diff(ends, prepend=0)
    states = np.full((num_streams, _LANES), _LOWER_BOUND, np.uint32)
    words: list[NDArray[np.uint16]] = []
    streams: list[NDArray[np.int64]] = []
    # From the end: a decoder takes the words in the other order.
    for back in range(int(counts.max(initial=0))):
        active = np.flatnonzero(counts > back)
        rows = places[ends[active] - 1 - back]
        for first in reversed(range(0, symbols.shape[1], _LANES)):
            place = rows[:, first : first + _LANES]
            width = place.shape[1]
            state = states[active, :width]
            frequency = frequencies[place]
            full = state >> np.uint32(32 - _BITS) >= frequency
            if full.any():
                words.append(state[full].astype(np.uint16))
                streams.append(active[np.nonzero(full)[0]])
                state[full] >>= np.uint32(16)
            whole, rest = np.divmod(state, frequency)
            states[active, :width] = (whole << np.uint32(_BITS)) + rest + starts[place]
    taken = np.concatenate([*reversed(words), np.empty(0, np.uint16)])
    owners = np.concatenate([*reversed(streams), np.empty(0, np.int64)])
    parts = [
        states[stream].astype("<u4").tobytes() + taken[owners == stream].astype("<u2").tobytes()
        for stream in range(num_streams)
    ]
    index = np.array([num_streams, *map(len, parts)], "<u4")
    return index.tobytes() + b"".join(parts)


def decode(
    jobs: Sequence[tuple[Model, _Bytes, _Classes, _Bytes, _Contexts]],
    threads: int,  # noqa: ARG001
) -> list[_Report]:
    return [_decode(*job) for job in jobs]


def _frequencies(
    model: Model, symbols: _Bytes, classes: _Classes, contexts: _Contexts
) -> NDArray[np.uint32]:
    places = _places(classes, contexts, symbols.shape, _MAX_SYMBOLS) + symbols
    found: NDArray[np.uint32] = model.frequencies.reshape(-1)[places]
    return found


def ideal_bits(model: Model, symbols: _Bytes, classes: _Classes, contexts: _Contexts) -> float:
    frequencies = _frequencies(model, symbols, classes, contexts)
    with np.errstate(divide="ignore"):
        return float((_BITS - np.log2(frequencies)).sum())


def first_uncodable(
    model: Model, symbols: _Bytes, classes: _Classes, contexts: _Contexts
) -> tuple[int, int]:
    row, token = np.argwhere(_frequencies(model, symbols, classes, contexts) == 0)[0]
    return int(row), int(token)


def _places(
    classes: _Classes, contexts: _Contexts, shape: tuple[int, ...], size: int
) -> NDArray[np.int64]:
    """Return where each symbol's table of `size` entries begins, ``[R, T]``."""
    tables = classes.astype(np.int64)[:, None]
    if contexts is not None:
        tables = tables + contexts
    return np.broadcast_to(tables * size, shape)


def _first_rows(num_streams: int, num_rows: int) -> NDArray[np.int64]:
    """Return the row at which each stream begins, and the end."""
    return np.arange(num_streams + 1, dtype=np.int64) * num_rows // num_streams


def _decode(
    model: Model, payload: _Bytes, classes: _Classes, out: _Bytes, contexts: _Contexts
) -> _Report:
    raw = payload.tobytes()
    most = max(len(out), 1)
    if len(raw) < 4:
        return _PAYLOAD, 0, 4, len(raw)
    num_streams = int.from_bytes(raw[:4], "little")
    if not 1 <= num_streams <= most:
        return _COUNT, 0, most, num_streams
    index_bytes = 4 + 4 * num_streams
    if len(raw) < index_bytes:
        return _PAYLOAD, 0, index_bytes, len(raw)
    sizes = np.frombuffer(raw, "<u4", num_streams, 4).astype(np.int64)
    needed = index_bytes + int(sizes.sum())
    if needed != len(raw):
        return _PAYLOAD, 0, needed, len(raw)
    damage = np.full(num_streams, _SOUND)
    states = np.full((num_streams, _LANES), _LOWER_BOUND, np.uint32)
    begins = np.cumsum(sizes) - sizes + index_bytes
    parts = []
    for stream, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        if size < _STATE_BYTES or size % 2:
            damage[stream] = _STREAM
            parts.append(np.empty(0, np.uint16))
            continue
        states[stream] = np.frombuffer(raw, "<u4", _LANES, begin)
        count = (int(size) - _STATE_BYTES) // 2
        parts.append(np.frombuffer(raw, "<u2", count, begin + _STATE_BYTES))
        if (states[stream] < _LOWER_BOUND).any():
            damage[stream] = _INITIAL
    places = _places(classes, contexts, out.shape, _SLOTS)
    _decode_streams(model, places, out, states, parts, damage)
    if not damage.any():
        return _SOUND, 0, 0, 0
    first = int(np.flatnonzero(damage)[0])
    return int(damage[first]), first, 0, int(sizes[first])


def _decode_streams(
    model: Model,
    places: NDArray[np.int64],
    out: _Bytes,
    states: NDArray[np.uint32],
    parts: list[NDArray[np.uint16]],
    damage: NDArray[np.int64],
) -> None:
    """Decode the streams that are not damaged so far; write to `damage` what is found then."""
    starts = _first_rows(len(parts), len(out))
    counts = np.diff(starts)
    # A damaged stream may ask for more words than there are: it reads the last one again.
    words = np.concatenate([*parts, np.zeros(1, np.uint16)]).astype(np.uint32)
    ends = np.cumsum([len(part) for part in parts])
    following = ends - [len(part) for part in parts]
    for row in range(int(counts.max(initial=0))):
        active = np.flatnonzero((counts > row) & (damage == _SOUND))
        rows = starts[active] + row
        tables = places[rows]
        next_word = following[active]
        for first in range(0, out.shape[1], _LANES):
            table = tables[:, first : first + _LANES]
            width = table.shape[1]
            state = states[active, :width]
            entry = model.slots[table + (state & np.uint32(_SLOTS - 1))]
            out[rows, first : first + width] = entry.astype(np.uint8)
            frequency = (entry >> np.uint32(8) & np.uint32(_SLOTS - 1)) + np.uint32(1)
            state = frequency * (state >> np.uint32(_BITS)) + (entry >> np.uint32(20))
            empty = state < _LOWER_BOUND
            order = np.cumsum(empty, axis=1)
            word = (next_word[:, None] + order - 1)[empty]
            state[empty] = state[empty] << np.uint32(16) | words.take(word, mode="clip")
            next_word = next_word + order[:, -1]
            states[active, :width] = state
        following[active] = next_word
    sound = damage == _SOUND
    damage[sound & (states != _LOWER_BOUND).any(axis=1)] = _FINAL
    damage[sound & (following < ends)] = _LEFT
    damage[sound & (following > ends)] = _MISSING


GROUP = 32
INT8_PANEL = 64

_NAME = "reference"
_ELEMENTS = {1: torch.bfloat16, 2: torch.float16}

_Floats = NDArray[np.float32]
_Elements = NDArray[np.float32] | NDArray[np.int16]
_Numbers = _Bytes | NDArray[np.int16]
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
    threads: int,  # noqa: ARG001
) -> None:
    points = _points(numbers, shrink, patches, first_token, out.shape[1])
    _place(points.T @ basis + mean[:, None], out, element_type, tables)


class Bands:
    """Bases of packed rows; `kvrag.native.packed` describes them."""

    def __init__(
        self,
        widths: _Bytes,
        basis: NDArray[np.int8],
        starts: NDArray[np.int32],
        mean: _Floats,
        scales: _Floats,
        powers: _Floats,
        levels: _Bytes,
        band_channels: int,
    ) -> None:
        num_bands = len(widths)
        panels = basis.reshape(num_bands, -1, 2 * widths.shape[1], 32, 4)
        whole = panels.transpose(0, 2, 4, 1, 3).reshape(num_bands, 8 * widths.shape[1], -1)
        self.widths, self.scales, self.powers, self.levels = widths, scales, powers, levels
        self.basis = whole[..., :band_channels].astype(np.float32)
        self.mean = mean.reshape(num_bands, -1)[:, :band_channels]
        self.starts = starts.reshape(num_bands, -1)[:, :band_channels]


def place_rows(
    bands: Bands, rows: _Bytes, out: torch.Tensor, tables: tuple[_Floats, _Floats] | None
) -> None:
    """Write a token of `out` ``[H, n, D]`` for each packed row."""
    end, channels = 0, []
    for widths, basis, starts, mean, scale in zip(
        bands.widths, bands.basis, bands.starts, bands.mean, bands.scales, strict=True
    ):
        begin, end = end, end + 1 + int(widths.sum())
        numbers = bands.levels[_unpack(rows[:, begin + 1 : end], widths) + _firsts(widths)]
        factor = scale * bands.powers[rows[:, begin]]
        # Sums below 2^24 are exact.
        whole = 2 * (numbers.astype(np.float32) @ basis) + starts
        channels.append(whole * factor[:, None] + mean)
    num_heads, count, head_dim = out.shape
    heads = np.concatenate(channels, axis=1).reshape(count, num_heads, head_dim)
    found = np.empty((num_heads, count, head_dim), np.float32)
    _place(heads.transpose(1, 0, 2), found, 0, tables)
    out.copy_(torch.from_numpy(found))


def _firsts(widths: _Bytes) -> NDArray[np.int64]:
    """Return where the levels of each of a band's numbers begin."""
    return np.repeat(1 << widths.astype(np.int64), 8)


def _unpack(fields: _Bytes, widths: _Bytes) -> NDArray[np.int64]:
    """Return int64 ``[T, 8 groups]`` of bits ``[T, bytes]``."""
    bits = np.unpackbits(fields, axis=1, bitorder="little")
    numbers, end = np.zeros((len(fields), 8 * len(widths)), np.int64), 0
    for group, width in enumerate(widths.tolist()):
        begin, end = end, end + 8 * width
        digits = bits[:, begin:end].reshape(len(fields), 8, width)
        numbers[:, 8 * group : 8 * group + 8] = digits @ (1 << np.arange(width))
    return numbers


def pack(
    numbers: _Floats,
    widths: _Bytes,
    weights: _Floats,
    powers: _Floats,
    nearest: _Bytes,
    meanings: _Floats,
    rows: _Bytes,
    lost: _Floats,
) -> None:
    end = 0
    for band, width in enumerate(widths):
        begin, end = end, end + 1 + int(width.sum())
        tables = powers, nearest, meanings
        made = _packed(numbers[band], width, weights[band], tables, lost[band])
        rows[:, begin:end] = made


def _packed(
    numbers: _Floats,
    widths: _Bytes,
    weights: _Floats,
    tables: tuple[_Floats, _Bytes, _Floats],
    lost: _Floats,
) -> _Bytes:
    """Return the rows of a band, and write what each loses."""
    powers, nearest, meanings = tables
    tries = 12
    widths_of, weights_of = np.repeat(widths, 8), np.repeat(weights, 8)
    needed = np.divide(
        np.abs(numbers), meanings[widths_of, 255], out=np.zeros_like(numbers), where=widths_of > 0
    )
    first = np.searchsorted(powers, needed.max(axis=1, initial=0)).clip(max=255)
    lost[:] = np.inf
    chosen = first.copy()
    packed = np.zeros(numbers.shape, np.uint8)
    for less in range(tries):
        power = (first - less).clip(min=0)
        scale = powers[power][:, None]
        places = (numbers / scale + 127).clip(0, 254).astype(np.int32)
        stored = meanings[widths_of, places] * scale
        found = (np.square(numbers - stored) * weights_of).sum(axis=1)
        better = found < lost
        lost[better], chosen[better] = found[better], power[better]
        packed[better] = nearest[widths_of, places][better]
    parts = [chosen.astype(np.uint8)[:, None]]
    for group, width in enumerate(widths.tolist()):
        digits = packed[:, 8 * group : 8 * group + 8, None] >> np.arange(width) & 1
        bits = digits.astype(np.uint8).reshape(len(packed), 8 * width)
        parts.append(np.packbits(bits, axis=1, bitorder="little"))
    return np.concatenate(parts, axis=1)


def contexts(values: NDArray[np.int16], out: _Bytes) -> None:
    out[:] = np.minimum(np.abs(values.astype(np.int32)), 2)


def refine(values: NDArray[np.int16], symbols: _Bytes) -> None:
    digits = symbols.astype(np.int32) - 128
    finer = 3 * values.astype(np.int32) + np.where(values < 0, -digits, digits)
    values[:] = np.clip(finer, -32767, 32767)


def _points(
    numbers: _Numbers, shrink: _Floats | None, patches: _Patches | None, first: int, count: int
) -> _Floats:
    """Return the points ``[R, n]`` of the n tokens from the first one on."""
    end = first + count
    points = numbers[:, first:end].astype(np.float32)
    if numbers.dtype == np.uint8:
        points -= 128
    if shrink is not None:
        points -= np.sign(points) * shrink[:, None]
    if patches is not None:
        rows, tokens, values = patches
        inside = (tokens >= first) & (tokens < end)
        points[rows[inside], tokens[inside] - first] = values[inside]
    return points


def _place(
    rows: _Floats, out: _Elements, element_type: int, tables: tuple[_Floats, _Floats] | None
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
