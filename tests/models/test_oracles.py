"""Contract 1: where fusion must equal plain Transformers, it does, on every family."""

from __future__ import annotations

import functools

import pytest
import torch

from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS, Bench, relative_difference
from kvrag_testing.model_contract import ModelContract
from tests.support.models import FAMILIES, OTHER_POSITIONS, make_model, make_tokenizer


@functools.cache
def model_of(family: str) -> KVModel:
    return KVModel(make_model(family), make_tokenizer())


class TestFamily(ModelContract):
    @pytest.fixture(params=(*FAMILIES, *OTHER_POSITIONS))
    def model(self, request: pytest.FixtureRequest) -> KVModel:
        return model_of(request.param)


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


def test_a_prompt_without_chunks_is_plain_prefill() -> None:
    bench = Bench(KVModel(make_model(), make_tokenizer()), texts=TEXTS[:1])
    prompt = "Nothing of the index stands here. Question: why?"
    fused = bench.fuse(prompt, DeviationPolicy())
    assert fused.report.num_fresh == fused.report.num_tokens
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4
