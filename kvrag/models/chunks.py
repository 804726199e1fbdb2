"""Positions and KV of chunks that are encoded in one batch after a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec, packed
from kvrag.models.writers import Captured
from kvrag.positions.rotary import RotaryTable


def shifted_positions(
    num_prefix: int, lengths: Sequence[int], starts: Sequence[int], max_positions: int
) -> torch.Tensor:
    """Return ``[B, width]`` positions: the prefix's unchanged, the chunks' from `starts` on."""
    for start, length in zip(starts, lengths, strict=True):
        if start < num_prefix or start + length > max_positions:
            raise ParameterError(
                f"a chunk of {length} tokens at position {start}: expected it after the "
                f"prefix of {num_prefix} and within {max_positions} positions"
            )
    positions = torch.arange(num_prefix + max(lengths)).repeat(len(starts), 1)
    for row, start in zip(positions, starts, strict=True):
        row[num_prefix:] += start - num_prefix
    # The padding's rows are not kept, whatever their positions.
    return positions.clamp(max=max_positions - 1)


def take_chunk(
    cache: Captured, tables: Sequence[RotaryTable], spec: KVSpec, index: int, rows: slice
) -> ChunkKV:
    """Return the position-free KV of one sequence's rows, on the CPU.

    Parameters
    ----------
    cache
        The cache that the model's forward filled.
    tables
        Each layer's table of the positions at which the sequence was encoded.
    spec
        Shape and type of the KV.
    index
        The sequence's place in the batch.
    rows
        The chunk's rows.
    """
    layers: list[Any] = cache.layers
    shape = (spec.num_layers, spec.num_kv_heads, rows.stop - rows.start, spec.head_dim)
    keys = torch.empty(shape, dtype=spec.dtype, device=layers[0].keys.device)
    values = torch.empty_like(keys)
    for layer_index, layer in enumerate(layers):
        given = packed(spec.latent, layer.keys[index, :, rows], layer.values[index, :, rows])
        tables[layer_index].strip(given[0], rows, keys[layer_index])
        values[layer_index] = given[1]
    return ChunkKV(keys.cpu(), values.cpu())
