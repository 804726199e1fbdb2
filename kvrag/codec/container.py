"""The byte format of one stored record; `docs/format.md` describes it field by field.

A record is a header and blocks. The codec decides what a block is: a layer, a group of layers, a
level of refinement. Exactly one xxh3_64 checksum covers each byte: the header has one, and the
header holds one for each block with its padding.

Checksums guard against damage, not against forgery. So the reader compares each value in a header
with the size of the record, with a limit, or with what the caller expects, before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import xxhash

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError
from kvrag.kvcache import KVSpec
from kvrag.recordformat import BLOCK, CHECKSUM, FIXED, FORMAT_VERSION, MAGIC, MAX_HEADER_BYTES

# The contents of a stored record's header, and its size.


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


MAX_TOKENS = 1 << 20
MAX_BLOCK_BYTES = 1 << 32
MAX_DIMENSION = 1 << 16
MAX_LEVEL = 255

# Limits of a record's size: this many times its KV, plus a constant, since a record of a token or
# two is mostly tables and states.
_MOST_TIMES = 4
_MOST_MORE_BYTES = 1 << 24

_KEY = slice(24, 44)
# One read fetches the whole header of records of up to 165 blocks.
_FIRST_READ_BYTES = 4096

_DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}

_REMEDY = "delete this record and ingest its document again"


class ByteSource(Protocol):
    """Random access to the bytes of one stored record."""

    @property
    def size_bytes(self) -> int:
        """Length of the whole record."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on.

        Raises StoreError if the medium fails, RecordError if the record ends before the buffer is
        full.
        """


def write_record(
    key: ChunkKey,
    *,
    codec: str,
    spec: KVSpec,
    num_tokens: int,
    blocks: Sequence[Sequence[bytes | memoryview]],
    level: int = 0,
    profile: str = "",
) -> bytes:
    """Return the record that holds `blocks`.

    Parameters
    ----------
    key
        The chunk that the record belongs to.
    codec
        Name of the codec, 1 to 16 ASCII characters.
    spec, num_tokens
        Shape and type of the KV that the blocks decode to.
    blocks
        For each block, the pieces of its payload, in order. They are joined without an
        intermediate copy.
    level, profile
        See `RecordHeader`.

    Raises
    ------
    ParameterError
        If a value does not fit the format.
    """
    name = codec.encode("ascii", "replace")
    if not 1 <= len(name) <= 16 or not codec.isascii() or not codec.isprintable():
        raise ParameterError(
            f"a codec name must have 1 to 16 ASCII characters, found {shown(codec)}"
        )
    if spec.dtype not in _DTYPE_CODES:
        known = ", ".join(str(dtype) for dtype in _DTYPE_CODES)
        raise ParameterError(f"a record must hold KV of type {known}; found {spec.dtype}")
    header_bytes = header_size(len(blocks))
    if not blocks or header_bytes > MAX_HEADER_BYTES:
        raise ParameterError(
            f"a record must have at least one block, and at most {MAX_HEADER_BYTES} header bytes; "
            f"found {len(blocks)} blocks ({header_bytes} bytes)"
        )
    shape = spec.num_layers, spec.num_kv_heads, num_tokens, spec.head_dim
    for what, value, cap in (*_limited(shape), ("levels", level + 1, MAX_LEVEL + 1)):
        if not 1 <= value <= cap:
            raise ParameterError(f"a record must have 1 to {cap} {what}; found {value}")

    pieces: list[bytes | memoryview] = []
    index = bytearray()
    offset = header_bytes
    for block_index, parts in enumerate(blocks):
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        if not 1 <= size_bytes <= MAX_BLOCK_BYTES:
            raise ParameterError(
                f"block {block_index}: a block must have 1 to {MAX_BLOCK_BYTES} bytes, "
                f"found {size_bytes}"
            )
        padding = bytes(padded_size(size_bytes) - size_bytes)
        checksum = xxhash.xxh3_64()
        for piece in (*parts, padding):
            checksum.update(piece)
            pieces.append(piece)
        index += BLOCK.pack(offset, size_bytes, checksum.intdigest())
        offset += padded_size(size_bytes)

    header = bytearray(header_bytes)
    begin = MAGIC, FORMAT_VERSION, header_bytes, offset, bytes.fromhex(key.digest), name
    end = level, len(blocks), 0, bytes.fromhex(profile or "00" * 20)
    FIXED.pack_into(header, 0, *begin, _DTYPE_CODES[spec.dtype], *shape, *end)
    header[FIXED.size : FIXED.size + len(index)] = index
    seal_header(header)
    return b"".join([header, *pieces])


def _limited(shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Yield what each number of L, H, T and D counts, the number, and the most that it may be."""
    names = "layers", "key/value heads", "tokens", "channels of a head"
    limits = MAX_DIMENSION, MAX_DIMENSION, MAX_TOKENS, MAX_DIMENSION
    yield from zip(names, shape, limits, strict=True)


def key_of(record: bytes | memoryview) -> ChunkKey:
    """Return the key that a record's header names. The header is not checked."""
    return ChunkKey(bytes(record[_KEY]).hex().ljust(40, "0"))


def seal_header(header: bytearray) -> None:
    """Write the header's checksum into its last 8 bytes."""
    end = len(header) - CHECKSUM.size
    CHECKSUM.pack_into(header, end, xxhash.xxh3_64_intdigest(memoryview(header)[:end]))


class RecordReader:
    """Checked access to a record. The constructor reads the header; methods read blocks.

    Parameters
    ----------
    source
        The record's bytes.
    key
        The chunk that the record must belong to.

    Attributes
    ----------
    key
        As given.
    header
        The header's contents.
    bytes_read
        Bytes fetched from the source so far.

    Raises
    ------
    RecordError
        If this version does not write such a header, or if it belongs to another key.
    StoreError
        If the source cannot deliver the bytes.
    """

    def __init__(self, source: ByteSource, key: ChunkKey) -> None:
        self._source = source
        self.key = key
        self._fetched: list[tuple[int, bytearray]] = []
        self.bytes_read = 0
        self.header = self._read_header()

    @property
    def size_bytes(self) -> int:
        """Length of the whole record."""
        return self._source.size_bytes

    def require(self, codec: str, spec: KVSpec) -> None:
        """Raise RecordError unless the record holds KV of `spec` written by `codec`."""
        header = self.header
        if header.codec != codec:
            self.refuse("codec", repr(codec), repr(header.codec), "open it with that codec")
        if header.spec != spec:
            self.refuse(
                "shape of the KV",
                str(spec),
                str(header.spec),
                "another model made the record: " + _REMEDY,
            )

    def require_profile(self, expected: str, num_levels: int) -> None:
        """Raise RecordError unless the record was coded with the expected profile and its levels.

        Parameters
        ----------
        expected
            Hash of the profile.
        num_levels
            How many levels the profile has.
        """
        if self.header.profile != expected:
            self.refuse(
                "profile",
                expected,
                self.header.profile or "none",
                "open it with the profile it was coded with, or ingest its document again",
            )
        if self.header.level >= num_levels:
            self.refuse("level", f"0 to {num_levels - 1}", str(self.header.level))

    def require_blocks(self, num_blocks: int) -> None:
        """Raise RecordError unless there are `num_blocks` blocks."""
        if len(self.header.blocks) != num_blocks:
            self.refuse("number of blocks", str(num_blocks), str(len(self.header.blocks)))

    def require_block_size(self, size_bytes: int) -> None:
        """Raise RecordError unless every block's payload has `size_bytes` bytes."""
        for block_index, block in enumerate(self.header.blocks):
            if block.size_bytes != size_bytes:
                self.refuse(
                    f"block {block_index}: size", f"{size_bytes} bytes", f"{block.size_bytes} bytes"
                )

    def read_block(self, block_index: int, buffer: memoryview) -> None:
        """Read one block's payload and padding, and check their checksum.

        Parameters
        ----------
        block_index
            From 0.
        buffer
            Writable, of exactly `Block.padded_bytes` bytes.

        Raises
        ------
        RecordError
            If the bytes are not those that were written; `buffer` then holds garbage.
        StoreError
            If the source cannot deliver the bytes.
        """
        block = self.header.blocks[block_index]
        if not self._take_fetched(block, buffer):
            self._source.read_into(block.offset, buffer)
            self.bytes_read += buffer.nbytes
        self._check(block_index, buffer)

    def read_blocks(self, blocks: range, buffer: memoryview) -> None:
        """Read consecutive blocks at once, and check each one's checksum; see `read_block`.

        Parameters
        ----------
        blocks
            Their numbers, at least one.
        buffer
            Writable, of exactly their `Block.padded_bytes` together.
        """
        parts, end = [], 0
        for block_index in blocks:
            begin, end = end, end + self.header.blocks[block_index].padded_bytes
            parts.append(buffer[begin:end])
        first = self.header.blocks[blocks[0]]
        if not all(
            self._take_fetched(self.header.blocks[block_index], part)
            for block_index, part in zip(blocks, parts, strict=True)
        ):
            self._source.read_into(first.offset, buffer)
            self.bytes_read += buffer.nbytes
        for block_index, part in zip(blocks, parts, strict=True):
            self._check(block_index, part)

    def _check(self, block_index: int, buffer: memoryview) -> None:
        block = self.header.blocks[block_index]
        found = xxhash.xxh3_64_intdigest(buffer)
        if found != block.checksum:
            self.refuse(
                f"block {block_index}: checksum of bytes {block.offset} to "
                f"{block.offset + block.padded_bytes}",
                f"{block.checksum:016x}",
                f"{found:016x}",
            )

    def fetch(self, blocks: range) -> None:
        """Read consecutive blocks into memory, in one read.

        `read_block` takes them from there, and only then compares their checksums.

        Raises
        ------
        RecordError
            If the record ends before these blocks do.
        StoreError
            If the source cannot deliver the bytes.
        """
        if not blocks:
            return
        first, last = self.header.blocks[blocks[0]], self.header.blocks[blocks[-1]]
        content = self.room(last.offset + last.padded_bytes - first.offset)
        self._source.read_into(first.offset, memoryview(content))
        self.bytes_read += len(content)
        self._fetched.append((first.offset, content))

    def room(self, num_bytes: int) -> bytearray:
        """Return a buffer for bytes of the record.

        Raises
        ------
        RecordError
            If memory is too small: a header may claim any size.
        """
        try:
            return bytearray(num_bytes)
        except (MemoryError, OverflowError):
            self.refuse("blocks", "no more bytes than fit into memory", f"{num_bytes} bytes")

    def cancel(self) -> None:
        """Cancel reads of other threads, if the source can; they raise StoreError."""
        cancel = getattr(self._source, "cancel", None)
        if cancel is not None:
            cancel()

    def _take_fetched(self, block: Block, buffer: memoryview) -> bool:
        """Fill `buffer` if the block is in memory; return whether it is."""
        for offset, content in self._fetched:
            begin = block.offset - offset
            if begin >= 0 and begin + block.padded_bytes <= len(content):
                buffer[:] = memoryview(content)[begin : begin + block.padded_bytes]
                return True
        return False

    def _read_header(self) -> RecordHeader:
        size = self._source.size_bytes
        if size < header_size(1):
            self.refuse("length", f"at least {header_size(1)} bytes", f"{size} bytes")
        first = bytearray(min(size, _FIRST_READ_BYTES))
        self._source.read_into(0, memoryview(first))
        magic, version, header_bytes, record_bytes, *rest = FIXED.unpack_from(first)
        digest, codec, dtype_code, *shape = rest[:7]
        level, num_blocks, zero, profile = rest[7:]
        if magic != MAGIC:
            self.refuse("magic number", repr(MAGIC), repr(magic), "this is not a kvrag record")
        if version != FORMAT_VERSION:
            remedy = "use the kvrag that wrote it, or ingest its document again"
            self.refuse("format version", str(FORMAT_VERSION), str(version), remedy)
        if header_bytes > min(MAX_HEADER_BYTES, size) or header_bytes != header_size(num_blocks):
            self.refuse(
                "header length",
                f"{header_size(num_blocks)} bytes for {num_blocks} blocks, "
                f"at most {min(MAX_HEADER_BYTES, size)}",
                f"{header_bytes} bytes",
            )
        if record_bytes != size:
            self.refuse("length", f"{record_bytes} bytes, as its header says", f"{size} bytes")

        header = first[:header_bytes]
        if header_bytes > len(first):
            header += bytes(header_bytes - len(first))
            self._source.read_into(len(first), memoryview(header)[len(first) :])
        self.bytes_read = header_bytes
        end = header_bytes - CHECKSUM.size
        (expected,) = CHECKSUM.unpack_from(header, end)
        found = xxhash.xxh3_64_intdigest(memoryview(header)[:end])
        if found != expected:
            self.refuse("checksum of the header", f"{expected:016x}", f"{found:016x}")

        # From here on the header is as written, but not necessarily by kvrag.
        if digest.hex() != self.key.digest:
            self.refuse("chunk key", self.key.digest, digest.hex())
        name = codec.rstrip(b"\0")
        if not name or not name.isascii() or not name.decode("ascii").isprintable():
            self.refuse("codec name", "printable ASCII", repr(name))
        if dtype_code not in _DTYPES:
            self.refuse("code of the element type", f"one of {sorted(_DTYPES)}", str(dtype_code))
        if zero:
            self.refuse("reserved field", "0", str(zero))
        if level > MAX_LEVEL:
            self.refuse("level", f"0 to {MAX_LEVEL}", str(level))
        for what, value, cap in _limited(shape):
            if not 1 <= value <= cap:
                self.refuse(f"number of {what}", f"1 to {cap}", str(value))
        num_layers, num_kv_heads, num_tokens, head_dim = shape
        spec = KVSpec(num_layers, num_kv_heads, head_dim, _DTYPES[dtype_code])
        # Callers compare shape and tokens with what they expect. This bound on the record's size
        # keeps them from allocating more than these can need.
        most = _MOST_TIMES * num_tokens * spec.bytes_per_token + _MOST_MORE_BYTES
        if size > most:
            self.refuse(
                "length", f"at most {most} bytes for {num_tokens} tokens of {spec}", f"{size} bytes"
            )
        return RecordHeader(
            codec=name.decode("ascii"),
            spec=spec,
            num_tokens=num_tokens,
            blocks=self._check_blocks(header, num_blocks, size),
            level=level,
            profile=profile.hex() if any(profile) else "",
        )

    def _check_blocks(self, header: bytearray, num_blocks: int, size: int) -> tuple[Block, ...]:
        # Blocks follow each other without gaps: no two overlap and no byte is left unread.
        end_of_index = FIXED.size + num_blocks * BLOCK.size
        index = memoryview(header)[FIXED.size : end_of_index]
        blocks = tuple(Block(*fields) for fields in BLOCK.iter_unpack(index))
        end = len(header)
        for block_index, block in enumerate(blocks):
            if block.offset != end:
                self.refuse(f"block {block_index}: offset", str(end), str(block.offset))
            if not 1 <= block.size_bytes <= min(MAX_BLOCK_BYTES, size - end):
                self.refuse(
                    f"block {block_index}: size",
                    f"1 to {min(MAX_BLOCK_BYTES, size - end)} bytes",
                    f"{block.size_bytes} bytes",
                )
            end += block.padded_bytes
        if end != size:
            self.refuse("end of the last block", f"at {size}, the end of the record", str(end))
        return blocks

    def refuse(self, what: str, expected: str, found: str, remedy: str = _REMEDY) -> NoReturn:
        """Raise a RecordError about this record."""
        raise RecordError(
            f"record {self.key}: {what}: expected {expected}, found {found}; {remedy}"
        )
