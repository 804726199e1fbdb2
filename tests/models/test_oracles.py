"""Contract 1: where fusion must equal plain Transformers, it does, on every family."""

from __future__ import annotations

import pytest
import torch

from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from tests.support.bench_top import TEXTS, Bench, relative_difference
from tests.support.models import FAMILIES, OTHER_POSITIONS, make_model, make_tokenizer


@pytest.fixture(scope="module", params=(*FAMILIES, *OTHER_POSITIONS))
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(KVModel(make_model(request.param), make_tokenizer()))


def test_all_chunks_are_found(bench: Bench) -> None:
    report = bench.fuse(bench.prompt(2, 0, 3, 1), NonePolicy()).report
    assert report.num_chunks == 4
    assert report.num_fresh < 50
    assert not report.misses
    counted = report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
    assert counted == report.num_tokens


@pytest.mark.parametrize("order", [(0,), (2, 0, 3, 1), (1, 1, 0)])
def test_ratio_one_equals_plain_prefill(bench: Bench, order: tuple[int, ...]) -> None:
    prompt = bench.prompt(*order)
    fused = bench.fuse(prompt, DeviationPolicy(ratio=1.0))
    expected = bench.plain_logits(prompt)
    assert relative_difference(fused.logits, expected) < 1e-4
    assert fused.logits.argmax() == expected.argmax()


def test_one_chunk_behind_the_prefix_equals_plain_prefill(bench: Bench) -> None:
    """Nothing is recomputed, yet nothing is lost: the chunk stands where it was encoded."""
    prompt = bench.prompt(0)
    fused = bench.fuse(prompt, NonePolicy())
    # The separator may merge into the chunk's last token, which is then computed.
    assert fused.report.num_exact >= len(bench.chunks["chunk-0"].token_ids) - 2
    assert fused.report.num_reused == fused.report.num_recomputed == 0
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4


def test_reuse_without_repair_differs(bench: Bench) -> None:
    """The oracles could not fail if plain reuse were exact as well."""
    prompt = bench.prompt(2, 0, 3, 1)
    fused = bench.fuse(prompt, NonePolicy())
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) > 1e-3


def test_more_recompute_is_never_further_from_the_truth_by_much(bench: Bench) -> None:
    prompt = bench.prompt(2, 0, 3, 1)
    expected = bench.plain_logits(prompt)
    none = relative_difference(bench.fuse(prompt, NonePolicy()).logits, expected)
    most = relative_difference(bench.fuse(prompt, DeviationPolicy(ratio=0.9)).logits, expected)
    assert most < none


def test_generation_continues_from_the_fused_buffer(bench: Bench) -> None:
    """Transformers' generate over our cache gives the tokens of a plain run, without a copy."""
    prompt = bench.prompt(2, 0, 3, 1)
    fused = bench.fuse(prompt, DeviationPolicy(ratio=1.0), spare=24)
    buffer = fused.kv.keys[0].data_ptr()
    ids = bench.model.tokenizer(prompt, return_tensors="pt")["input_ids"]
    # MPT's own default is to generate without any cache.
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "use_cache": True}
    plain = bench.model.hf.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=2, **settings
    )
    ours = bench.model.hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=2,
        past_key_values=FusedCache(fused.kv, fused.kv.num_tokens - 1),
        **settings,
    )
    assert ours.tolist() == plain.tolist()
    assert fused.kv.keys[0].data_ptr() == buffer


def test_the_default_policy_sees_where_the_question_looks(bench: Bench) -> None:
    """Weights are those of the layers, whoever computes them."""
    prompt = bench.prompt(2, 0, 3, 1)
    expected = bench.plain_logits(prompt)
    fused = bench.fuse(prompt, TwoStagePolicy(ratio=0.5))
    assert fused.report.rows_asked > 0
    none = relative_difference(bench.fuse(prompt, NonePolicy()).logits, expected)
    assert relative_difference(fused.logits, expected) < none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    bench = Bench(KVModel(make_model(family, dtype=dtype), make_tokenizer()))
    prompt = bench.prompt(2, 0, 1)
    fused = bench.fuse(prompt, DeviationPolicy(ratio=1.0))
    assert fused.kv.keys[0].dtype == dtype
    # Rounding alone separates the two: fp32 agrees to 1e-6, bf16 keeps 8 bits of mantissa.
    bound = 0.15 if dtype == torch.bfloat16 else 0.02
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < bound


def test_boundary_recomputes_the_first_tokens_of_each_chunk() -> None:
    bench = Bench(KVModel(make_model(), make_tokenizer()))
    prompt = "Context:\n" + bench.prompt(2, 0, 1)
    report = bench.fuse(prompt, BoundaryPolicy(tokens=4)).report
    assert report.num_recomputed == 3 * 4
    assert set(report.rows_by_layer) == {report.num_fresh + report.num_recomputed}


def test_deviation_recomputes_the_share_asked_for() -> None:
    bench = Bench(KVModel(make_model(), make_tokenizer()))
    prompt = "Context:\n" + bench.prompt(2, 0, 1, 3)
    report = bench.fuse(prompt, DeviationPolicy(ratio=0.25)).report
    found = report.num_reused + report.num_recomputed
    assert report.num_recomputed == -(-found // 4)
    assert report.rows_by_layer[0] == report.num_tokens
    assert report.rows_by_layer[1] == report.num_fresh + report.num_recomputed


def test_a_prompt_without_chunks_is_plain_prefill() -> None:
    bench = Bench(KVModel(make_model(), make_tokenizer()), texts=TEXTS[:1])
    prompt = "Nothing of the index stands here. Question: why?"
    fused = bench.fuse(prompt, DeviationPolicy())
    assert fused.report.num_fresh == fused.report.num_tokens
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4
