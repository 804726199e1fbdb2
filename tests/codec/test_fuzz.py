"""Damaged and forged records. `KVRAG_FUZZ_RECORDS=1000000` makes it a long run."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvrag.codec.container import header_size
from kvrag.codec.raw import RawCodec
from kvrag.errors import RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from tests.codec import forge
from tests.contracts.codec_contract import KEY, BytesSource, random_kv, same_bits

NUM_RECORDS = int(os.environ.get("KVRAG_FUZZ_RECORDS", "10000"))
SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=5, dtype=torch.float16)
CODEC = RawCodec()
KV = random_kv(SPEC, 3)
RECORD = CODEC.encode(KEY, KV)
OTHER_RECORD = CODEC.encode(KEY, random_kv(SPEC, 3, seed=1))
HEADER_BYTES = header_size(SPEC.num_layers)

_settings = settings(
    deadline=None,
    database=None,
    derandomize=NUM_RECORDS <= 10_000,
    suppress_health_check=[HealthCheck.too_slow],
)

positions = st.integers(0, len(RECORD) - 1)
sizes = st.integers(0, 200)
# Around zero, the true sizes and the powers of two, where comparisons and sums go wrong.
numbers = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 8),
    st.integers(0, 64).flatmap(lambda power: st.integers(-2, 2).map(lambda d: 2**power + d)),
    st.integers(-70, 70).map(lambda difference: len(RECORD) + difference),
    st.integers(-70, 70).map(lambda difference: HEADER_BYTES + difference),
)


@st.composite
def damaged_records(draw: st.DrawFn) -> bytes:
    record = bytearray(RECORD)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        start, size = draw(positions), draw(sizes)
        kind = draw(st.sampled_from(["flip", "set", "fill", "cut", "drop", "insert", "graft"]))
        if kind == "flip" and start < len(record):
            record[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and start < len(record):
            record[start] = draw(st.integers(0, 255))
        elif kind == "fill":
            filled = record[start : start + size]
            record[start : start + size] = bytes([draw(st.sampled_from([0, 255]))]) * len(filled)
        elif kind == "cut":
            del record[start:]
        elif kind == "drop":
            del record[start : start + size]
        elif kind == "insert":
            record[start:start] = draw(st.binary(min_size=1, max_size=64))
        elif kind == "graft":
            record[start : start + size] = OTHER_RECORD[start : start + size]
    return bytes(record)


@st.composite
def forged_records(draw: st.DrawFn) -> bytes:
    record = bytearray(RECORD)
    if draw(st.booleans()):
        size = draw(st.integers(HEADER_BYTES, 2 * len(RECORD)))
        record = record[:size] + bytes(max(0, size - len(record)))
        if draw(st.booleans()):
            forge.set_field(record, "record_bytes", size)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        if draw(st.booleans()):
            field = draw(st.sampled_from(sorted(forge.FIELDS)))
            kind = forge.FIELDS[field][1]
            if kind.endswith("s"):
                forge.set_field(record, field, draw(st.binary(max_size=int(kind[:-1]))))
            else:
                bits = 64 if kind == "Q" else 32
                forge.set_field(record, field, draw(numbers) % 2**bits)
        else:
            layer_index = draw(st.integers(0, SPEC.num_layers - 1))
            field = draw(st.sampled_from(sorted(forge.BLOCK_FIELDS)))
            forge.set_block_field(record, layer_index, field, draw(numbers) % 2**64)
    if draw(st.booleans()):
        forge.reseal_blocks(record)
    return forge.reseal(record, HEADER_BYTES)


def read(record: bytes) -> ChunkKV | None:
    """Return what a record decodes to, or None where it is refused as it should be."""
    source = BytesSource(record)
    layers = []
    try:
        chunk = CODEC.open(KEY, source, SPEC)
        for layer_index in range(SPEC.num_layers):
            keys, values = chunk.read_layer(layer_index)
            layers.append((keys.clone(), values.clone()))
    except RecordError:
        return None
    finally:
        assert source.largest_read <= len(record)
    return ChunkKV(*(torch.stack(tensors) for tensors in zip(*layers, strict=True)))


@settings(_settings, max_examples=NUM_RECORDS * 6 // 10)
@given(damaged_records())
def test_a_damaged_record_is_refused(record: bytes) -> None:
    assert (read(record) is None) == (record not in (RECORD, OTHER_RECORD))


@settings(_settings, max_examples=NUM_RECORDS * 3 // 10)
@given(forged_records())
@example(forge.reseal(bytearray(RECORD), HEADER_BYTES))
def test_a_forged_record_is_refused_or_says_what_its_blocks_say(record: bytes) -> None:
    kv = read(record)
    if kv is None:
        assert record != RECORD
    elif record == RECORD:
        assert same_bits(kv.keys, KV.keys)
        assert same_bits(kv.values, KV.values)
    else:
        shape = (SPEC.num_layers, SPEC.num_kv_heads, kv.num_tokens, SPEC.head_dim)
        assert kv.keys.shape == kv.values.shape == shape
        assert kv.size_bytes <= len(record)


@settings(_settings, max_examples=NUM_RECORDS // 10)
@given(st.binary(max_size=600))
def test_noise_is_refused(noise: bytes) -> None:
    assert read(noise) is None
    assert read(RECORD[:12] + noise) is None
