"""Where the blocks of a record are, and whether they are intact.

This is the part of the byte format (`docs/format.md`) that both stores and codecs need. Stores
split records at the ends of blocks, and check what comes over a network before they keep it.
"""

from __future__ import annotations

import itertools
import struct

import xxhash

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError

MAGIC = b"\x89KVRAG\r\n"
FORMAT_VERSION = 2
MAX_HEADER_BYTES = 1 << 16

# magic, format version, header bytes, record bytes, key, codec, dtype, L, H, T, D, level,
# blocks, zero, profile
FIXED = struct.Struct("<8sIIQ20s16sIIIIIIII20s")
# offset, payload bytes, checksum
BLOCK = struct.Struct("<QQQ")
CHECKSUM = struct.Struct("<Q")

_START = struct.Struct("<8sIIQ20s")
_NUM_BLOCKS = struct.Struct("<I")
_NUM_BLOCKS_OFFSET = 84


def piece_ends(record: bytes | memoryview) -> tuple[int, ...]:
    """Return where the header and each block of a record end; () for other bytes."""
    try:
        entries = _entries(memoryview(record))
    except ValueError:
        return ()
    return (*(offset for offset, _, _ in entries), len(record))


def check_record(key: ChunkKey, record: bytes | memoryview) -> None:
    """Raise RecordError unless key, length and every checksum of `record` are right.

    The codec checks what the blocks hold.
    """
    view = memoryview(record)
    try:
        entries = _entries(view)
        if bytes(view[24:44]).hex() != key.digest:
            raise ValueError("the header names another key")
        header_bytes = entries[0][0]
        end = header_bytes - CHECKSUM.size
        (expected,) = CHECKSUM.unpack_from(view, end)
        if xxhash.xxh3_64_intdigest(view[:end]) != expected:
            raise ValueError("the checksum of its header differs")
        ends = [*(offset for offset, _, _ in entries[1:]), len(view)]
        for number, ((offset, _, checksum), end) in enumerate(zip(entries, ends, strict=True)):
            if xxhash.xxh3_64_intdigest(view[offset:end]) != checksum:
                raise ValueError(f"the checksum of block {number} differs")
    except ValueError as error:
        raise RecordError(
            f"record {key}: expected an intact record of format version {FORMAT_VERSION}, found "
            f"{len(record)} bytes: {error}; delete it and ingest its document again"
        ) from error


def _entries(view: memoryview) -> list[tuple[int, int, int]]:
    """Return the block index. Raises ValueError unless its blocks fill the record in order."""
    if len(view) < FIXED.size:
        raise ValueError("too few for a header")
    magic, version, header_bytes, record_bytes, _ = _START.unpack_from(view)
    if magic != MAGIC:
        raise ValueError("they do not begin as a record does")
    if version != FORMAT_VERSION:
        raise ValueError(f"the header is of format version {version}")
    if record_bytes != len(view):
        raise ValueError(f"the header says {record_bytes}")
    (num_blocks,) = _NUM_BLOCKS.unpack_from(view, _NUM_BLOCKS_OFFSET)
    end_of_index = FIXED.size + num_blocks * BLOCK.size
    least = end_of_index + CHECKSUM.size
    if not num_blocks or not least <= header_bytes <= min(MAX_HEADER_BYTES, len(view)):
        raise ValueError("the header's length is wrong")
    entries = list(BLOCK.iter_unpack(view[FIXED.size : end_of_index]))
    offsets = [offset for offset, _, _ in entries]
    if offsets[0] != header_bytes or offsets[-1] >= len(view):
        raise ValueError("the blocks do not follow the header")
    if any(here >= after for here, after in itertools.pairwise(offsets)):
        raise ValueError("the blocks are not in order")
    return entries
