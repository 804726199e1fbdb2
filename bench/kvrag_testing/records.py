"""Keys and records by number; quick to import, for programs that tests run and kill."""

from __future__ import annotations

import hashlib

from kvrag.chunk import ChunkKey
from kvrag.store.base import Store, StoredRecord


def key_number(number: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(str(number).encode()).hexdigest()[:40])


def record_of(key: ChunkKey, size_bytes: int = 1000) -> bytes:
    """Return bytes that show which key they belong to, and whether any are missing."""
    return hashlib.shake_128(key.digest.encode()).digest(size_bytes)


def read_all(record: StoredRecord) -> bytes:
    buffer = bytearray(record.size_bytes)
    record.read_into(0, memoryview(buffer))
    return bytes(buffer)


def stored(store: Store, key: ChunkKey) -> bytes | None:
    record = store.open(key)
    if record is None:
        return None
    try:
        return read_all(record)
    finally:
        record.close()
