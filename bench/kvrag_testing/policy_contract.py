"""The contract of a recompute policy. Subclass `PolicyContract` and give it a policy."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import (
    CandidateStats,
    PromptRows,
    RecomputePolicy,
    planned_counts,
    planned_rows,
)
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS, Bench, bench_of, relative_difference
from kvrag_testing.needs import pytest

_SPANS = (ReusedSpan("a", 3, 0, 10), ReusedSpan("b", 15, 2, 1), ReusedSpan("c", 20, 0, 30))
_NUM_LAYERS = 6
PROMPT = PromptRows(
    60, _NUM_LAYERS, _SPANS, torch.rand(6, 41, generator=torch.Generator().manual_seed(0))
)
"""41 reused tokens of 60, with what the question gathers from each."""
EMPTY = PromptRows(60, _NUM_LAYERS, (), torch.zeros(6, 0))
"""A prompt in which nothing is reused."""

_QUESTION = "Question: who keeps it?\nAnswer:"
_SHORT = tuple(f"Entry {number}: gate {number} is kept." for number in range(100))
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[int, ...], str]] = {
    "reading order": (TEXTS, (3, 1, 0, 2), _QUESTION),
    "duplicated chunks": (TEXTS, (1, 1, 0, 1), _QUESTION),
    "long question": (TEXTS, (2, 0), "Question: " + "who keeps it, and why? " * 40 + "\nAnswer:"),
    "short question": (TEXTS, (2, 0), "."),
    "100 chunks": (_SHORT, tuple(range(99, -1, -1)), "Question: who?\nAnswer:"),
    "tiny chunks": (("Ines of Varn", "Tomas of Varn", TEXTS[0]), (1, 0, 2, 1), "Question: who?"),
}
"""Chunks, their order in a prompt, and the question."""


@cache
def _tiny() -> KVModel:
    return KVModel.load("kvrag-tiny", dtype=torch.float32)


class PolicyContract:
    """Override `policy`, and `model` to fuse with a model other than kvrag-tiny."""

    @pytest.fixture
    def policy(self) -> RecomputePolicy:
        raise NotImplementedError

    @pytest.fixture
    def model(self) -> KVModel:
        return _tiny()

    @pytest.fixture
    def bench(self, model: KVModel) -> Bench:
        return bench_of(model)

    @pytest.fixture(params=LAYOUTS)
    def laid_out(self, request: pytest.FixtureRequest, model: KVModel) -> tuple[Bench, str]:
        texts, order, question = LAYOUTS[request.param]
        bench = bench_of(model, texts)
        return bench, bench.prompt(*order, question=question)

    # -- its description ---------------------------------------------------------------------

    def test_a_policy_is_a_frozen_dataclass_of_its_parameters(
        self, policy: RecomputePolicy
    ) -> None:
        assert is_dataclass(policy)
        assert type(policy).name == policy.name
        assert "name" not in {field.name for field in fields(policy)}
        for field in fields(policy):
            with pytest.raises(AttributeError):
                setattr(policy, field.name, getattr(policy, field.name))
        assert policy == replace(policy)
        assert hash(policy) == hash(replace(policy))

    def test_its_text_names_every_parameter(self, policy: RecomputePolicy) -> None:
        assert str(policy).startswith(policy.name)
        for field in fields(policy):  # type: ignore[arg-type]  # every policy is a dataclass
            value = getattr(policy, field.name)
            assert value is None or f"{field.name}={value}" in str(policy)

    def test_a_parameter_of_another_type_is_refused(self, policy: RecomputePolicy) -> None:
        for field in fields(policy):  # type: ignore[arg-type]
            with pytest.raises(ParameterError, match=field.name):
                replace(policy, **{field.name: b"bytes"})  # type: ignore[type-var]

    # -- its choice --------------------------------------------------------------------------

    def test_candidates_are_reused_tokens_in_order(self, policy: RecomputePolicy) -> None:
        candidates = policy.candidates(PROMPT)
        assert candidates.dtype == torch.long
        found = candidates.tolist()
        assert found == sorted(set(found))
        assert set(found) <= set(PROMPT.reused().tolist())
        assert len(policy.candidates(EMPTY)) == 0
        for prompt in (PROMPT, EMPTY):
            assert policy.num_candidates(prompt) == len(policy.candidates(prompt))

    def test_the_same_prompt_gets_the_same_candidates(self, policy: RecomputePolicy) -> None:
        assert torch.equal(policy.candidates(PROMPT), policy.candidates(PROMPT))

    def test_the_prompt_stays_as_it_is(self, policy: RecomputePolicy) -> None:
        assert PROMPT.relevance is not None
        before = PROMPT.relevance.clone()
        policy.candidates(PROMPT)
        policy.counts(PROMPT)
        assert torch.equal(PROMPT.relevance, before)

    def test_the_question_is_asked_of_layers_that_there_are(self, policy: RecomputePolicy) -> None:
        for num_layers in (1, 2, _NUM_LAYERS, 80):
            layers = policy.question_layers(num_layers)
            assert set(layers) <= set(range(num_layers))
            assert layers.step == 1
            assert 0 <= policy.kept_layers(num_layers) < max(1, layers.stop)

    def test_no_layer_computes_more_than_the_one_before(self, policy: RecomputePolicy) -> None:
        for prompt in (PROMPT, EMPTY):
            counts = list(planned_counts(policy, prompt))
            assert len(counts) == prompt.num_layers
            assert counts == sorted(counts, reverse=True)
            assert all(0 <= count <= policy.num_candidates(prompt) for count in counts)
            assert planned_rows(policy, prompt, num_fresh=19) >= 19 * prompt.num_layers

    def test_each_candidate_has_a_score_where_some_are_dropped(
        self, policy: RecomputePolicy
    ) -> None:
        counts = policy.counts(PROMPT)
        if counts is None or min(counts) == policy.num_candidates(PROMPT):
            return
        positions = policy.candidates(PROMPT)
        generator = torch.Generator().manual_seed(1)
        off = {one: torch.rand(len(positions), generator=generator) for one in ("k", "v")}
        scores = policy.score(PROMPT, CandidateStats(positions, off))
        assert scores.shape == positions.shape
        assert scores.dtype == torch.float32
        assert torch.isfinite(scores).all()

    # -- its effect on prompts ---------------------------------------------------------------

    def test_any_prompt_is_fused_and_accounted_for(
        self, policy: RecomputePolicy, laid_out: tuple[Bench, str]
    ) -> None:
        bench, prompt = laid_out
        fused = bench.fuse(prompt, policy)
        report = fused.report
        assert torch.isfinite(fused.logits).all()
        counted = report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
        assert counted == report.num_tokens == len(bench.lay_out(prompt).token_ids)
        assert report.num_chunks > 0

    def test_all_recomputed_is_plain_prefill(
        self, policy: RecomputePolicy, laid_out: tuple[Bench, str]
    ) -> None:
        if not hasattr(policy, "ratio"):
            return
        # Policies that take a number of tokens instead of a ratio have none yet.
        whole_policy: RecomputePolicy = (
            type(policy)(ratio=1.0)  # type: ignore[call-arg]
            if policy.ratio is None
            else replace(policy, ratio=1.0)  # type: ignore[type-var]
        )
        bench, prompt = laid_out
        whole = bench.fuse(prompt, whole_policy)
        assert relative_difference(whole.logits, bench.plain_logits(prompt)) < 1e-4

    @pytest.mark.parametrize("num_chunks", [0, 1])
    def test_where_nothing_is_off_nothing_is_chosen(
        self, policy: RecomputePolicy, bench: Bench, num_chunks: int
    ) -> None:
        """Without any chunk, and with one that is at its encoded position."""
        prompt = "\n\n".join([*TEXTS[:num_chunks], _QUESTION])
        fused = bench.fuse(prompt, policy)
        assert fused.report.num_recomputed == fused.report.rows_asked == 0
        assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4
