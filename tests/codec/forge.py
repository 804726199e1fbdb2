"""Records as an attacker writes them: any field changed, all checksums right again."""

from __future__ import annotations

import struct

import xxhash

from kvrag.codec.container import seal_header

# name: offset and struct format of the fields before the layer index
FIELDS = {
    "magic": (0, "8s"),
    "version": (8, "I"),
    "header_bytes": (12, "I"),
    "record_bytes": (16, "Q"),
    "key": (24, "20s"),
    "codec": (44, "16s"),
    "dtype": (60, "I"),
    "num_layers": (64, "I"),
    "num_kv_heads": (68, "I"),
    "num_tokens": (72, "I"),
    "head_dim": (76, "I"),
    "level": (80, "I"),
    "num_blocks": (84, "I"),
    "reserved": (88, "I"),
    "profile": (92, "20s"),
}
INDEX_OFFSET = 112
INDEX_ENTRY_BYTES = 24
BLOCK_FIELDS = {"offset": 0, "size": 8, "checksum": 16}


def get_field(record: bytes, name: str) -> int | bytes:
    offset, kind = FIELDS[name]
    (value,) = struct.unpack_from("<" + kind, record, offset)
    return value


def set_field(record: bytearray, name: str, value: int | bytes) -> None:
    offset, kind = FIELDS[name]
    struct.pack_into("<" + kind, record, offset, value)


def set_block_field(record: bytearray, block_index: int, name: str, value: int) -> None:
    start = INDEX_OFFSET + block_index * INDEX_ENTRY_BYTES + BLOCK_FIELDS[name]
    struct.pack_into("<Q", record, start, value)


def reseal(record: bytearray, header_bytes: int) -> bytes:
    """Return the record with the checksum of a header of `header_bytes` bytes put right."""
    header = bytearray(record[:header_bytes])
    seal_header(header)
    return bytes(header) + bytes(record[header_bytes:])


def reseal_blocks(record: bytearray) -> None:
    """Put right the checksums of those blocks that lie within the record."""
    num_blocks = struct.unpack_from("<I", record, FIELDS["num_blocks"][0])[0]
    for block_index in range(min(num_blocks, 64)):
        start = INDEX_OFFSET + block_index * INDEX_ENTRY_BYTES
        if start + INDEX_ENTRY_BYTES > len(record):
            return
        offset, size = struct.unpack_from("<QQ", record, start)
        end = offset + -(-size // 64) * 64
        if end <= len(record):
            digest = xxhash.xxh3_64_intdigest(bytes(record[offset:end]))
            struct.pack_into("<Q", record, start + 16, digest)
