"""`kvrag bench stream`: its link, its 8-bit records, and a small run."""

import dataclasses
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvrag.codec.container import RecordReader
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.store.memory import MemoryStore
from kvrag.store.registry import open_store
from kvrag_bench.stream.eight_bit import EightBitChunk, encode_eight_bit
from kvrag_bench.stream.measure import StreamOptions, measure_streaming
from kvrag_bench.stream.shaped import ShapedServer, TokenBucket
from kvrag_bench.stream.trace import Trace, constant
from kvrag_testing.records import key_number, record_of, stored


def test_a_bucket_lets_pass_what_the_trace_says() -> None:
    bucket = TokenBucket()
    bucket.start(Trace((1e6, 1e5), 0.1))
    started = time.monotonic()
    for _ in range(11):
        bucket.carry(10_000)  # 100 kB in the first tenth of a second, 10 kB in the second
    assert time.monotonic() - started >= 0.17


def test_a_shaped_server(tmp_path: Path) -> None:
    key = key_number(0)
    near = open_store(f"file:{tmp_path}")
    near.put(key, record_of(key, 100_000))
    near.close()
    with ShapedServer(str(tmp_path)) as server:
        store = open_store(server.url)
        server.start(constant(500_000.0))
        started = time.monotonic()
        assert stored(store, key) == record_of(key, 100_000)
        assert time.monotonic() - started >= 0.15
        store.close()


def test_eight_bits() -> None:
    spec = KVSpec(2, 3, 8, torch.float32)
    kv = ChunkKV(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8))
    key, store = key_number(0), MemoryStore()
    store.put(key, encode_eight_bit(key, kv, spec))
    record = store.open(key)
    chunk = EightBitChunk(RecordReader(record, key))
    for layer_index in range(2):
        exact = (kv.keys[layer_index], kv.values[layer_index])
        for one, wanted in zip(chunk.read_layer(layer_index), exact, strict=True):
            assert 0.0 < float((one - wanted).abs().max()) < 0.03


@pytest.mark.slow
def test_a_small_run() -> None:
    small = {"num_chunks": 4, "chunk_tokens": 170, "num_traces": 1, "repeats": 1}
    options = StreamOptions(ttft=0.3, step_seconds=0.05, time_scale=0.1, **small)
    rows = measure_streaming(options)
    ways = {row.way: row for row in rows.ways}
    assert list(ways) == ["adaptive", "oracle", *(f"{n}/5" for n in range(1, 6))]
    assert all(sum(row.levels.values()) == 4 for row in rows.ways)
    fixed = [ways[f"{n}/5"] for n in range(1, 6)]
    assert all(a.decibels + 5.0 < b.decibels for a, b in pairwise(fixed))
    assert rows.constant.text_seconds > 0.0
    assert {field.name for field in dataclasses.fields(rows)} >= {"same_quality", "over_oracle"}
