import time
from functools import partial

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreUnreachableError
from kvrag.store.base import StoreWrapper
from kvrag.store.memory import MemoryStore
from kvrag.tune.stores import _cost_of, measure_loading
from kvrag_bench.load.controller import ControllerOptions, measure_controller
from kvrag_bench.load.pipelining import PipeliningOptions, measure_pipelining
from kvrag_bench.load.prompts import LoadPrompt, indexed
from kvrag_bench.load.throttled import Line, ThrottledStore
from kvrag_testing.records import key_number, record_of, stored
from tests.support.threads import together

SMALL = LoadPrompt(shape="test", num_chunks=3, chunk_tokens=40, question_tokens=5)


def test_a_line_carries_so_many_bytes_a_second_for_all_readers_together() -> None:
    line, key, inner = Line(1e6), key_number(1), MemoryStore()
    started = time.perf_counter()
    together(*[partial(line.carry, 50_000)] * 4)
    assert time.perf_counter() - started >= 0.199
    inner.put(key, record_of(key, 100_000))
    store = ThrottledStore(inner, 1e6)
    started = time.perf_counter()
    assert stored(store, key) == record_of(key, 100_000)
    assert time.perf_counter() - started >= 0.099
    assert store.open(key_number(2)) is None


def test_rows_add_up() -> None:
    # 3 chunks of 40 tokens are 92,160 bytes: 0.3 seconds, where no layer is computed whole.
    options = PipeliningOptions(
        prompt=SMALL,
        gigabytes_per_second=[0.0003],
        policy="random",
        ratios=[0.0, 0.5],
        repeats=1,
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


def test_what_loading_costs_is_what_the_line_takes() -> None:
    with indexed(SMALL, lambda _: None) as (index, _):
        index.store = ThrottledStore(index.store, 3e5)
        found = measure_loading(index, 3)
    assert found.store == "memory:"
    # 768 bytes a token, and a header a chunk.
    (cost,) = found.tiers
    assert cost.of(120, 3) >= 0.3
    assert cost.seconds_per_token >= 0.5 * 768 / 3e5


@pytest.mark.slow
def test_the_controller_takes_more_the_slower_the_store() -> None:
    options = ControllerOptions(
        prompt=SMALL, gigabytes_per_second=[0.0002], ratios=[0.0, 0.1, 1.0], floor=0.1, repeats=1
    )
    (slow,) = measure_controller(options)
    # Loading takes half a second, computing all of it milliseconds: nothing is loaded at all, nor
    # at that fixed share.
    assert slow.num_computed == SMALL.num_chunks
    assert slow.ratio == 1.0
    assert slow.load_seconds < 1.0
    assert slow.best_ratio == 1.0
    assert slow.best_seconds < 1.0
    # Of one round the median is the ratio itself.
    assert slow.over_best == pytest.approx(slow.seconds / slow.best_seconds)


def test_what_a_store_has_stays_and_nothing_has_no_cost() -> None:
    class Hesitant(StoreWrapper):
        def contains(self, key: ChunkKey) -> bool:
            raise StoreUnreachableError("gone for a moment")

    with indexed(SMALL, lambda _: None) as (index, _):
        there = set(index.store.keys())
        with pytest.raises(StoreUnreachableError):
            _cost_of(index, Hesitant(index.store))
        assert set(index.store.keys()) == there
        for key in there:
            index.store.delete(key)
        assert measure_loading(index, 3) is None
