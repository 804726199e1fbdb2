"""The KV of a chunk that was made while a prompt was fused, in the form of an opened record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.kvcache import ChunkKV


class NotMadeError(Exception):
    """No prompt has made an optional record yet, and this one needs too little of it."""


@dataclass(frozen=True)
class MadeChunk(EncodedChunk):
    """KV in memory, which came from no store.

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
        return self.kv.num_tokens

    @property
    def size_bytes(self) -> int:
        return self.kv.size_bytes

    @property
    def bytes_read(self) -> int:
        return 0

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.keys[layer_index], self.kv.values[layer_index]
