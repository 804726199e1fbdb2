"""What a codec is: ChunkKV to bytes and back, one layer at a time.

A codec knows nothing of stores: it writes one self-contained record and reads it through a
`ByteSource`, which any store's records satisfy by shape.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvrag.chunk import ChunkKey
from kvrag.kvcache import ChunkKV, KVSpec


class ByteSource(Protocol):
    """Random access to the bytes of one stored record."""

    @property
    def size_bytes(self) -> int:
        """Length of the whole record."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on.

        Raises StoreError when the medium refuses, RecordError when the record ends before the
        buffer is full.
        """
        ...


class EncodedChunk(Protocol):
    """One opened record: its header has been read and checked, its layers not yet."""

    @property
    def num_tokens(self) -> int:
        """T."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the whole record, header included."""
        ...

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values ``[H, T, D]`` of one layer, on the CPU.

        The tensors may live in a scratch buffer that the next call overwrites (each thread
        has its own). Raises RecordError when the layer's bytes are not what was written.
        """
        ...


class Codec(Protocol):
    """Turns the KV of chunks into records and back."""

    @property
    def name(self) -> str:
        """What the codec is called in records, in indexes and on the command line."""
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
