from __future__ import annotations

import sys

import pytest
import torch

from kvrag.codec import raw
from kvrag.codec.base import Codec
from kvrag.codec.raw import RawCodec
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV
from kvrag_testing.codec_contract import KEY, BytesSource, CodecContract, random_kv, spec_of


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
