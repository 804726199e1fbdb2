from __future__ import annotations

import tracemalloc

import pytest
import torch

from kvrag.codec import container
from kvrag.codec.block import BlockReader
from kvrag.codec.container import RecordReader, header_size, write_record
from kvrag.codec.raw import RawCodec
from kvrag.errors import ParameterError, RecordError
from kvrag.kvcache import KVSpec
from kvrag_testing.codec_contract import KEY, OTHER_KEY, BytesSource, decode, random_kv, spec_of
from tests.codec import forge

SPEC = spec_of(num_layers=3)


def write(**changes: object) -> bytes:
    arguments: dict[str, object] = {
        "codec": "test",
        "spec": SPEC,
        "num_tokens": 5,
        "blocks": [[b"one"], [b"t", b"", b"wo"], [b"x" * 100]],
    }
    return write_record(KEY, **{**arguments, **changes})  # type: ignore[arg-type]


def make_record() -> bytearray:
    return bytearray(RawCodec().encode(KEY, random_kv(SPEC, 4)))


def test_blocks_of_any_size_come_back() -> None:
    record = write()
    reader = RecordReader(BytesSource(record), KEY)
    assert reader.header.codec == "test"
    assert reader.header.spec == SPEC
    assert reader.header.num_tokens == 5
    found = []
    for layer_index, block in enumerate(reader.header.blocks):
        assert block.offset % 64 == 0
        buffer = bytearray(block.padded_bytes)
        reader.read_block(layer_index, memoryview(buffer))
        found.append(bytes(buffer[: block.size_bytes]))
        assert not any(buffer[block.size_bytes :])
    assert found == [b"one", b"two", b"x" * 100]
    assert reader.size_bytes == len(record) == header_size(3) + 64 + 64 + 128


def test_a_header_longer_than_the_first_read() -> None:
    spec = KVSpec(num_layers=400, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    kv = random_kv(spec, 2)
    record = RawCodec().encode(KEY, kv)
    assert header_size(400) > container._FIRST_READ_BYTES
    assert torch.equal(decode(RawCodec(), KEY, record, spec).keys, kv.keys)
    for size in (header_size(400) - 1, container._FIRST_READ_BYTES, len(record) - 1):
        with pytest.raises(RecordError):
            RecordReader(BytesSource(record[:size]), KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": ""}, "codec name"),
        ({"codec": "x" * 17}, "codec name"),
        ({"num_tokens": 0}, "tokens; found 0"),
        ({"num_tokens": container.MAX_TOKENS + 1}, "tokens; found"),
        ({"blocks": []}, "found 0 blocks"),
        ({"level": 256}, "levels; found 257"),
        ({"blocks": [[b"x"], [], [b"x"]]}, "block 1.*found 0"),
        ({"spec": KVSpec(3, 2, 8, torch.float64)}, "float64"),
        ({"spec": KVSpec(3000, 1, 8, torch.float32), "blocks": [[b"x"]] * 3000}, "header"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        write(**changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", b"GARBAGE!", "magic number.*not a kvrag record"),
        ("version", 1, r"format version: expected 2, found 1; use the kvrag that wrote it"),
        ("header_bytes", 0, "header length"),
        ("header_bytes", 2**32 - 1, "header length.*found 4294967295"),
        ("record_bytes", 0, "length: expected 0 bytes"),
        ("record_bytes", 2**64 - 1, "length: expected 18446744073709551615 bytes"),
        ("key", bytes.fromhex(OTHER_KEY.digest), f"chunk key.*found {OTHER_KEY}"),
        ("codec", b"", "codec name"),
        ("codec", b"raw\0raw", "codec name"),
        ("codec", b"rans", "codec: expected 'raw', found 'rans'"),
        ("dtype", 0, "code of the element type.*found 0"),
        ("dtype", 2, "shape of the KV"),
        ("num_blocks", 0, "header length"),
        ("num_blocks", 2, "end of the last block"),
        ("num_blocks", 2**32 - 1, "header length"),
        ("num_layers", 2**17, "number of layers"),
        ("reserved", 1, "reserved field"),
        ("level", 256, "level: expected 0 to 255"),
        ("num_kv_heads", 0, "number of key/value heads.*found 0"),
        ("num_tokens", 0, "number of tokens.*found 0"),
        ("num_tokens", 3, "block 0: size: expected 384 bytes, found 512"),
        ("head_dim", 2**32 - 1, "number of channels of a head.*found 4294967295"),
    ],
)
def test_lying_fields(field: str, value: int | bytes, message: str) -> None:
    record = make_record()
    forge.set_field(record, field, value)
    with pytest.raises(RecordError, match=f"record {KEY}: ({message})"):
        RawCodec().open(KEY, BytesSource(forge.reseal(record, header_size(3))), SPEC)


@pytest.mark.parametrize("num_blocks", [10, 2728, 100_000_000])
def test_a_long_header_is_not_believed(num_blocks: int) -> None:
    """Longer than the record, longer than the cap, longer than the memory."""
    record = make_record() + bytes(100_000 if num_blocks == 2728 else 0)
    record = record if num_blocks != 10 else record[: header_size(1)]
    forge.set_field(record, "num_blocks", num_blocks)
    forge.set_field(record, "header_bytes", header_size(num_blocks))
    forge.set_field(record, "record_bytes", len(record))
    source = BytesSource(bytes(record))
    with pytest.raises(RecordError, match=f"header length.*found {header_size(num_blocks)} bytes"):
        RawCodec().open(KEY, source, SPEC)
    assert source.largest_read <= container._FIRST_READ_BYTES


@pytest.mark.parametrize(
    ("layer_index", "field", "value", "message"),
    [
        (0, "offset", 0, "block 0: offset: expected 192, found 0"),
        (1, "offset", 192, "block 1: offset: expected 704, found 192"),
        (0, "size", 0, "block 0: size"),
        (1, "size", 448, "block 2: offset: expected 1152, found 1216"),
        (2, "size", 448, "end of the last block"),
        (2, "size", 2**64 - 1, "block 2: size"),
        (0, "size", 511, "block 0: size: expected 512 bytes, found 511"),
        (1, "checksum", 0, "block 1: checksum"),
    ],
)
def test_lying_index(layer_index: int, field: str, value: int, message: str) -> None:
    record = make_record()
    forge.set_block_field(record, layer_index, field, value)
    with pytest.raises(RecordError, match=f"record {KEY}: {message}"):
        decode(RawCodec(), KEY, forge.reseal(record, header_size(3)), SPEC)


class Promising(BytesSource):
    """A record whose server says that it is far longer than it is."""

    size_bytes = 0

    def __init__(self, record: bytes, size_bytes: int) -> None:
        super().__init__(record)
        self.size_bytes = size_bytes


def test_a_block_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = bytearray(write(blocks=[[b"one"]]))
    size_bytes = (1 << 62) - header_size(1)
    forge.set_block_field(record, 0, "size", size_bytes)
    forge.set_field(record, "record_bytes", 1 << 62)
    record = bytearray(forge.reseal(record, header_size(1)))
    monkeypatch.setattr(container, "MAX_BLOCK_BYTES", 1 << 62)
    monkeypatch.setattr(container, "_MOST_MORE_BYTES", 1 << 62)
    reader = RecordReader(Promising(bytes(record) + bytes(1 << 16), 1 << 62), KEY)
    with pytest.raises(RecordError, match="no more bytes than fit into memory"):
        reader.fetch(range(1))
    with pytest.raises(RecordError, match="no more bytes than fit into memory"):
        BlockReader(reader, 0)


@pytest.mark.parametrize("size_bytes", [1 << 32, (1 << 24) + (1 << 20)])
def test_a_record_longer_than_its_tokens_is_refused_unread(size_bytes: int) -> None:
    record = bytearray(write(blocks=[[b"one"]]))
    forge.set_block_field(record, 0, "size", size_bytes - header_size(1))
    forge.set_field(record, "record_bytes", size_bytes)
    record = bytearray(forge.reseal(record, header_size(1)))
    source = Promising(bytes(record) + bytes(1 << 12), size_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(
            RecordError, match=rf"length: expected at most \d+ bytes for .*{size_bytes}"
        ):
            RecordReader(source, KEY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
