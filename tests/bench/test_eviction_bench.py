"""Eviction in the referee and in its own bench: the same prompts, answers, account of memory."""

from dataclasses import replace

import pytest

from kvrag.models.kv_model import KVModel
from kvrag_bench.eviction import EvictionBenchOptions, run_eviction_bench
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_bench.quality.rows import Estimate
from tests.fusion.test_links import make_links


def test_evictions_are_judged_beside_the_full_cache(model: KVModel, questions: str) -> None:
    # The record of so many queries is never full.
    whole, flat = "corm:window=2000", "streaming:share=0.2"
    options = QualityOptions(
        model=model,
        data=questions,
        policies=("deviation",),
        ratios=(1.0,),
        evictions=("none", whole, flat),
        links=make_links(model),
        max_tokens=6,
        controls=False,
    )
    rows = run_quality_bench(options)
    assert [(row.policy, row.eviction) for row in rows] == [
        (policy, eviction)
        for policy in ("deviation", "deviation + links")
        for eviction in ("none", whole, flat)
    ]
    full, kept, pruned = rows[:3]
    assert (full.kept_share, kept.kept_share) == (1.0, 1.0)
    assert pruned.kept_share == pytest.approx(0.2, abs=0.03)
    assert full.full_cache_difference is None
    # What forgets nothing is the full cache, and at ratio 1.0 full prefill.
    assert kept.kl == pytest.approx(full.kl, abs=1e-6)
    assert kept.kl < 1e-6 < 1e-3 < pruned.kl
    assert kept.full_cache_difference == Estimate(0, 0, 0)
    # The first token is the fused prompt's own.
    assert pruned.first_kl == full.first_kl
    alone = run_quality_bench(replace(options, evictions=(flat,), links="off"))
    assert alone[0].full_cache_difference is None
    assert alone[0].kl == pytest.approx(pruned.kl)


def test_the_bench_holds_steps_and_memory_against_the_full_cache() -> None:
    evictions = ("corm:window=8:recent=8", "streaming:share=0.25", "snapkv:share=0.5")
    options = EvictionBenchOptions(
        shape="test", num_tokens=300, evictions=evictions, num_steps=3, sharpness=30.0
    )
    rows = run_eviction_bench(options)
    assert [row.eviction.partition("(")[0] for row in rows] == ["corm", "streaming", "snapkv"]
    assert {row.num_tokens for row in rows} == {300}
    assert rows[0].prompt_share < 1.0
    assert rows[1].prompt_share == pytest.approx(0.25)
    assert rows[2].prompt_share == pytest.approx(0.5)
    # Four tokens more, all of which this one keeps.
    assert rows[2].kept_share == pytest.approx(154 / 304)
    for row in rows:
        assert row.step_ratio == pytest.approx(row.step_seconds / row.full_step_seconds)
        assert row.size_bytes > 0
        assert row.full_bytes == 304 * 3 * 2 * 2 * 16 * 4
