"""Damaged and forged records of every codec. `KVRAG_FUZZ_RECORDS=1000000` makes it a long run."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrag.codec.base import Codec
from kvrag.codec.config import LayerGroups, PipelineConfig, Rans, RateDistortion
from kvrag.codec.container import RecordReader
from kvrag.codec.pca import PCA
from kvrag.codec.raw import RawCodec
from kvrag.codec.registry import codec_of
from kvrag.codec.tables import PerChannel, Uniform
from kvrag.codec.transforms import NoTransform
from kvrag.errors import RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag_testing.codec_contract import KEY, BytesSource, same_bits
from tests.codec import forge
from tests.codec.test_golden_profiles import CONFIGS as GOLDEN
from tests.support.codecs import fit, smooth_kv
from tests.support.properties import trials

NUM_RECORDS = int(os.environ.get("KVRAG_FUZZ_RECORDS", trials(10_000, 300)))
SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, dtype=torch.float16)
NUM_TOKENS = 34  # more than the coder has lanes
CONFIGS = {
    "transform": PipelineConfig(
        PCA(1), RateDistortion((3.0, 1.0)), Uniform(refinements=1), Rans(4)
    ),
    "cachegen": PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0), Rans(4)),
    "lossless": GOLDEN["lossless"],
    "packed": GOLDEN["packed"],
}


@dataclass(frozen=True)
class Target:
    """A codec, a record of it, and another one of the same shape."""

    codec: Codec
    kv: ChunkKV
    record: bytes
    other: bytes
    header_bytes: int


@functools.cache
def target(name: str) -> Target:
    codec = RawCodec() if name == "raw" else codec_of(fit(CONFIGS[name], SPEC))
    kv, other_kv = (smooth_kv(SPEC, NUM_TOKENS, seed) for seed in (1, 2))
    kv.keys[:, :, 3] *= 500  # a token that is kept raw, numbers that are escaped
    record = codec.encode(KEY, kv)
    header_bytes = RecordReader(BytesSource(record), KEY).header.blocks[0].offset
    return Target(codec, kv, record, codec.encode(KEY, other_kv), header_bytes)


targets = st.sampled_from(["raw", *CONFIGS]).map(target)

_settings = settings(
    database=None, derandomize=NUM_RECORDS <= 10_000, suppress_health_check=[HealthCheck.too_slow]
)

sizes = st.integers(0, 200)


def numbers(target: Target) -> st.SearchStrategy[int]:
    """Around zero, the true sizes and the powers of two, where comparisons and sums go wrong."""
    return st.one_of(
        st.integers(0, 2**64 - 1),
        st.integers(0, 8),
        st.integers(0, 64).flatmap(lambda power: st.integers(-2, 2).map(lambda d: 2**power + d)),
        st.integers(-70, 70).map(lambda difference: len(target.record) + difference),
        st.integers(-70, 70).map(lambda difference: target.header_bytes + difference),
    )


def damage(draw: st.DrawFn, record: bytearray, other: bytes, start_at: int = 0) -> None:
    start = draw(st.integers(start_at, len(record) - 1))
    size = draw(sizes)
    kind = draw(st.sampled_from(["flip", "set", "fill", "cut", "drop", "insert", "graft"]))
    if kind == "flip":
        record[start] ^= 1 << draw(st.integers(0, 7))
    elif kind == "set":
        record[start] = draw(st.integers(0, 255))
    elif kind == "fill":
        filled = record[start : start + size]
        record[start : start + size] = bytes([draw(st.sampled_from([0, 255]))]) * len(filled)
    elif kind == "cut" and start > start_at:
        del record[start:]
    elif kind == "drop" and start > start_at:
        del record[start : start + size]
    elif kind == "insert":
        record[start:start] = draw(st.binary(min_size=1, max_size=64))
    elif kind == "graft":
        record[start : start + size] = other[start : start + size]


@st.composite
def damaged_records(draw: st.DrawFn) -> tuple[Target, bytes]:
    chosen = draw(targets)
    record = bytearray(chosen.record)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        if record:
            damage(draw, record, chosen.other)
    return chosen, bytes(record)


@st.composite
def forged_records(draw: st.DrawFn) -> tuple[Target, bytes]:
    chosen = draw(targets)
    record = bytearray(chosen.record)
    if draw(st.booleans()):
        size = draw(st.integers(chosen.header_bytes, 2 * len(record)))
        record = record[:size] + bytes(max(0, size - len(record)))
        if draw(st.booleans()):
            forge.set_field(record, "record_bytes", size)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        if draw(st.booleans()):
            field = draw(st.sampled_from(sorted(forge.FIELDS)))
            kind = forge.FIELDS[field]
            if kind.endswith("s"):
                forge.set_field(record, field, draw(st.binary(max_size=int(kind[:-1]))))
            else:
                bits = 64 if kind == "Q" else 32
                forge.set_field(record, field, draw(numbers(chosen)) % 2**bits)
        else:
            block_index = draw(st.integers(0, SPEC.num_layers - 1))
            field = draw(st.sampled_from(sorted(forge.BLOCK_FIELDS)))
            forge.set_block_field(record, block_index, field, draw(numbers(chosen)) % 2**64)
    if draw(st.booleans()):
        forge.reseal_blocks(record)
    return chosen, forge.reseal(record, chosen.header_bytes)


@st.composite
def forged_blocks(draw: st.DrawFn) -> tuple[Target, bytes]:
    """Blocks of any content under checksums that are right: only the codec stands in the way."""
    chosen = draw(targets)
    record = bytearray(chosen.record)
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        start = draw(st.integers(chosen.header_bytes, len(record) - 1))
        if draw(st.booleans()):
            # Lengths and counts stand at the head of blocks.
            start = chosen.header_bytes + draw(st.integers(0, 24))
        size = draw(st.sampled_from([1, 2, 4, 16]))
        value = draw(numbers(chosen)) % 256**size
        record[start : start + size] = value.to_bytes(size, "little")[: len(record) - start]
    forge.reseal_blocks(record)
    return chosen, forge.reseal(record, chosen.header_bytes)


def read(chosen: Target, record: bytes) -> ChunkKV | None:
    """Return what a record decodes to, or None where it is refused as it should be."""
    source = BytesSource(record)
    layers = []
    try:
        chunk = chosen.codec.open(KEY, source, SPEC)
        if chunk.num_tokens > 100 * NUM_TOKENS:
            return None  # whoever asks for a chunk knows its tokens, and refuses this one
        for layer_index in range(SPEC.num_layers):
            keys, values = chunk.read_layer(layer_index)
            layers.append((keys.clone(), values.clone()))
    except RecordError:
        return None
    finally:
        assert source.largest_read <= len(record)
    return ChunkKV(*(torch.stack(tensors) for tensors in zip(*layers, strict=True)))


@settings(_settings, max_examples=NUM_RECORDS * 4 // 10)
@given(damaged_records())
def test_a_damaged_record_is_refused(drawn: tuple[Target, bytes]) -> None:
    chosen, record = drawn
    assert (read(chosen, record) is None) == (record not in (chosen.record, chosen.other))


@settings(_settings, max_examples=NUM_RECORDS * 2 // 10)
@given(forged_records())
def test_a_forged_record_is_refused_or_says_what_its_blocks_say(
    drawn: tuple[Target, bytes],
) -> None:
    check_forged(*drawn)


@settings(_settings, max_examples=NUM_RECORDS * 3 // 10)
@given(forged_blocks())
def test_forged_blocks_are_refused_or_decode_to_numbers(drawn: tuple[Target, bytes]) -> None:
    check_forged(*drawn)


def check_forged(chosen: Target, record: bytes) -> None:
    kv = read(chosen, record)
    if kv is None:
        assert record != chosen.record
    elif record == chosen.record:
        same = read(chosen, chosen.record)
        assert same_bits(kv.keys, same.keys)
        assert same_bits(kv.values, same.values)
    else:
        shape = (SPEC.num_layers, SPEC.num_kv_heads, kv.num_tokens, SPEC.head_dim)
        assert kv.keys.shape == kv.values.shape == shape
