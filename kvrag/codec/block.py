"""The bytes of a coded block: packing of its streams, and a reader of its fields."""

from __future__ import annotations

import math
import struct
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.container import RecordReader
from kvrag.codec.tables import ESCAPE, ZERO_SYMBOL, to_values
from kvrag.errors import RecordError
from kvrag.native.entropy import RansModel, decode_rows, encode_rows
from kvrag.positions.rotary import RotaryTable

COUNT = struct.Struct("<I")
MATRIX = struct.Struct("<II")  # escaped numbers, bytes of the streams

# About this many symbols a stream: enough that its 128 bytes of states weigh little, few enough
# that two cores (or a GPU's many warps) can share a block.
_STREAM_SYMBOLS = 1 << 17
_MAX_STREAMS = 256
_MAX_SYMBOLS = 1 << 31


def count_streams(num_rows: int, num_tokens: int) -> int:
    """Return how many streams a matrix of symbols is split into."""
    return max(1, min(_MAX_STREAMS, num_rows * num_tokens // _STREAM_SYMBOLS, num_rows))


def pack_streams(
    model: RansModel,
    symbols: NDArray[np.uint8],
    classes: NDArray[np.uint16],
    context: NDArray[np.uint8] | None = None,
) -> bytes:
    """Return the rANS streams of symbols ``[R, T]``; no bytes for no symbols.

    Parameters
    ----------
    context
        uint8 ``[R, T]``: added, for each symbol, to the class of its row.
    """
    if not symbols.size:
        return b""
    num_streams = count_streams(*symbols.shape)
    return encode_rows(model, symbols, classes, num_streams=num_streams, context=context)


class BlockReader:
    """Reads the fields of a block in order, never past its end.

    Parameters
    ----------
    reader
        The record.
    block
        The block's number.
    content
        Its bytes, with padding, whose checksum was compared; None: the constructor reads them.

    Attributes
    ----------
    position
        How many bytes were taken.

    Raises
    ------
    RecordError
        If the block is not what was written. The methods raise it too.
    StoreError
        If the store cannot deliver the block.
    """

    def __init__(self, reader: RecordReader, block: int, content: memoryview | None = None) -> None:
        self._reader = reader
        self._block = block
        place = reader.header.blocks[block]
        if content is None:
            content = memoryview(reader.room(place.padded_bytes))
            reader.read_block(block, content)
        self._content = content[: place.size_bytes]
        self.position = 0

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes."""
        if size > self._content.nbytes:
            self.refuse("length", f"{size} bytes more", f"{self._content.nbytes}")
        taken, self._content = self._content[:size], self._content[size:]
        self.position += size
        return taken

    def unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        """Return the next fields."""
        return fields.unpack(self.take(fields.size))

    def array(self, dtype: str | np.dtype[Any], count: int) -> NDArray[Any]:
        """Return a copy of the next `count` numbers."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(count * kind.itemsize), dtype=kind).copy()

    def raw_tokens(
        self, num_raw: int, num_tokens: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Return the next tokens that are kept raw, and their numbers ``[num_raw, *shape]``.

        Parameters
        ----------
        num_raw, num_tokens
            How many are raw, of how many.
        shape, dtype
            The numbers of one.
        """
        tokens = self.array("<u4", num_raw).astype(np.int64)
        if num_raw and (int(tokens[-1]) >= num_tokens or (np.diff(tokens) <= 0).any()):
            self.refuse("tokens kept raw", f"ascending, below {num_tokens}", "others")
        raw_bytes = self.array("u1", num_raw * math.prod(shape) * dtype.itemsize)
        raw = torch.empty(num_raw, *shape, dtype=dtype)
        raw.view(torch.uint8).numpy().reshape(-1)[:] = raw_bytes
        if not bool(torch.isfinite(raw).all()):
            self.refuse("tokens kept raw", "finite numbers", "NaN or infinity")
        return tokens, raw

    def streams(self, num_symbols: int, num_bytes: int) -> memoryview:
        """Return the next streams, which are not decoded yet."""
        if num_symbols > _MAX_SYMBOLS:
            self.refuse("symbols", f"at most {_MAX_SYMBOLS}", str(num_symbols))
        if num_bytes and not num_symbols:
            self.refuse("streams", "none", f"{num_bytes} bytes")
        return self.take(num_bytes)

    def symbols(
        self,
        model: RansModel,
        classes: NDArray[np.uint16],
        num_tokens: int,
        num_bytes: int,
        context: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Return the next matrix uint8 ``[R, T']`` from its streams.

        Parameters
        ----------
        classes
            uint16 ``[R]``.
        num_tokens
            T'.
        num_bytes
            Bytes of the streams.
        context
            See `pack_streams`.
        """
        streams = self.streams(len(classes) * num_tokens, num_bytes)
        out = np.full((len(classes), num_tokens), ZERO_SYMBOL, dtype=np.uint8)
        if not out.size:
            return out
        try:
            threads = torch.get_num_threads()
            decode_rows(model, streams, classes, out, context=context, threads=threads)
        except RecordError as error:
            self.refuse("streams", "those that were written", str(error))
        return out

    def values(
        self,
        model: RansModel,
        classes: NDArray[np.uint16],
        num_tokens: int,
        num_escaped: int,
        num_bytes: int,
    ) -> NDArray[np.int16]:
        """Return the next matrix as whole numbers ``[R, T']``.

        It is stored as its escaped numbers, then its streams.
        """
        escaped = self.array("<i2", num_escaped)
        symbols = self.symbols(model, classes, num_tokens, num_bytes)
        found = int(np.count_nonzero(symbols == ESCAPE))
        if found != num_escaped:
            self.refuse("escaped numbers", str(found), str(num_escaped))
        return to_values(symbols, escaped)

    def end(self) -> None:
        """Raise RecordError if bytes are left after the last field."""
        if self._content.nbytes:
            self.refuse("length", "its end", f"{self._content.nbytes} bytes more")

    def refuse(self, what: str, expected: str, found: str) -> NoReturn:
        """Raise RecordError for this block."""
        self._reader.refuse(f"block {self._block}: {what}", expected, found)


def place_channels(
    channels: torch.Tensor, out: torch.Tensor, positions: RotaryTable | None
) -> None:
    """Write channels ``[H * D, n]`` to `out` ``[H, n, D]``, rotated if there are positions."""
    num_heads, num_tokens, head_dim = out.shape
    rows = channels.view(num_heads, head_dim, num_tokens).transpose(1, 2)
    if positions is None:
        out.copy_(rows)
    else:
        positions.place(rows, slice(0, num_tokens), out)
