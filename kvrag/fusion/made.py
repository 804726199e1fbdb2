"""The KV of a chunk that was made while a prompt was fused, in the form of an opened record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrag.codec.base import Destination, place_whole
from kvrag.kvcache import ChunkKV


class NotMadeError(Exception):
    """No prompt has made an optional record yet, and this one needs too little of it."""


@dataclass(frozen=True)
class MadeChunk:
    """KV in memory (an `EncodedChunk`), which came from no store.

    Attributes
    ----------
    kv
        The KV as the model gave it.
    seconds
        How long this prompt computed it; None if another prompt did.
    """

    kv: ChunkKV
    seconds: float | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.kv.num_tokens

    @property
    def size_bytes(self) -> int:
        """Bytes of the keys and values."""
        return self.kv.size_bytes

    @property
    def bytes_read(self) -> int:
        """0: no source was read."""
        return 0

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values ``[H, T, D]`` of one layer."""
        return self.kv.keys[layer_index], self.kv.values[layer_index]

    def read_heads(self, layer_index: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values of some heads of one layer."""
        return self.kv.keys[layer_index, heads], self.kv.values[layer_index, heads]

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        """Write one layer where it belongs; see `EncodedChunk.place_layer`."""
        place_whole(*self.read_layer(layer_index), into)

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """One plane of no bytes: everything is here."""
        return (0,)

    def fetch(self, num_planes: int) -> None:
        """Do nothing: everything is here."""

    def use(self, num_planes: int) -> None:
        """Do nothing: there is one plane."""

    def cancel(self) -> None:
        """Do nothing: nothing is being read."""
