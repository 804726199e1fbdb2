"""The speed benches on a model of test size: every path, no figure worth quoting."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.report import FusionReport
from kvrag_bench import ttft
from kvrag_bench.batch import BatchOptions, run_batch_bench
from kvrag_bench.decode import DecodeOptions, run_decode_bench
from kvrag_bench.floor import FloorMeter
from kvrag_bench.ingest import IngestOptions, run_ingest_bench
from kvrag_bench.session import SessionOptions, run_session_bench
from kvrag_bench.setting import measured
from kvrag_bench.shapes import random_model
from kvrag_bench.ttft import TTFTOptions, run_ttft_bench


def test_ttft_rows_have_the_promised_columns() -> None:
    options = TTFTOptions(
        shape="test", num_chunks=3, chunk_tokens=(40, 80), policies=("none", "deviation"), repeats=1
    )
    rows = list(run_ttft_bench(options))
    wanted = list(product((40, 80), ("none", "deviation")))
    assert [(row.chunk_tokens, row.policy) for row in rows] == wanted
    promised = {
        "model", "policy", "ratio", "num_chunks", "chunk_tokens", "context_tokens",
        "plain_ttft_seconds", "ttft_seconds", "speedup", "floor_seconds", "floor_ratio",
        "peak_bytes",
    }  # fmt: skip
    assert promised <= set(json.loads(json.dumps(asdict(rows[0]))))
    for row in rows:
        assert row.context_tokens == 3 * row.chunk_tokens + 1
        assert row.speedup == pytest.approx(row.plain_ttft_seconds / row.ttft_seconds)
        assert row.floor_seconds > 0


def test_ttft_is_paired_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    real, slowness = ttft._Round.of, iter([50, 1, 4, 9])

    def timed(engine: KVEngine, prompt: str, asked: Sequence[Any]) -> Any:
        # The whole machine is slower in some rounds.
        factor = next(slowness)
        one = real(engine, prompt, asked)
        answers = [replace(given, ttft_seconds=factor) for given in one.answers]
        return one._replace(
            plain=2.0 * factor, own=replace(one.own, ttft_seconds=factor / 2), answers=answers
        )

    monkeypatch.setattr(ttft._Round, "of", timed)
    options = TTFTOptions(shape="test", num_chunks=2, chunk_tokens=(40,), policies=("none",))
    (row,) = run_ttft_bench(options)
    assert (row.plain_ttft_seconds, row.ttft_seconds) == (8, 4)
    assert (row.speedup, row.prefill_speedup) == (2, 4)


def test_the_ingest_row_is_a_ratio_of_its_own_figures() -> None:
    small = {"shape": "test", "num_chunks": 4, "chunk_tokens": (20, 50), "repeats": 1}
    contexts = ("none", "filler:64")
    rows = run_ingest_bench(IngestOptions(**small, batch_sizes=(1, 2), contexts=contexts))
    assert [row.context for row in rows] == ["none", "filler:64"]
    for row in rows:
        assert row.num_tokens == 140
        assert row.prefill_batch_size in (1, 2)
        rates = row.ingest_tokens_per_second / row.prefill_tokens_per_second
        assert row.share == pytest.approx(rates)
    # A filler costs time, and no byte.
    assert rows[0].bytes_per_token == rows[1].bytes_per_token > 0
    with pytest.raises(ParameterError, match="expected one of none"):
        IngestOptions(contexts=("before",))


def test_the_floor_grows_with_the_rows_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    # So slow that what else is measured does not count.
    monkeypatch.setattr(FloorMeter, "_measure_operations_per_second", lambda *_: 1e5)
    meter = FloorMeter(random_model("test"))

    def report(*rows: int) -> FusionReport:
        return FusionReport("none", 1000, 0, 0, 0, 1000, 0, 10**6, {}, rows)

    few, many = meter.measure(report(10, 10, 10)), meter.measure(report(1000, 1000, 1000))
    assert few.matrix_seconds < many.matrix_seconds
    assert few.copy_seconds == many.copy_seconds > 0


def test_the_decode_row_is_a_ratio_of_its_own_figures() -> None:
    row = run_decode_bench(DecodeOptions(shape="test", num_chunks=1, num_tokens=3, repeats=1))
    assert row.num_prompt_tokens > 200
    assert row.num_tokens == 3
    assert row.speedup == pytest.approx(row.plain_seconds / row.kvrag_seconds)


def test_batch_rows_are_ratios_of_their_own_figures() -> None:
    options = BatchOptions(shape="test", num_prompts=(1, 2), num_chunks=1, num_tokens=4, repeats=1)
    wanted = product(("none", "two_stage"), (1, 2))
    for (policy, number), row in zip(wanted, run_batch_bench(options), strict=True):
        assert (row.policy, row.num_prompts) == (policy, number)
        assert row.same == 1.0
        assert row.speedup == row.alone_seconds / row.together_seconds
        assert row.cost == pytest.approx(row.num_prompts / row.speedup)
        assert row.median_gap
        assert row.longest_gap
        assert row.longest_gap >= row.median_gap > 0
        assert 1 <= row.num_tokens <= 4
    (row,) = run_batch_bench(replace(options, policies=("none",), num_prompts=(1,), num_tokens=1))
    assert (row.median_gap, row.longest_gap, row.gap_ratio) == (None, None, None)


@pytest.mark.parametrize("finished", [1, 2])
def test_rounds_before_an_interrupt_count(finished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    of = ttft._Round.of

    def some(*given: Any) -> Any:
        if len(made) == finished:
            raise KeyboardInterrupt
        made.append(0)
        return of(*given)

    monkeypatch.setattr(ttft._Round, "of", some)
    options = TTFTOptions(
        shape="test", num_chunks=1, chunk_tokens=(16, 17), policies=("none",), repeats=5
    )
    if finished == 1:  # which does not count
        with pytest.raises(KeyboardInterrupt):
            measured(run_ttft_bench(options))
        return
    (row,) = measured(run_ttft_bench(options))
    assert row.chunk_tokens == 16
    assert row.ttft_seconds > 0


def test_session_rows_count_what_is_kept() -> None:
    options = SessionOptions(
        shape="test", num_turns=3, num_chunks=1, question_tokens=5, num_tokens=4, repeats=1
    )
    first, *others = run_session_bench(options)
    assert first.num_kept == 0
    for before, row in pairwise([first, *others]):
        # All but the answer's last token, and the question.
        assert row.num_kept == before.num_tokens + 3
        assert row.num_tokens == row.num_kept + 1 + 5
        assert row.anew_seconds > 0
        assert row.ratio == row.seconds / row.alone_seconds
        assert row.kept_bytes >= before.kept_bytes > 0
