"""Records as an attacker writes them: any field changed, all checksums right again."""

from __future__ import annotations

import re
import struct

import xxhash

from kvrag.codec.container import seal_header
from kvrag.recordformat import BLOCK, FIXED

_NAMES = (
    *("magic", "version", "header_bytes", "record_bytes", "key", "codec", "dtype", "num_layers"),
    *("num_kv_heads", "num_tokens", "head_dim", "level", "num_blocks", "reserved", "profile"),
)
FIELDS = dict(zip(_NAMES, re.findall(r"\d+s|[A-Z]", FIXED.format), strict=True))
"""The struct format of each field before the index of blocks."""
BLOCK_FIELDS = {"offset": 0, "size": 8, "checksum": 16}


def set_field(record: bytearray, name: str, value: int | bytes) -> None:
    values = [*FIXED.unpack_from(record)]
    values[_NAMES.index(name)] = value
    FIXED.pack_into(record, 0, *values)


def set_block_field(record: bytearray, block_index: int, name: str, value: int) -> None:
    start = FIXED.size + block_index * BLOCK.size + BLOCK_FIELDS[name]
    struct.pack_into("<Q", record, start, value)


def reseal(record: bytearray, header_bytes: int) -> bytes:
    """Return the record with the checksum of a header of `header_bytes` bytes put right."""
    header = bytearray(record[:header_bytes])
    seal_header(header)
    return bytes(header) + bytes(record[header_bytes:])


def reseal_blocks(record: bytearray) -> None:
    """Put right the checksums of those blocks that lie within the record."""
    num_blocks = FIXED.unpack_from(record)[_NAMES.index("num_blocks")]
    for block_index in range(min(num_blocks, 64)):
        start = FIXED.size + block_index * BLOCK.size
        if start + BLOCK.size > len(record):
            return
        offset, size, _ = BLOCK.unpack_from(record, start)
        end = offset + -(-size // 64) * 64
        if end <= len(record):
            digest = xxhash.xxh3_64_intdigest(bytes(record[offset:end]))
            set_block_field(record, block_index, "checksum", digest)
