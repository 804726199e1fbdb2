from __future__ import annotations

import threading
import time

import pytest

from kvrag.bench.load.pipelining import PipeliningOptions, measure_pipelining
from kvrag.bench.load.prompts import LoadPrompt
from kvrag.bench.load.throttled import Line, ThrottledStore
from kvrag.errors import ParameterError
from kvrag.store.memory import MemoryStore
from kvrag.store.wrapper import read_whole
from tests.support.records import key_number, record_of

SMALL = LoadPrompt(shape="test", num_chunks=3, chunk_tokens=40, question_tokens=5)


def test_a_line_carries_so_many_bytes_a_second_for_all_readers_together() -> None:
    line = Line(1e6)
    started = time.perf_counter()
    readers = [threading.Thread(target=line.carry, args=(50_000,)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert time.perf_counter() - started >= 0.199


def test_a_throttled_store_reads_the_same_bytes() -> None:
    inner = MemoryStore()
    key = key_number(1)
    inner.put(key, record_of(key, 100_000))
    store = ThrottledStore(inner, 1e6)
    started = time.perf_counter()
    record = store.open(key)
    assert record is not None
    assert read_whole(record) == record_of(key, 100_000)
    assert time.perf_counter() - started >= 0.099
    assert store.open(key_number(2)) is None


def test_rows_add_up() -> None:
    # 3 chunks of 40 tokens are 92,160 bytes: 0.3 seconds.
    options = PipeliningOptions(
        prompt=SMALL, gigabytes_per_second=[0.0003], ratios=[0.0, 0.5], repeats=1
    )
    rows = list(measure_pipelining(options))
    assert [row.ratio for row in rows] == [0.0, 0.5]
    for row in rows:
        assert row.load_seconds >= 0.3
        assert row.pipelined_seconds >= 0.3
        assert row.serial_seconds >= 0.3 + row.recompute_seconds
        assert 0.0 <= row.hidden_seconds < row.pipelined_seconds
        longer = max(row.load_seconds, row.recompute_seconds)
        assert row.over_longer == pytest.approx(row.pipelined_seconds / longer)
        assert row.over_bound == pytest.approx(row.pipelined_seconds / (1.1 * longer + 0.005))


def test_a_policy_without_a_share_has_one_row() -> None:
    options = PipeliningOptions(
        prompt=SMALL, gigabytes_per_second=[1.0], policy="none", ratios=[0.0, 0.5], repeats=1
    )
    (row,) = measure_pipelining(options)
    assert row.ratio is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"gigabytes_per_second": []},
        {"gigabytes_per_second": [0.0]},
        {"repeats": 0},
        {"ratios": []},
        {"policy": "nonsense"},
    ],
)
def test_wrong_options(wrong: dict) -> None:
    with pytest.raises(ParameterError):
        PipeliningOptions(**wrong)


def test_no_chunks() -> None:
    with pytest.raises(ParameterError, match="1 or more"):
        LoadPrompt(num_chunks=0)
