"""Keys and bytes by number, without any library that takes long to import."""

from __future__ import annotations

import hashlib
import random

from kvrag.chunk import ChunkKey


def key_of(number: int) -> ChunkKey:
    """Return a key by its number."""
    return ChunkKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=20).hexdigest())


def content_of(number: int) -> bytes:
    """Return bytes that tell the number, 1 to 120 kB of them."""
    chance = random.Random(number)
    return chance.randbytes(chance.randrange(1000, 120_000))
