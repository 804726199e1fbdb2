"""The protocol of codecs: ChunkKV to bytes and back, one layer at a time.

A codec does not know about stores. It writes one self-contained record, and reads it through a
`ByteSource`, a protocol that any store's records satisfy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.container import ByteSource, RecordReader
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.positions.rotary import RotaryTable


@dataclass(frozen=True)
class Destination:
    """Where a stretch of a chunk goes in the fused buffer of a prompt, for one layer.

    Attributes
    ----------
    keys, values
        ``[H, n, D]`` in the model's dtype: the buffer's rows for the n tokens. The last stride is
        1, the others are free.
    tokens
        The n tokens of the chunk.
    table
        RoPE of this layer at all positions of the prompt.
    rows
        The n positions in the prompt, as rows of `table`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: slice
    table: RotaryTable
    rows: slice


class EncodedChunk(Protocol):
    """One opened record. Its header has been read and checked, its blocks have not.

    A class of records inherits what it does not do otherwise than a record in one plane that is
    read layer by layer.
    """

    @property
    def num_tokens(self) -> int:
        """T."""

    @property
    def size_bytes(self) -> int:
        """Length of the whole record, header included."""

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the source so far, header included."""

    @abstractmethod
    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values ``[H, T, D]`` of one layer, on the CPU.

        The tensors may be views of a scratch buffer that the thread's next call overwrites (each
        thread has one). Raises RecordError if the layer's bytes are not what was written,
        StoreError if the store cannot deliver them, and ParameterError if there is no such layer.
        """

    def read_heads(self, layer_index: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[H', T, D]`` of some of a layer's heads, as `read_layer` does.

        A codec that stores heads apart reads only these; others decode the whole layer.
        """
        keys, values = self.read_layer(layer_index)
        return keys[heads], values[heads]

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        """Write one layer's keys, rotated to their positions, and its values to each of `into`.

        Several are stretches of the chunk that a prompt has apart. Raises as `read_layer` does;
        `into` then holds garbage.
        """
        keys, values = self.read_layer(layer_index)
        for one in into:
            one.table.place(keys[:, one.tokens].to(one.keys.device), one.rows, one.keys)
            one.values.copy_(values[:, one.tokens])

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane, from coarse to fine, without the header.

        The first planes alone are a coarser chunk. Codecs without planes have one.
        """
        return (0,)

    def fetch(self, num_planes: int) -> None:  # noqa: ARG002
        """Read the first `num_planes` planes into memory, those that are missing, in one read.

        Raises as `read_layer` does. `use` then lets layers be decoded from memory.
        """
        return

    def use(self, num_planes: int) -> None:  # noqa: ARG002
        """Decode only the first `num_planes` planes from now on. Do not call it during decoding."""
        return

    def cancel(self) -> None:
        """Cancel reads of other threads, if the store can; they raise StoreError."""
        return


@runtime_checkable
class Codec(Protocol):
    """Turns the KV of chunks into records and back.

    One without a profile is made without arguments, and registered under its name in
    `kvrag.codec.names.PLAIN`, or as an entry point of the group ``kvrag.codecs``.
    """

    @property
    def name(self) -> str:
        """The codec's name in records: 1 to 16 printable ASCII characters."""

    @property
    def label(self) -> str:
        """The codec's name in indexes and on the command line, with its level if it has levels."""

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        """Return the record of `kv`.

        Parameters
        ----------
        kv
            Keys and values ``[L, H, T, D]``, float32, bfloat16 or float16, on the CPU, T >= 1.

        Raises
        ------
        ParameterError
            If keys and values differ in shape or type, do not match the profile's model, hold no
            tokens, or hold NaN or infinity (the message names the first layer and token).
        """

    def open(self, key: ChunkKey, source: ByteSource, spec: KVSpec) -> EncodedChunk:
        """Read and check the header of a record.

        Raises
        ------
        RecordError
            If another codec wrote the record, if it was written for another key or shape or with
            another profile, or if it is damaged.
        StoreError
            If the store cannot deliver the header.
        """
        return self.open_record(RecordReader(source, key), spec)

    def open_record(self, reader: RecordReader, spec: KVSpec) -> EncodedChunk:
        """Open a record whose header has been read. Raises as `open` does."""


def check_kv(kv: ChunkKV) -> KVSpec:
    """Return the shape and type of a chunk's KV.

    Raises
    ------
    ParameterError
        If keys and values differ in shape or type, hold no tokens, are not on the CPU, or hold
        NaN or infinity (the message names the first layer and token).
    """
    keys, values = kv.keys, kv.values
    if keys.dim() != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ParameterError(
            "a chunk's keys and values must have the same shape [L, H, T, D] and dtype; found "
            f"{list(keys.shape)} {keys.dtype} and {list(values.shape)} {values.dtype}"
        )
    if keys.numel() == 0:
        raise ParameterError(f"a chunk's KV must hold at least one token; found {list(keys.shape)}")
    for what, tensor in (("keys", keys), ("values", values)):
        if tensor.device.type != "cpu":
            raise ParameterError(f"encoding needs a chunk's KV on the CPU; found {tensor.device}")
        _require_finite(what, tensor)
    num_layers, num_kv_heads, _, head_dim = keys.shape
    return KVSpec(num_layers, num_kv_heads, head_dim, keys.dtype)


def check_layer_index(layer_index: int, num_layers: int) -> None:
    """Raise ParameterError unless the layer exists."""
    if not 0 <= layer_index < num_layers:
        raise ParameterError(f"layer_index is 0 to {num_layers - 1}, found {layer_index}")


def _require_finite(what: str, tensor: torch.Tensor) -> None:
    # The extremes of a tensor with NaN are NaN, so one pass without a mask suffices usually.
    low, high = torch.aminmax(tensor.detach())
    if torch.isfinite(low) and torch.isfinite(high):
        return
    layer_index, head, token, _ = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    raise ParameterError(
        f"the {what} of layer {layer_index}, head {head}, token {token} hold NaN or infinity; "
        "load the model in a wider dtype (bfloat16 or float32)"
    )


class OpenedRecord(EncodedChunk):
    """The part of an opened record that is the same for every codec: its header and reader."""

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._num_fetched = 0

    @property
    def num_tokens(self) -> int:
        return self._reader.header.num_tokens

    @property
    def identity(self) -> Hashable:
        """What the record is, content included: its key, and checksums of all that it holds."""
        return self._reader.key, self._reader.header

    @property
    def size_bytes(self) -> int:
        return self._reader.size_bytes

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        return (sum(block.padded_bytes for block in self._reader.header.blocks),)

    def fetch(self, num_planes: int) -> None:
        if num_planes > self._num_fetched:
            num_blocks = len(self._reader.header.blocks) // len(self.plane_bytes)
            self._reader.fetch(range(self._num_fetched * num_blocks, num_planes * num_blocks))
            self._num_fetched = num_planes

    def cancel(self) -> None:
        self._reader.cancel()


class StoredForCards(OpenedRecord):
    """An opened record whose blocks a card decodes as they are stored."""

    @abstractmethod
    def coded_blocks(self, layers: range) -> list[range]:
        """Return the blocks of some layers: those that follow each other in the record."""

    @abstractmethod
    def coded_parts(self, layers: range, pieces: Sequence[memoryview]) -> list[Any]:
        """Return where in blocks everything is that a card needs; raises RecordError.

        Checksums have been compared. Places are those in memory that has all pieces in turn.

        Parameters
        ----------
        pieces
            The bytes of each range of `coded_blocks`.
        """

    def coded_places(self, layers: range) -> list[slice]:
        """Return where each range of `coded_blocks` is in what `read_coded` reads of all layers."""
        blocks = self._reader.header.blocks
        found = []
        for some in self.coded_blocks(layers):
            begin = blocks[some.start].offset - blocks[0].offset
            found.append(slice(begin, begin + sum(blocks[one].padded_bytes for one in some)))
        return found

    def coded_bytes(self, layers: range) -> int:
        """Return how many bytes `read_coded` reads."""
        return sum(one.stop - one.start for one in self.coded_places(layers))

    def read_coded(self, layers: range, memory: memoryview) -> list[Any]:
        """Read the blocks of some layers as they are stored; return their `coded_parts`.

        Raises RecordError and StoreError as `read_layer` does, except for streams that are not what
        was written although their checksums are right.

        Parameters
        ----------
        layers
            Layers of whole blocks.
        memory
            Writable, of `coded_bytes`.
        """
        pieces, end = [], 0
        for blocks, place in zip(self.coded_blocks(layers), self.coded_places(layers), strict=True):
            begin, end = end, end + place.stop - place.start
            pieces.append(memory[begin:end])
            self._reader.read_blocks(blocks, pieces[-1])
        return self.coded_parts(layers, pieces)
