"""The part of an opened record that is the same for every codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch

from kvrag.codec.base import Destination, place_whole
from kvrag.codec.container import RecordReader


class OpenedRecord(ABC):
    """Tokens and bytes of one record, from its header and its reader."""

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._num_fetched = 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._reader.header.num_tokens

    @property
    def identity(self) -> Hashable:
        """What the record is, content included: its key, and checksums of all that it holds."""
        return self._reader.key, self._reader.header

    @property
    def size_bytes(self) -> int:
        """Length of the whole record, header included."""
        return self._reader.size_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the source so far, header included."""
        return self._reader.bytes_read

    @abstractmethod
    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[H, T, D]`` of one layer; see `EncodedChunk.read_layer`."""

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        """Write one layer where it belongs; see `EncodedChunk.place_layer`."""
        place_whole(*self.read_layer(layer_index), into)

    def read_heads(self, layer_index: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some heads, of a layer that is read whole."""
        keys, values = self.read_layer(layer_index)
        return keys[heads], values[heads]

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane, from coarse to fine; without planes, of all blocks together."""
        return (sum(block.padded_bytes for block in self._reader.header.blocks),)

    def fetch(self, num_planes: int) -> None:
        """Read the first `num_planes` planes into memory, those that are missing, in one read.

        Raises RecordError or StoreError if they cannot be read.
        """
        if num_planes > self._num_fetched:
            num_blocks = len(self._reader.header.blocks) // len(self.plane_bytes)
            self._reader.fetch(range(self._num_fetched * num_blocks, num_planes * num_blocks))
            self._num_fetched = num_planes

    def use(self, num_planes: int) -> None:  # noqa: B027  # there is one plane
        """Decode only the first `num_planes` planes from now on. Do not call it during decoding."""

    def cancel(self) -> None:
        """Cancel reads of other threads, if the store can; they raise StoreError."""
        self._reader.cancel()
