"""Keys and values in 8 bits each: what CacheGen compares itself with, as records that are loaded.

A whole number for each channel, and a float16 scale for each token and head: near lossless, and a
quarter of the size of float32. One block a layer.
"""

from __future__ import annotations

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.base import OpenedRecord
from kvrag.codec.container import RecordReader, write_record
from kvrag.kvcache import ChunkKV, KVSpec

_NAME = "bench-8-bit"


def encode_eight_bit(key: ChunkKey, kv: ChunkKV, spec: KVSpec) -> bytes:
    """Return the record of a chunk."""
    blocks = []
    for layer_index in range(spec.num_layers):
        pieces = []
        for kind in (kv.keys, kv.values):
            rows = kind[layer_index].float()
            scale = (rows.abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-7).half()
            numbers = (rows / scale.float()).round().clamp(-127, 127).to(torch.int8)
            pieces += [numbers.contiguous().numpy().tobytes(), scale.numpy().tobytes()]
        blocks.append(pieces)
    return write_record(key, codec=_NAME, spec=spec, num_tokens=kv.num_tokens, blocks=blocks)


class EightBitChunk(OpenedRecord):
    """An opened record of 8-bit numbers (an `EncodedChunk`)."""

    def __init__(self, reader: RecordReader) -> None:
        super().__init__(reader)
        reader.require(_NAME, reader.header.spec)

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[H, T, D]`` of one layer."""
        spec, num_tokens = self._reader.header.spec, self.num_tokens
        block = bytearray(self._reader.header.blocks[layer_index].padded_bytes)
        self._reader.read_block(layer_index, memoryview(block))
        shape = (spec.num_kv_heads, num_tokens)
        scales = shape[0] * shape[1]
        numbers = scales * spec.head_dim
        found = []
        offset = 0
        for _ in range(2):
            coded = torch.frombuffer(block, dtype=torch.int8, count=numbers, offset=offset)
            offset += numbers
            scale = torch.frombuffer(block, dtype=torch.float16, count=scales, offset=offset)
            offset += 2 * scales
            rows = coded.view(*shape, spec.head_dim).float() * scale.view(*shape, 1).float()
            found.append(rows.to(spec.dtype))
        return found[0], found[1]
