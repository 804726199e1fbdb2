"""The contents of a stored record's header, and its size."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.kvcache import KVSpec
from kvrag.recordformat import BLOCK, CHECKSUM, FIXED

ALIGNMENT_BYTES = 64


def padded_size(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def header_size(num_blocks: int) -> int:
    """Return the size of the header in bytes, checksum and padding included."""
    return padded_size(FIXED.size + num_blocks * BLOCK.size + CHECKSUM.size)


@dataclass(frozen=True, slots=True)
class Block:
    """Where the bytes of one block are.

    Attributes
    ----------
    offset
        First byte, counted from the start of the record; a multiple of `ALIGNMENT_BYTES`.
    size_bytes
        Bytes of the payload, without padding.
    checksum
        xxh3_64 of payload and padding.
    """

    offset: int
    size_bytes: int
    checksum: int

    @property
    def padded_bytes(self) -> int:
        """Bytes of payload and padding, which are read and checksummed together."""
        return padded_size(self.size_bytes)


@dataclass(frozen=True)
class RecordHeader:
    """The contents of a header, checked.

    Attributes
    ----------
    codec
        Name of the codec that wrote the blocks.
    spec
        L, H, D and dtype of the KV.
    num_tokens
        T.
    blocks
        The blocks, in order.
    level
        The profile's level, counted from 0; 0 for codecs without levels.
    profile
        Hash of the profile that the blocks were coded with, 40 hexadecimal digits, or "".
    """

    codec: str
    spec: KVSpec
    num_tokens: int
    blocks: tuple[Block, ...]
    level: int
    profile: str
