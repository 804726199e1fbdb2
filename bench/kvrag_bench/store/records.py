"""Records for the bench: well formed, of any size, each telling which key it belongs to."""

from __future__ import annotations

import random

import torch

from kvrag.codec.container import write_record
from kvrag.kvcache import KVSpec
from kvrag_bench.store.contents import key_of as key_number

__all__ = ["NUM_LAYERS", "key_number", "record_number"]

NUM_LAYERS = 24


def record_number(number: int, layer_bytes: int) -> bytes:
    """Return a record of 24 blocks of random bytes, the same for a number each time."""
    chance = random.Random(number)
    return write_record(
        key_number(number),
        codec="bench",
        spec=KVSpec(NUM_LAYERS, 1, 8, torch.float32),
        num_tokens=1,
        blocks=[[chance.randbytes(layer_bytes)] for _ in range(NUM_LAYERS)],
    )
