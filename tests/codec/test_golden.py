"""The byte format as records once written show it.

A golden file is never written anew: a change that breaks this test needs a new format version
(and new files beside the old ones).
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import xxhash

from kvrag.codec.raw import RawCodec
from kvrag.errors import RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag_testing.codec_contract import KEY, decode, same_bits

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {
    "float32": (1, torch.float32),
    "bfloat16": (2, torch.bfloat16),
    "float16": (3, torch.half),
}
L, H, T, D = 3, 2, 5, 3


def golden_kv(dtype: torch.dtype) -> ChunkKV:
    # Small sixteenths: exact in every dtype, different in every place, of either sign.
    keys = (torch.arange(L * H * T * D).reshape(L, H, T, D) - 40) / 16
    return ChunkKV(keys.to(dtype), (-keys / 2).to(dtype))


@pytest.mark.parametrize("name", DTYPES)
def test_golden_records(name: str) -> None:
    _, dtype = DTYPES[name]
    record = (GOLDEN / f"raw-v2-{name}.kv").read_bytes()
    kv = golden_kv(dtype)
    assert RawCodec().encode(KEY, kv) == record
    found = decode(RawCodec(), KEY, record, KVSpec(L, H, D, dtype))
    assert same_bits(found.keys, kv.keys)
    assert same_bits(found.values, kv.values)


@pytest.mark.parametrize("name", DTYPES)
def test_the_documented_layout(name: str) -> None:
    """Read a golden record by docs/format.md alone, without kvrag."""
    code, dtype = DTYPES[name]
    record = (GOLDEN / f"raw-v2-{name}.kv").read_bytes()
    assert record[0:8] == b"\x89KVRAG\r\n"
    version, header_bytes, record_bytes = struct.unpack("<IIQ", record[8:24])
    assert (version, header_bytes, record_bytes) == (2, 192, len(record))
    assert record[24:44].hex() == KEY.digest
    assert record[44:60] == b"raw" + b"\0" * 13
    assert struct.unpack("<5I", record[60:80]) == (code, L, H, T, D)
    assert not any(record[112 + 24 * L : header_bytes - 8])
    assert struct.unpack("<3I20s", record[80:112]) == (0, L, 0, bytes(20))
    (checksum,) = struct.unpack("<Q", record[header_bytes - 8 : header_bytes])
    assert checksum == xxhash.xxh3_64_intdigest(record[: header_bytes - 8])
    kv = golden_kv(dtype)
    end = header_bytes
    for layer_index in range(L):
        start = 112 + 24 * layer_index
        offset, size, checksum = struct.unpack("<QQQ", record[start : start + 24])
        assert offset == end
        assert size == 2 * H * T * D * dtype.itemsize
        end = offset + -(-size // 64) * 64
        assert checksum == xxhash.xxh3_64_intdigest(record[offset:end])
        assert not any(record[offset + size : end])
        numbers = torch.frombuffer(bytearray(record[offset : offset + size]), dtype=dtype)
        expected = torch.cat([kv.keys[layer_index].flatten(), kv.values[layer_index].flatten()])
        assert torch.equal(numbers, expected)
    assert end == len(record)


@pytest.mark.parametrize("name", DTYPES)
def test_records_of_version_1_are_refused(name: str) -> None:
    record = (GOLDEN / f"raw-v1-{name}.kv").read_bytes()
    with pytest.raises(RecordError, match="format version: expected 2, found 1"):
        decode(RawCodec(), KEY, record, KVSpec(L, H, D, DTYPES[name][1]))
