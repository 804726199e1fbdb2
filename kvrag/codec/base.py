"""What a codec is: ChunkKV to bytes and back, one layer at a time.

A codec knows nothing of stores: it writes one self-contained record and reads it through a
`ByteSource`, which any store's records satisfy by shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
        ``[H, n, D]`` in the model's dtype, any strides but a last one of 1: the buffer's rows of
        those n tokens.
    tokens
        Which n tokens of the chunk.
    table
        RoPE of this layer at all positions of the prompt.
    rows
        The n positions of the prompt, rows of `table`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: slice
    table: RotaryTable
    rows: slice


class EncodedChunk(Protocol):
    """One opened record: its header has been read and checked, its blocks not yet."""

    @property
    def num_tokens(self) -> int:
        """T."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the whole record, header included."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the source so far, header included."""
        ...

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values ``[H, T, D]`` of one layer, on the CPU.

        The tensors may live in a scratch buffer that the next call overwrites (each thread
        has its own). Raises RecordError when the layer's bytes are not what was written.
        """
        ...

    def place_layer(self, layer_index: int, into: Destination) -> None:
        """Write one layer's keys, rotated to their positions, and values where they belong.

        Raises as `read_layer` does; what has been written by then is garbage.
        """
        ...

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane, from coarse to fine, the header left out.

        The first planes are a coarser chunk by themselves; codecs without planes have one.
        """
        ...

    def fetch(self, num_planes: int) -> None:
        """Bring so many planes into memory, as far as they are not there, in one read.

        Raises as `read_layer` does. Layers are decoded from memory afterwards, with `use`.
        """
        ...

    def use(self, num_planes: int) -> None:
        """Decode so many planes from now on, in place of all. No layer may be being decoded."""
        ...

    def cancel(self) -> None:
        """Break off what other threads fetch, where the store can; they get StoreError."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Turns the KV of chunks into records and back.

    One without a profile is made without arguments, and registered under its name in
    `kvrag.codec.names.PLAIN`, or as an entry point of the group ``kvrag.codecs``.
    """

    @property
    def name(self) -> str:
        """What the codec is called in records: 1 to 16 printable ASCII characters."""
        ...

    @property
    def label(self) -> str:
        """What it is called in indexes and on the command line: the name, and its level if any."""
        ...

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        """Return the record of `kv`. Raises ParameterError on NaN or infinity, or no token."""
        ...

    def open(self, key: ChunkKey, source: ByteSource, spec: KVSpec) -> EncodedChunk:
        """Read and check the header of a record.

        Raises RecordError when the record is not one of this codec, was written for another
        key or shape, or is damaged.
        """
        ...

    def open_record(self, reader: RecordReader, spec: KVSpec) -> EncodedChunk:
        """Go on from a header that has been read. Raises as `open` does."""
        ...


def check_kv(kv: ChunkKV) -> KVSpec:
    """Return the shape and type of a chunk's KV.

    Raises
    ------
    ParameterError
        When keys and values differ in shape or type, hold no tokens, are not on the CPU, or hold
        NaN or infinity (the message names the first layer and token).
    """
    keys, values = kv.keys, kv.values
    if keys.dim() != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ParameterError(
            "keys and values of a chunk have one shape [L, H, T, D] and one dtype; found "
            f"{list(keys.shape)} {keys.dtype} and {list(values.shape)} {values.dtype}"
        )
    if keys.numel() == 0:
        raise ParameterError(f"a chunk's KV holds at least one token; found {list(keys.shape)}")
    for what, tensor in (("keys", keys), ("values", values)):
        if tensor.device.type != "cpu":
            raise ParameterError(f"a chunk's KV is encoded on the CPU; found {tensor.device}")
        _require_finite(what, tensor)
    num_layers, num_kv_heads, _, head_dim = keys.shape
    return KVSpec(num_layers, num_kv_heads, head_dim, keys.dtype)


def check_layer_index(layer_index: int, num_layers: int) -> None:
    """Raise ParameterError unless there is such a layer."""
    if not 0 <= layer_index < num_layers:
        raise ParameterError(f"layer_index is 0 to {num_layers - 1}, found {layer_index}")


def _require_finite(what: str, tensor: torch.Tensor) -> None:
    # The extremes of a tensor with NaN are NaN, so one pass and no mask settle the usual case.
    low, high = torch.aminmax(tensor.detach())
    if torch.isfinite(low) and torch.isfinite(high):
        return
    layer_index, head, token, _ = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    raise ParameterError(
        f"the {what} of layer {layer_index}, head {head}, token {token} hold NaN or infinity; "
        "load the model in a wider dtype (bfloat16 or float32)"
    )
