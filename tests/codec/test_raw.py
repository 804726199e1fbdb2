"""Codecs ``raw`` and ``raw-heads``: KV to the bit, layer by layer or head by head."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvrag.codec import raw
from kvrag.codec.base import Codec
from kvrag.codec.raw import HeadRange, RawCodec, RawHeadsCodec
from kvrag.errors import ParameterError, RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag_testing.codec_contract import (
    KEY,
    BytesSource,
    CodecContract,
    decode,
    random_kv,
    same_bits,
    spec_of,
)
from tests.codec.test_golden import golden_kv


class TestRawCodec(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return RawCodec()


def test_views_survive_a_growing_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_scratch", raw._Scratch())
    codec = RawCodec()
    small, large = random_kv(spec_of(), 1), random_kv(spec_of(), 4000)
    small_chunk = codec.open(KEY, BytesSource(codec.encode(KEY, small)), spec_of())
    large_chunk = codec.open(KEY, BytesSource(codec.encode(KEY, large)), spec_of())
    keys, _ = small_chunk.read_layer(0)
    large_chunk.read_layer(0)
    assert torch.equal(keys, small.keys[0])
    assert torch.equal(small_chunk.read_layer(1)[1], small.values[1])


def test_meta_tensors() -> None:
    empty = torch.empty(1, 1, 1, 1, device="meta")
    with pytest.raises(ParameterError, match="on the CPU; found meta"):
        RawCodec().encode(KEY, ChunkKV(empty, empty))


def test_big_endian_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ParameterError, match="little-endian"):
        RawCodec()


SPEC = KVSpec(3, 4, 16, torch.float32)
GOLDEN = Path(__file__).parent / "golden" / "raw-heads-v2.kv"


class TestRawHeadsCodec(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return RawHeadsCodec()


def test_golden_record() -> None:
    kv = golden_kv(torch.bfloat16)
    assert RawHeadsCodec().encode(KEY, kv) == GOLDEN.read_bytes()
    spec = KVSpec(*(kv.keys.shape[axis] for axis in (0, 1, 3)), torch.bfloat16)
    found = decode(RawHeadsCodec(), KEY, GOLDEN.read_bytes(), spec)
    assert same_bits(found.keys, kv.keys)
    assert same_bits(found.values, kv.values)


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(2, 4), slice(0, 4)])
def test_only_the_bytes_of_some_heads_are_read(heads: slice) -> None:
    kv = random_kv(SPEC, 40)
    record = RawHeadsCodec().open(KEY, BytesSource(RawHeadsCodec().encode(KEY, kv)), SPEC)
    before = record.bytes_read
    part = HeadRange(record, heads)
    for layer in range(3):
        keys, values = part.read_layer(layer)
        assert torch.equal(keys, kv.keys[layer, heads])
        assert torch.equal(values, kv.values[layer, heads])
    # 2 x tokens x channels x 4 bytes of a head is a multiple of the alignment here.
    assert record.bytes_read - before == 3 * (heads.stop - heads.start) * 2 * 40 * 16 * 4


def test_damage_of_other_heads_is_not_seen() -> None:
    kv = random_kv(SPEC, 40)
    content = bytearray(RawHeadsCodec().encode(KEY, kv))
    content[-1] ^= 1
    record = RawHeadsCodec().open(KEY, BytesSource(bytes(content)), SPEC)
    keys, _ = HeadRange(record, slice(0, 3)).read_layer(2)
    assert torch.equal(keys, kv.keys[2, :3])
    with pytest.raises(RecordError, match="checksum"):
        HeadRange(record, slice(3, 4)).read_layer(2)


def test_many_heads_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_MAX_BLOCKS", 6)
    kv = random_kv(SPEC, 8)
    record = RawHeadsCodec().open(KEY, BytesSource(RawHeadsCodec().encode(KEY, kv)), SPEC)
    for heads in (slice(0, 2), slice(1, 2), slice(1, 4), slice(3, 4)):
        keys, values = record.read_heads(1, heads)
        assert torch.equal(keys, kv.keys[1, heads])
        assert torch.equal(values, kv.values[1, heads])
