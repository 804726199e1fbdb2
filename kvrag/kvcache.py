"""The classes that hold KV, and the glossary of axes used everywhere.

Axes
----
L   layers of the decoder
H   key/value heads of a layer (not query heads)
T   tokens of one chunk
N   tokens of the whole prompt
C   capacity of a fused buffer in tokens, C >= N
D   channels of a head

Keys are *position-free* (un-rotated) in `ChunkKV` and *placed* (rotated to their global
position) in `FusedKV`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvrag.errors import UnsupportedModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The element types that KV may have, by their names in options and index files."""


class Latent(NamedTuple):
    """What layers of multi-head latent attention keep of a token, as a key and a value.

    It gives its cache a latent, from which each head's keys and values are made, and one part of
    the key that is rotated. Both are kept as one key and one value of half as many numbers each:
    the rotated part first.

    Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.

    Attributes
    ----------
    size, num_rotated
        Numbers of the latent, and of the rotated part.
    """

    size: int
    num_rotated: int

    @property
    def head_dim(self) -> int:
        """Channels of the key, and of the value."""
        return max(self.num_rotated, (self.size + self.num_rotated + 1) // 2)

    def pack(
        self, latents: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a key and a value ``[B, 1, n, D]`` of what a layer gives its cache."""
        if (latents.shape[-1], rotated.shape[-1]) != self:
            raise UnsupportedModelError(
                f"a layer keeps {latents.shape[-1]} and {rotated.shape[-1]} numbers of a token, "
                f"expected a latent of {self.size} and {self.num_rotated} that are rotated"
            )
        room = 2 * self.head_dim - self.size - self.num_rotated
        whole = torch.cat([rotated, latents, latents.new_zeros(*latents.shape[:-1], room)], -1)
        return whole[..., : self.head_dim], whole[..., self.head_dim :]

    def unpack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer takes from its cache."""
        whole = torch.cat([keys[..., self.num_rotated :], values], -1)
        return whole[..., : self.size], keys[..., : self.num_rotated]


def packed(
    latent: Latent | None, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of what a layer gives its cache."""
    return (keys, values) if latent is None else latent.pack(keys, values)


def unpacked(
    latent: Latent | None, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a layer takes from its cache."""
    return (keys, values) if latent is None else latent.unpack(keys, values)


@dataclass(frozen=True)
class KVSpec:
    """Shape and type of a model's KV.

    Attributes
    ----------
    num_layers, num_kv_heads, head_dim
        L, H and D. They are the same for all layers, and for keys and values.
    dtype
        Element type of the KV: float32, bfloat16 or float16.
    latent
        How layers keep a latent instead of keys and values; None: they keep these.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    latent: Latent | None = field(default=None, compare=False)

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in one layer, uncompressed."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, uncompressed."""
        return self.num_layers * self.layer_bytes_per_token


@dataclass(frozen=True)
class ChunkKV:
    """Position-free KV of one chunk.

    Attributes
    ----------
    keys, values
        ``[L, H, T, D]`` on the CPU, contiguous, in the type that is stored.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def size_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()


class FusedKV:
    """KV of a whole prompt in one preallocated buffer, filled in place.

    Parameters
    ----------
    spec
        Shape and type.
    num_tokens
        N, the tokens of the prompt.
    capacity
        C, room for the prompt and the tokens to be generated.
    device
        The device of the buffer.
    storage
        Memory to use instead of allocating: one-dimensional, of the spec's dtype, at least
        `storage_elements` long. Its contents are overwritten.

    Attributes
    ----------
    keys, values
        One tensor per layer, ``[1, H, C, D]``; keys are placed. Rows from `num_tokens` on are
        not yet written.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_tokens: int,
        capacity: int,
        device: torch.device | str = "cpu",
        storage: torch.Tensor | None = None,
    ) -> None:
        num_elements = self.storage_elements(spec, capacity)
        if storage is None:
            # Later prompts reuse this memory, perhaps outside inference mode, where a tensor that
            # was made in it could not be written.
            with torch.inference_mode(False):
                # A GPU's steps read rows that nobody has written: masked, but not if they are NaN.
                make = torch.empty if torch.device(device).type == "cpu" else torch.zeros
                storage = make(num_elements, dtype=spec.dtype, device=device)
        self.spec = spec
        self.num_tokens = num_tokens
        self.storage = storage
        shape = (2, spec.num_layers, 1, spec.num_kv_heads, capacity, spec.head_dim)
        keys, values = storage[:num_elements].view(shape)
        self.keys = list(keys)
        self.values = list(values)

    @staticmethod
    def storage_elements(spec: KVSpec, capacity: int) -> int:
        """Return how many elements a buffer of that capacity needs."""
        return 2 * spec.num_layers * spec.num_kv_heads * capacity * spec.head_dim

    def with_tokens(self, num_tokens: int) -> FusedKV:
        """Return the same rows in the same memory, as the buffer of another number of tokens."""
        return FusedKV(self.spec, num_tokens, self.capacity, self.storage.device, self.storage)

    def copy_rows(self, other: FusedKV, num_rows: int) -> None:
        """Copy the first rows of another buffer of the same spec."""
        for mine, others in ((self.keys, other.keys), (self.values, other.values)):
            for into, source in zip(mine, others, strict=True):
                into[:, :, :num_rows].copy_(source[:, :, :num_rows])

    def release(self) -> None:
        """Free the memory. The buffer cannot be read or written afterwards."""
        self.storage = self.storage.new_empty(0)
        self.keys, self.values = [], []

    @property
    def layers(self) -> torch.Tensor:
        """``[2, L, H, C, D]``: keys and values of all layers."""
        shape = (2, self.spec.num_layers, *self.keys[0].shape[1:])
        return self.storage[: math.prod(shape)].view(shape)

    @property
    def addresses(self) -> list[list[int]]:
        """``[2][L]``: where each layer's keys and values are in memory; for compiled kernels."""
        return [[one.data_ptr() for one in part] for part in (self.keys, self.values)]

    @property
    def capacity(self) -> int:
        """C."""
        return int(self.keys[0].shape[2])

    @property
    def size_bytes(self) -> int:
        """Bytes of the N rows in use."""
        return self.num_tokens * self.spec.bytes_per_token
