"""The coder once more, one symbol at a time, from the description of the bytes alone."""

import struct
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LANES = 32
LOWER = 1 << 16
TOTAL = 4096


def places(num_rows: int, num_tokens: int) -> list[tuple[int, int, int]]:
    """Return (row, token, lane) in the order in which a decoder meets them."""
    return [(row, token, token % LANES) for row in range(num_rows) for token in range(num_tokens)]


def encode_stream(
    frequencies: NDArray[np.uint16],
    symbols: NDArray[np.uint8],
    table_of: NDArray[np.int64],
) -> bytes:
    """Return the stream of symbols ``[R, T]``, each coded with its table of ``table_of``."""
    freqs = frequencies.astype(object)
    starts = np.cumsum(frequencies, axis=1, dtype=np.int64) - frequencies
    states = [LOWER] * LANES
    words: list[int] = []
    for row, token, lane in reversed(places(*symbols.shape)):
        symbol, table = int(symbols[row, token]), int(table_of[row, token])
        frequency, start = int(freqs[table, symbol]), int(starts[table, symbol])
        state = states[lane]
        if state >= frequency << 20:
            words.append(state & 0xFFFF)
            state >>= 16
        states[lane] = (state // frequency) * TOTAL + start + state % frequency
    return struct.pack("<32I", *states) + struct.pack(f"<{len(words)}H", *reversed(words))


def split(payload: bytes) -> list[bytes]:
    """Return the streams of a payload."""
    (count,) = struct.unpack_from("<I", payload)
    sizes = struct.unpack_from(f"<{count}I", payload, 4)
    ends = np.cumsum([4 + 4 * count, *sizes])
    return [payload[start:end] for start, end in pairwise(ends)]


def join(streams: list[bytes]) -> bytes:
    """Return the payload of streams."""
    sizes = [len(stream) for stream in streams]
    return struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes) + b"".join(streams)


def encode(
    frequencies: NDArray[np.uint16],
    symbols: NDArray[np.uint8],
    classes: NDArray[np.uint16],
    num_streams: int = 1,
    context: NDArray[np.uint8] | None = None,
) -> bytes:
    """Return the payload of symbols ``[R, T]``."""
    table_of = np.broadcast_to(classes.astype(np.int64)[:, None], symbols.shape)
    if context is not None:
        table_of = table_of + context
    num_rows = len(symbols)
    cuts = [i * num_rows // num_streams for i in range(num_streams + 1)]
    return join(
        [
            encode_stream(frequencies, symbols[start:end], table_of[start:end])
            for start, end in pairwise(cuts)
        ]
    )
