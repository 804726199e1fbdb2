"""The codecs that store KV exactly as the model gave it: layer by layer, or head by head.

A layer's block holds its keys ``[H, T, D]``, then its values ``[H, T, D]``, little-endian, in the
model's dtype. Reading a layer takes one copy from the store and one pass for the checksum.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable
from typing import Any, ClassVar

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, EncodedChunk, OpenedRecord, check_kv, check_layer_index
from kvrag.codec.container import RecordReader, padded_size, write_record
from kvrag.codec.names import RAW_HEADS
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec

# Each thread caches views of its scratch buffer for at most this many shapes.
_MAX_VIEWS = 64

_View = tuple[memoryview, torch.Tensor, torch.Tensor]
_Shape = tuple[int, int, int, torch.dtype]
"""H, T, D, and the type."""


class _Scratch(threading.local):
    """One buffer for each thread, as large as the largest block read, with typed views of it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: dict[_Shape, _View] = {}

    def view(self, shape: _Shape) -> _View:
        """Return the padded block as bytes, and its keys and values as ``[H, T, D]``."""
        view = self._views.get(shape)
        if view is None:
            view = self._views[shape] = self._make_view(*shape)
        return view

    def _make_view(self, num_kv_heads: int, num_tokens: int, head_dim: int, dtype: Any) -> _View:
        size = 2 * num_kv_heads * num_tokens * head_dim * dtype.itemsize
        # Not inference tensors, even if the caller is in inference mode: they outlive this call.
        with torch.inference_mode(False), torch.no_grad():
            if self._bytes.numel() < padded_size(size):
                self._bytes = torch.empty(padded_size(size), dtype=torch.uint8)
                self._views.clear()
            elif len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            buffer = self._bytes.numpy().data[: padded_size(size)]
            both = self._bytes[:size].view(dtype).view(2, num_kv_heads, num_tokens, head_dim)
            return buffer, both[0], both[1]


_scratch = _Scratch()


class RawChunk(OpenedRecord):
    """An opened record of the raw codec (an `EncodedChunk`)."""

    def __init__(self, reader: RecordReader) -> None:
        super().__init__(reader)
        spec = reader.header.spec
        self._shape = (spec.num_kv_heads, reader.header.num_tokens, spec.head_dim, spec.dtype)

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer, as views of this thread's scratch buffer.

        The thread's next call on any `RawChunk` overwrites it, so copy them first.
        """
        check_layer_index(layer_index, len(self._reader.header.blocks))
        buffer, keys, values = _scratch.view(self._shape)
        self._reader.read_block(layer_index, buffer)
        return keys, values

    @property
    def stored_layer(self) -> tuple[torch.dtype, int]:
        """The type of the elements, and bytes of a layer: keys, values ``[H, T, D]``, padding."""
        header = self._reader.header
        return header.spec.dtype, header.blocks[0].padded_bytes

    def read_layers(self, layers: range, buffer: memoryview) -> None:
        """Read layers that follow each other, in one read. Raises as `read_layer` does.

        Parameters
        ----------
        layers
            The layers, at least one.
        buffer
            The bytes of `stored_layer` for each of them.
        """
        check_layer_index(layers[-1], len(self._reader.header.blocks))
        self._reader.read_blocks(layers, buffer)


class RawCodec(Codec):
    """Stores KV uncompressed: what is read equals the model's output, bit for bit."""

    name = label = "raw"

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise ParameterError(
                f"codec {self.name!r} needs a little-endian machine; this one is not"
            )

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        spec = check_kv(kv)
        num_groups = self.num_groups(spec)
        blocks = [
            [_bytes_of(one[layer].chunk(num_groups)[number]) for one in (kv.keys, kv.values)]
            for layer in range(spec.num_layers)
            for number in range(num_groups)
        ]
        return write_record(
            key, codec=self.name, spec=spec, num_tokens=kv.num_tokens, blocks=blocks
        )

    def open_record(self, reader: RecordReader, spec: KVSpec) -> OpenedRecord:
        reader.require(self.name, spec)
        num_groups = self.num_groups(spec)
        reader.require_blocks(spec.num_layers * num_groups)
        layer_bytes = spec.layer_bytes_per_token * reader.header.num_tokens
        reader.require_block_size(layer_bytes // num_groups)
        return self.opened(reader)

    def num_groups(self, spec: KVSpec) -> int:  # noqa: ARG002
        """Return into how many blocks of equally many heads a layer is split."""
        return 1

    opened: ClassVar[type[OpenedRecord]] = RawChunk
    """The class of opened records."""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's numbers as bytes, row-major."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return flat.numpy().data


# Some key heads of an opened record, for a process that has only those of the model.


class HeadRange(EncodedChunk):
    """A part of an opened record: a range of its key heads.

    A record that stores heads apart (codec ``raw-heads``) is read only there. From any other,
    whole layers are read and decoded, and the other heads are dropped.

    Parameters
    ----------
    record
        The opened record. Sizes and planes are those of the whole record.
    heads
        The first head, and the one after the last.

    Attributes
    ----------
    record, heads
        As given.
    """

    def __init__(self, record: EncodedChunk, heads: slice) -> None:
        self.record = record
        self.heads = heads

    @property
    def identity(self) -> Hashable:
        """What the part is, content included; AttributeError: nobody can tell."""
        return getattr(self.record, "identity"), self.heads.start, self.heads.stop  # noqa: B009

    @property
    def num_tokens(self) -> int:
        return self.record.num_tokens

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes

    @property
    def bytes_read(self) -> int:
        return self.record.bytes_read

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        return self.record.plane_bytes

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.record.read_heads(layer_index, self.heads)

    def fetch(self, num_planes: int) -> None:
        self.record.fetch(num_planes)

    def use(self, num_planes: int) -> None:
        self.record.use(num_planes)

    def cancel(self) -> None:
        self.record.cancel()


# Models with more layers and heads than that get blocks of several heads, so that a header stays
# below 25 KB.
_MAX_BLOCKS = 1024


class RawHeadsChunk(OpenedRecord):
    """An opened record of the codec (an `EncodedChunk`)."""

    def __init__(self, reader: RecordReader) -> None:
        super().__init__(reader)
        self._spec = reader.header.spec
        self._num_groups = len(reader.header.blocks) // self._spec.num_layers

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read_heads(layer_index, slice(0, self._spec.num_kv_heads))

    def read_heads(self, layer_index: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        check_layer_index(layer_index, spec.num_layers)
        each = spec.num_kv_heads // self._num_groups
        groups = range(heads.start // each, -(-heads.stop // each))
        first = layer_index * self._num_groups
        blocks = range(first + groups.start, first + groups.stop)
        size = 2 * each * self.num_tokens * spec.head_dim
        padded = padded_size(size * spec.dtype.itemsize)
        content = self._reader.room(len(groups) * padded)
        self._reader.read_blocks(blocks, memoryview(content))
        # Not inference tensors, even if the caller is in inference mode: others may use them.
        with torch.inference_mode(False), torch.no_grad():
            rows = torch.frombuffer(content, dtype=torch.uint8).view(len(groups), padded)
            both = rows[:, : size * spec.dtype.itemsize].contiguous().view(spec.dtype)
            shape = (len(groups), 2, each, self.num_tokens, spec.head_dim)
            keys, values = both.view(shape).transpose(0, 1).flatten(1, 2)
        wanted = slice(heads.start - groups.start * each, heads.stop - groups.start * each)
        return keys[wanted], values[wanted]


class RawHeadsCodec(RawCodec):
    """Stores KV uncompressed, head by head: what is read equals the model's output."""

    name = label = RAW_HEADS
    opened = RawHeadsChunk

    def num_groups(self, spec: KVSpec) -> int:
        most, heads = max(1, _MAX_BLOCKS // spec.num_layers), spec.num_kv_heads
        return max(one for one in range(1, min(heads, most) + 1) if heads % one == 0)
