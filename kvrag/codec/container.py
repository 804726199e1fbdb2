"""The byte format of one stored record; `docs/format.md` describes it field by field.

A record is a header and one block per layer. Every byte of it is covered by exactly one
xxh3_64 checksum: the header by its own, a block and its padding by the one in the header.
Checksums guard against damage, not against forgery, so nothing read from a header is used
before it has been compared with the size of the record, with the caps, or with what the
caller expects.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import xxhash

from kvrag.chunk import ChunkKey
from kvrag.codec.base import ByteSource
from kvrag.errors import ParameterError, RecordError
from kvrag.kvcache import KVSpec

MAGIC = b"\x89KVRAG\r\n"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 1 << 16
MAX_TOKENS = 1 << 20
MAX_BLOCK_BYTES = 1 << 32
MAX_DIMENSION = 1 << 16

# magic, format version, header bytes, record bytes, key, codec, dtype, L, H, T, D
_FIXED = struct.Struct("<8sIIQ20s16sIIIII")
# offset, payload bytes, checksum
_BLOCK = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")
# One read fetches the whole header of models of up to 166 layers.
_FIRST_READ_BYTES = 4096

_DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}

_REMEDY = "delete this record and ingest its document again"


def padded_size(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def header_size(num_layers: int) -> int:
    """Return the bytes before the first block, checksum and padding included."""
    return padded_size(_FIXED.size + num_layers * _BLOCK.size + _CHECKSUM.size)


@dataclass(frozen=True, slots=True)
class Block:
    """Where the bytes of one layer are.

    Attributes
    ----------
    offset
        First byte, counted from the start of the record; a multiple of `ALIGNMENT_BYTES`.
    size_bytes
        Payload, padding excluded.
    checksum
        xxh3_64 of payload and padding.
    """

    offset: int
    size_bytes: int
    checksum: int

    @property
    def padded_bytes(self) -> int:
        """Payload and padding: what is read and checksummed."""
        return padded_size(self.size_bytes)


@dataclass(frozen=True)
class RecordHeader:
    """What a header says, once it has been checked.

    Attributes
    ----------
    codec
        Name of the codec that wrote the blocks.
    spec
        L, H, D and dtype of the KV.
    num_tokens
        T.
    blocks
        One per layer, in order.
    """

    codec: str
    spec: KVSpec
    num_tokens: int
    blocks: tuple[Block, ...]


def write_record(
    key: ChunkKey,
    *,
    codec: str,
    spec: KVSpec,
    num_tokens: int,
    blocks: Sequence[Sequence[bytes | memoryview]],
) -> bytes:
    """Return the record that holds `blocks`.

    Parameters
    ----------
    key
        The chunk the record belongs to.
    codec
        Name of the codec, 1 to 16 ASCII characters.
    spec, num_tokens
        Shape and type of the KV the blocks decode to.
    blocks
        For each layer the pieces of its payload, in order; they are joined without an
        intermediate copy.

    Raises
    ------
    ParameterError
        When a value does not fit the format.
    """
    name = codec.encode("ascii", "replace")
    if not 1 <= len(name) <= 16 or not codec.isascii() or not codec.isprintable():
        raise ParameterError(f"a codec name is 1 to 16 ASCII characters, found {codec!r}")
    if spec.dtype not in _DTYPE_CODES:
        known = ", ".join(str(dtype) for dtype in _DTYPE_CODES)
        raise ParameterError(f"a record holds KV of type {known}; found {spec.dtype}")
    header_bytes = header_size(spec.num_layers)
    if len(blocks) != spec.num_layers or not blocks or header_bytes > MAX_HEADER_BYTES:
        raise ParameterError(
            f"a record holds one block per layer, at most {MAX_HEADER_BYTES} bytes of header; "
            f"found {len(blocks)} blocks for {spec.num_layers} layers ({header_bytes} bytes)"
        )
    for what, value, cap in (
        ("tokens", num_tokens, MAX_TOKENS),
        ("key/value heads", spec.num_kv_heads, MAX_DIMENSION),
        ("channels of a head", spec.head_dim, MAX_DIMENSION),
    ):
        if not 1 <= value <= cap:
            raise ParameterError(f"a record holds 1 to {cap} {what}; found {value}")

    pieces: list[bytes | memoryview] = []
    index = bytearray()
    offset = header_bytes
    for layer_index, parts in enumerate(blocks):
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        if not 1 <= size_bytes <= MAX_BLOCK_BYTES:
            raise ParameterError(
                f"layer {layer_index}: a block holds 1 to {MAX_BLOCK_BYTES} bytes, "
                f"found {size_bytes}"
            )
        padding = bytes(padded_size(size_bytes) - size_bytes)
        checksum = xxhash.xxh3_64()
        for piece in (*parts, padding):
            checksum.update(piece)
            pieces.append(piece)
        index += _BLOCK.pack(offset, size_bytes, checksum.intdigest())
        offset += padded_size(size_bytes)

    header = bytearray(header_bytes)
    _FIXED.pack_into(
        header,
        0,
        MAGIC,
        FORMAT_VERSION,
        header_bytes,
        offset,
        bytes.fromhex(key.digest),
        name,
        _DTYPE_CODES[spec.dtype],
        spec.num_layers,
        spec.num_kv_heads,
        num_tokens,
        spec.head_dim,
    )
    header[_FIXED.size : _FIXED.size + len(index)] = index
    seal_header(header)
    return b"".join([header, *pieces])


def seal_header(header: bytearray) -> None:
    """Write the header's checksum into its last 8 bytes."""
    end = len(header) - _CHECKSUM.size
    _CHECKSUM.pack_into(header, end, xxhash.xxh3_64_intdigest(memoryview(header)[:end]))


class RecordReader:
    """Checked access to a record: the header at once, blocks when asked for.

    Parameters
    ----------
    source
        Where the record's bytes are.
    key
        The chunk the record must belong to.

    Raises
    ------
    RecordError
        When the header is not one this version writes, or belongs to another key.
    StoreError
        When the source cannot deliver the bytes.
    """

    def __init__(self, source: ByteSource, key: ChunkKey) -> None:
        self._source = source
        self._key = key
        self.header = self._read_header()

    @property
    def size_bytes(self) -> int:
        """Length of the whole record."""
        return self._source.size_bytes

    def require(self, codec: str, spec: KVSpec) -> None:
        """Raise RecordError unless the record holds KV of `spec` written by `codec`."""
        header = self.header
        if header.codec != codec:
            self._refuse("codec", repr(codec), repr(header.codec), "open it with its own codec")
        if header.spec != spec:
            self._refuse(
                "shape of the KV",
                str(spec),
                str(header.spec),
                "the record was made by another model: " + _REMEDY,
            )

    def require_block_size(self, size_bytes: int) -> None:
        """Raise RecordError unless every block's payload has `size_bytes` bytes."""
        for layer_index, block in enumerate(self.header.blocks):
            if block.size_bytes != size_bytes:
                self._refuse(
                    f"layer {layer_index}: size of the block",
                    f"{size_bytes} bytes",
                    f"{block.size_bytes} bytes",
                )

    def read_block(self, layer_index: int, buffer: memoryview) -> None:
        """Read one layer's payload and padding, and check them.

        Parameters
        ----------
        layer_index
            0 to L - 1.
        buffer
            Writable, of exactly `Block.padded_bytes` bytes.

        Raises
        ------
        RecordError
            When the bytes are not those that were written; `buffer` is then garbage.
        StoreError
            When the source cannot deliver the bytes.
        """
        block = self.header.blocks[layer_index]
        self._source.read_into(block.offset, buffer)
        found = xxhash.xxh3_64_intdigest(buffer)
        if found != block.checksum:
            self._refuse(
                f"layer {layer_index}: checksum of bytes {block.offset} to "
                f"{block.offset + block.padded_bytes}",
                f"{block.checksum:016x}",
                f"{found:016x}",
            )

    def _read_header(self) -> RecordHeader:
        size = self._source.size_bytes
        if size < header_size(1):
            self._refuse("length", f"at least {header_size(1)} bytes", f"{size} bytes")
        first = bytearray(min(size, _FIRST_READ_BYTES))
        self._source.read_into(0, memoryview(first))
        (
            magic,
            version,
            header_bytes,
            record_bytes,
            digest,
            codec,
            dtype_code,
            num_layers,
            num_kv_heads,
            num_tokens,
            head_dim,
        ) = _FIXED.unpack_from(first)
        if magic != MAGIC:
            self._refuse("magic number", repr(MAGIC), repr(magic), "this is not a kvrag record")
        if version != FORMAT_VERSION:
            remedy = "use the kvrag that wrote it, or ingest its document again"
            self._refuse("format version", str(FORMAT_VERSION), str(version), remedy)
        if header_bytes > min(MAX_HEADER_BYTES, size) or header_bytes != header_size(num_layers):
            self._refuse(
                "header length",
                f"{header_size(num_layers)} bytes for {num_layers} layers, "
                f"at most {min(MAX_HEADER_BYTES, size)}",
                f"{header_bytes} bytes",
            )
        if record_bytes != size:
            self._refuse("length", f"{record_bytes} bytes, as its header says", f"{size} bytes")

        header = first[:header_bytes]
        if header_bytes > len(first):
            header += bytes(header_bytes - len(first))
            self._source.read_into(len(first), memoryview(header)[len(first) :])
        end = header_bytes - _CHECKSUM.size
        (expected,) = _CHECKSUM.unpack_from(header, end)
        found = xxhash.xxh3_64_intdigest(memoryview(header)[:end])
        if found != expected:
            self._refuse("checksum of the header", f"{expected:016x}", f"{found:016x}")

        # From here on the header is what somebody wrote, which need not have been kvrag.
        if digest.hex() != self._key.digest:
            self._refuse("chunk key", self._key.digest, digest.hex())
        name = codec.rstrip(b"\0")
        if not name or not name.isascii() or not name.decode("ascii").isprintable():
            self._refuse("codec name", "printable ASCII", repr(name))
        if dtype_code not in _DTYPES:
            self._refuse("code of the element type", f"one of {sorted(_DTYPES)}", str(dtype_code))
        for what, value, cap in (
            ("number of layers", num_layers, MAX_HEADER_BYTES),
            ("number of key/value heads", num_kv_heads, MAX_DIMENSION),
            ("number of tokens", num_tokens, MAX_TOKENS),
            ("channels of a head", head_dim, MAX_DIMENSION),
        ):
            if not 1 <= value <= cap:
                self._refuse(what, f"1 to {cap}", str(value))
        return RecordHeader(
            codec=name.decode("ascii"),
            spec=KVSpec(num_layers, num_kv_heads, head_dim, _DTYPES[dtype_code]),
            num_tokens=num_tokens,
            blocks=self._check_blocks(header, num_layers, size),
        )

    def _check_blocks(self, header: bytearray, num_layers: int, size: int) -> tuple[Block, ...]:
        # Blocks follow one another without gaps: no two overlap and no byte is left unread.
        end_of_index = _FIXED.size + num_layers * _BLOCK.size
        index = memoryview(header)[_FIXED.size : end_of_index]
        blocks = tuple(Block(*fields) for fields in _BLOCK.iter_unpack(index))
        end = len(header)
        for layer_index, block in enumerate(blocks):
            if block.offset != end:
                self._refuse(f"layer {layer_index}: offset", str(end), str(block.offset))
            if not 1 <= block.size_bytes <= min(MAX_BLOCK_BYTES, size - end):
                self._refuse(
                    f"layer {layer_index}: size of the block",
                    f"1 to {min(MAX_BLOCK_BYTES, size - end)} bytes",
                    f"{block.size_bytes} bytes",
                )
            end += block.padded_bytes
        if end != size:
            self._refuse("end of the last block", f"at {size}, the end of the record", str(end))
        return blocks

    def _refuse(self, what: str, expected: str, found: str, remedy: str = _REMEDY) -> NoReturn:
        raise RecordError(
            f"record {self._key}: {what}: expected {expected}, found {found}; {remedy}"
        )
