"""kvrag's contract for every model. Subclass `ModelContract` and give it a model."""

from __future__ import annotations

from typing import Any

import torch

from kvrag.fusion.policies.base import NonePolicy, RecomputePolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_testing.bench_top import Bench, bench_of, relative_difference
from kvrag_testing.needs import pytest

_NONE, _ALL, _MOST = NonePolicy(), DeviationPolicy(ratio=1.0), DeviationPolicy(ratio=0.9)


class ModelContract:
    """Fusion equals plain Transformers wherever it must. Override `model`.

    Logits are compared to 1e-4 of their spread: load the model in float32. A model of four layers
    with random weights will do, if their spread is wide enough for attention not to be uniform.
    """

    @pytest.fixture
    def model(self) -> KVModel:
        """Return the model; always the same one, or every test encodes the chunks again."""
        raise NotImplementedError

    @pytest.fixture
    def bench(self, model: KVModel) -> Bench:
        return bench_of(model)

    def test_all_chunks_are_found(self, bench: Bench) -> None:
        report = bench.fuse(bench.prompt(2, 0, 3, 1), _NONE).report
        assert report.num_chunks == 4
        assert report.num_fresh < 50
        assert not report.misses
        counted = report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
        assert counted == report.num_tokens

    @pytest.mark.parametrize("order", [(0,), (2, 0, 3, 1), (1, 1, 0)])
    def test_ratio_one_equals_plain_prefill(self, bench: Bench, order: tuple[int, ...]) -> None:
        prompt = bench.prompt(*order)
        fused = bench.fuse(prompt, _ALL)
        expected = bench.plain_logits(prompt)
        assert relative_difference(fused.logits, expected) < 1e-4
        assert fused.logits.argmax() == expected.argmax()

    def test_one_chunk_behind_the_prefix_equals_plain_prefill(self, bench: Bench) -> None:
        """Nothing is recomputed, yet nothing is lost: the chunk is at its encoded position."""
        prompt = bench.prompt(0)
        fused = bench.fuse(prompt, _NONE)
        # The separator may merge into the chunk's last token, which is then computed.
        assert fused.report.num_exact >= len(bench.chunks["chunk-0"].token_ids) - 2
        assert fused.report.num_reused == fused.report.num_recomputed == 0
        assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4

    def test_reuse_without_repair_differs(self, bench: Bench) -> None:
        """The other tests could not fail if plain reuse were exact as well."""
        prompt = bench.prompt(2, 0, 3, 1)
        assert self._off(bench, prompt, _NONE) > 1e-3

    def test_more_recompute_is_never_further_from_the_truth_by_much(self, bench: Bench) -> None:
        prompt = bench.prompt(2, 0, 3, 1)
        assert self._off(bench, prompt, _MOST) < self._off(bench, prompt, _NONE)

    def test_generation_continues_from_the_fused_buffer(self, bench: Bench) -> None:
        """Transformers' generate over our cache gives the tokens of a plain run, without a copy."""
        prompt = bench.prompt(2, 0, 3, 1)
        fused = bench.fuse(prompt, _ALL, spare=24)
        buffer = fused.kv.keys[0].data_ptr()
        ids = bench.model.tokenizer(prompt, return_tensors="pt")["input_ids"]
        given = {
            "attention_mask": torch.ones_like(ids),
            "pad_token_id": 2,
            "max_new_tokens": 20,
            "do_sample": False,
            "eos_token_id": None,
            "use_cache": True,  # MPT generates without any cache by default.
        }
        hf: Any = bench.model.hf
        plain = hf.generate(ids, **given)
        cache = FusedCache(fused.kv, fused.kv.num_tokens - 1)
        ours = hf.generate(ids, **{CACHE_ARGUMENT: cache}, **given)
        assert ours.tolist() == plain.tolist()
        assert fused.kv.keys[0].data_ptr() == buffer

    def test_the_default_policy_sees_where_the_question_looks(self, bench: Bench) -> None:
        """The weights are those of the layers, whichever code computes them."""
        prompt = bench.prompt(2, 0, 3, 1)
        policy = TwoStagePolicy(ratio=0.5)
        assert bench.fuse(prompt, policy).report.rows_asked > 0
        assert self._off(bench, prompt, policy) < self._off(bench, prompt, _NONE)

    def test_rows_that_the_look_settles_are_as_without_it(self, bench: Bench) -> None:
        """Rows before the first candidate are computed in the look alone."""
        prompt = bench.prompt(2, 0, 3, 1)
        looked, other = (bench.fuse(prompt, policy) for policy in (TwoStagePolicy(0.1), _NONE))
        settled = looked.fresh[looked.fresh < looked.picks[0][0]]
        assert len(settled) > 0
        rows = len(looked.fresh) - len(settled) + len(looked.picks[1])
        assert set(looked.report.rows_by_layer[1:]) == {rows}
        for of in ("keys", "values"):
            for one, expected in zip(getattr(looked.kv, of), getattr(other.kv, of), strict=True):
                assert relative_difference(one[0][:, settled], expected[0][:, settled]) < 1e-5

    def _off(self, bench: Bench, prompt: str, policy: RecomputePolicy) -> float:
        """Return how far a policy's logits are from full prefill's."""
        fused = bench.fuse(prompt, policy)
        return relative_difference(fused.logits, bench.plain_logits(prompt))
