"""Which tokens each policy computes again, and that nothing else of a prompt is touched."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.fusion.controller import (
    LoadingController,
    make_choice,
    takes_ratio,
)
from kvrag.fusion.fuser import fuse
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.plan import Loading
from kvrag.fusion.policies.base import (
    CandidateStats,
    NonePolicy,
    PromptRows,
    RecomputePolicy,
)
from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.deviation import DeviationPolicy, GradualPolicy
from kvrag.fusion.policies.query import QueryPolicy
from kvrag.fusion.policies.registry import POLICIES
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.fusion.repair import make_repair
from kvrag.fusion.selection import QuestionAttention
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass
from kvrag_testing.baselines import RandomPolicy, SeamPolicy
from kvrag_testing.bench_top import Bench, relative_difference
from kvrag_testing.policy_contract import PolicyContract
from tests.support.models import make_model, make_tokenizer

SPANS = (ReusedSpan("a", 3, 0, 10), ReusedSpan("b", 15, 2, 1), ReusedSpan("c", 20, 0, 30))
NUM_REUSED = 41
PROMPT = PromptRows(60, 6, SPANS, torch.rand(6, NUM_REUSED, generator=torch.Generator()))
OF_RATIO = (DeviationPolicy, GradualPolicy, QueryPolicy, TwoStagePolicy, RandomPolicy)
OF_TOKENS = (BoundaryPolicy, SeamPolicy)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(KVModel(make_model(num_hidden_layers=4), make_tokenizer()))


@functools.cache
def small_model() -> KVModel:
    return KVModel(make_model(num_hidden_layers=3), make_tokenizer())


class TestPolicy(PolicyContract):
    """Every policy of kvrag's own."""

    @pytest.fixture(params=[*POLICIES.built_in, "gradual:spread=1.0:on=kv", "query:depth=0"])
    def policy(self, request: pytest.FixtureRequest) -> RecomputePolicy:
        return make_repair(request.param).policy

    @pytest.fixture
    def model(self) -> KVModel:
        return small_model()


@dataclass(frozen=True)
class WrongPolicy(RecomputePolicy):
    """A policy of another distribution that returns something else than reused positions."""

    name: ClassVar[str] = "wrong"
    how: str = ""

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        reused = prompt.reused()
        return {
            "mask": torch.ones(prompt.num_tokens, dtype=torch.bool),
            "fresh": torch.arange(prompt.num_tokens),
            "twice": reused.repeat(2),
            "float": reused.float(),
            "beyond": torch.tensor([prompt.num_tokens]),
            "negative": torch.tensor([-1]),
            "rows": reused[None],
        }[self.how]


@pytest.mark.parametrize("how", ["mask", "fresh", "twice", "float", "beyond", "negative", "rows"])
def test_candidates_that_are_not_reused_positions_are_refused(bench: Bench, how: str) -> None:
    with pytest.raises(ParameterError, match=r"policy wrong.*positions of reused tokens"):
        bench.fuse(bench.prompt(1, 0), WrongPolicy(how))


@pytest.mark.parametrize("policy", OF_RATIO + OF_TOKENS)
@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_ratio_outside_0_to_1_is_refused(policy: type[RecomputePolicy], ratio: float) -> None:
    with pytest.raises(ParameterError, match="between 0 and 1"):
        policy(ratio=ratio)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviationPolicy(on="q"), "expected 'k', 'v' or 'kv'"),
        (lambda: GradualPolicy(spread=0.0), "to choose only once"),
        (lambda: QueryPolicy(depth=2.0), "query depth"),
        (lambda: TwoStagePolicy(pool=0.5), "two_stage pool"),
        (lambda: SeamPolicy(tokens=0), "at least 1"),
        (lambda: make_choice("query", boundary_tokens=3), "takes no boundary_tokens"),
        (lambda: make_choice("none", ratio=0.1), "takes no ratio"),
        (lambda: make_choice("query:ratio=0.5", ratio=0.1), "both set the ratio; leave one out"),
        (lambda: make_choice("boundary", ratio=0.1, boundary_tokens=3), "expected one of the two"),
        (lambda: make_choice("query:depth=1:depth=0"), "gives depth twice"),
        (lambda: make_choice("seam", boundary_tokens=2.5), "expected a whole number"),  # type: ignore[arg-type]
        (lambda: make_choice("random:seed=99999999999999999999"), "random seed 9+: expected 0 to"),
        (lambda: make_choice("deviation", ratio=True), "ratio=True .* expected a number"),
        (lambda: make_choice("two_stage:pool=nan"), "two_stage pool nan"),
        (lambda: make_choice("two_stage:look=0"), "two_stage look 0"),
        (lambda: make_choice("auto:ttft=inf"), "auto ttft inf"),
        (lambda: make_choice(5), "policy 5: expected a name"),  # type: ignore[arg-type]
        (lambda: make_choice("query:width=3"), "takes no width; it takes depth, ratio"),
        (lambda: make_choice("query:depth"), "expected PARAMETER=VALUE, found 'depth'"),
        (lambda: make_choice("deviation:on=3"), "has the wrong type"),
        (lambda: make_choice("none:temperature=0.9"), "temperature of reused keys left kvrag"),
        (lambda: make_choice("auto:scale=2"), "scale of reused keys left kvrag with 0.3"),
        (lambda: make_choice("none:shift=1.5"), "shift 1.5: expected 0 to 1"),
        (lambda: make_choice("auto:calibration=x"), "takes no calibration"),
        (lambda: LoadingController(ttft=0.0), "above 0"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(make: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("policy", OF_RATIO + OF_TOKENS)
def test_ratio_0_computes_nothing_again(policy: type[RecomputePolicy], bench: Bench) -> None:
    prompt = bench.prompt(2, 0, 3, 1)
    fused = bench.fuse(prompt, policy(ratio=0.0))  # type: ignore[call-arg]
    assert fused.report.num_recomputed == 0
    none = bench.fuse(prompt, NonePolicy())
    assert torch.equal(fused.logits, none.logits)


@pytest.mark.parametrize("policy", OF_RATIO)
@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.8])
def test_the_mean_over_layers_is_the_ratio(
    policy: type[RecomputePolicy], ratio: float, bench: Bench
) -> None:
    fused = bench.fuse(bench.prompt(2, 0, 3, 1), policy(ratio=ratio))  # type: ignore[call-arg]
    report = fused.report
    found = report.num_reused + report.num_recomputed
    counts = [len(picks) for picks in fused.picks]
    assert len(counts) == 4
    assert counts == sorted(counts, reverse=True)
    assert ratio * found <= sum(counts[1:]) / 3 < ratio * found + 1
    first = int(fused.picks[0][0]) if report.rows_asked else 0  # a look settles what precedes it
    num_again = int((fused.fresh >= first).sum())
    assert [num_again + count for count in counts] == list(report.rows_by_layer)


@pytest.mark.parametrize(("on", "picked"), [("k", [0, 2]), ("v", [1, 3]), ("kv", [1, 2])])
def test_deviation_scores_what_it_is_told_to(on: str, picked: list[int]) -> None:
    keys = torch.tensor([9.0, 3.0, 8.0, 0.0])
    values = torch.tensor([0.0, 9.0, 4.0, 5.0])
    stats = CandidateStats(torch.arange(4), {"k": keys, "v": values})
    scores = DeviationPolicy(ratio=0.5, on=on).score(PROMPT, stats)
    assert scores.topk(2).indices.sort().values.tolist() == picked


def test_query_takes_what_the_question_gathers_most_from() -> None:
    relevance = torch.zeros(1, NUM_REUSED)
    relevance[0, [0, 10, 40]] = torch.tensor([1.0, 3.0, 2.0])
    prompt = PromptRows(60, 6, SPANS, relevance)
    assert QueryPolicy(ratio=3 / NUM_REUSED).candidates(prompt).tolist() == [3, 15, 49]
    assert QueryPolicy(depth=1.0).question_layers(6) == range(5, 6)
    assert QueryPolicy(depth=0.0).question_layers(6) == range(1)


def test_two_stages_take_what_is_relevant_and_off() -> None:
    relevance = torch.zeros(6, NUM_REUSED)
    relevance[:, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    prompt = PromptRows(60, 6, SPANS, relevance)
    policy = TwoStagePolicy(ratio=2 / NUM_REUSED, pool=1.5)
    pooled = policy.candidates(prompt)
    assert pooled.tolist() == [3, 4, 5]
    assert list(policy.counts(prompt) or ()) == [3, 2, 2, 2, 2, 2]
    scores = policy.score(prompt, CandidateStats(pooled, {"v": torch.tensor([0.0, 1.0, 9.0])}))
    assert scores.argsort(descending=True).tolist() == [2, 1, 0]
    # What rounding leaves of no distance at all ranks nothing.
    scores = policy.score(prompt, CandidateStats(pooled, {"v": torch.tensor([1e-12, 1e-11, 9.0])}))
    assert scores.argsort(descending=True).tolist() == [2, 0, 1]


def test_a_look_at_the_first_layers_computes_the_question_no_further(bench: Bench) -> None:
    layers = [TwoStagePolicy(look=look).question_layers(6) for look in (0.01, 0.5, 0.8, 1.0)]
    assert layers == [range(1), range(3), range(3, 5), range(6)]
    prompt = bench.prompt(2, 0, 3, 1)
    whole, half = (bench.fuse(prompt, TwoStagePolicy(0.2, look=look)) for look in (1.0, 0.5))
    assert 2 * half.report.rows_asked == whole.report.rows_asked > 0
    assert [len(picks) for picks in half.picks] == [len(picks) for picks in whole.picks]


@pytest.mark.parametrize(
    ("policy", "num_loaded"),
    [
        (NonePolicy(), 4),
        (TwoStagePolicy(0.3), 4),
        (DeviationPolicy(0.3), 3),
        # All tokens in layers 0 and 1, and one of three less in the last.
        (GradualPolicy(0.9, spread=1.0), 2),
        (RandomPolicy(1.0), 0),
        (SeamPolicy(tokens=1000), 0),
    ],
)
@pytest.mark.parametrize("load_threads", [0, 2])
def test_layers_that_are_computed_whole_are_not_loaded(
    policy: RecomputePolicy, num_loaded: int, load_threads: int, bench: Bench
) -> None:
    prompt = bench.prompt(2, 0, 3, 1)
    layout = bench.lay_out(prompt)
    # Nothing of what stands in a buffer before may show.
    buffer = FusedKV(bench.model.spec, len(layout.token_ids), len(layout.token_ids))
    buffer.storage.fill_(float("nan"))
    loading = Loading(load_threads)
    fused = fuse(bench.model, layout, bench.open_kv, policy, buffer, loading=loading)
    assert torch.isfinite(fused.logits).all()
    if num_loaded == 0:
        assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4
    # The first chunk, which stands where it was encoded, is always loaded.
    least = bench.fuse(prompt, RandomPolicy(1.0)).report.bytes_loaded
    most = bench.fuse(prompt, NonePolicy()).report.bytes_loaded
    assert least < most
    assert fused.report.bytes_loaded == least + (most - least) * num_loaded / 4


def test_seam_takes_both_ends_of_each_chunk() -> None:
    assert SeamPolicy(tokens=3).candidates(PROMPT).tolist() == [3, 4, 12, 15, 20, 21, 49]
    assert SeamPolicy(tokens=1).candidates(PROMPT).tolist() == [3, 15, 20]
    assert len(SeamPolicy(tokens=1000).candidates(PROMPT)) == NUM_REUSED


def test_a_ratio_is_taken_where_the_spec_leaves_it_open() -> None:
    assert takes_ratio("query:depth=1")
    assert takes_ratio("boundary")
    assert not takes_ratio("none")
    assert not takes_ratio("query:ratio=0.5")
    assert not takes_ratio("boundary:tokens=4")
    with pytest.raises(ParameterError, match="unknown policy 'best'"):
        takes_ratio("best")


@dataclass(frozen=True, eq=False)
class _Given(RecomputePolicy):
    name: ClassVar[str] = "given"
    positions: torch.Tensor

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        return self.positions


def test_the_look_of_the_question_leaves_no_trace(bench: Bench) -> None:
    """The same picks, given outright, give the same logits."""
    prompt = bench.prompt(2, 0, 3, 1)
    fused = bench.fuse(prompt, QueryPolicy(ratio=0.2))
    again = bench.fuse(prompt, _Given(fused.picks[0]))
    assert torch.allclose(again.logits, fused.logits, atol=1e-5)
    assert again.report.rows_asked == 0 < fused.report.rows_asked
    assert again.report.work_share < fused.report.work_share


def test_a_look_that_ends_early_keeps_the_question_for_some_layers(bench: Bench) -> None:
    prompt = bench.prompt(2, 0, 3, 1)
    plain = bench.fuse(prompt, NonePolicy())
    fused = bench.fuse(prompt, TwoStagePolicy(ratio=0.2, look=0.75))
    end = max(span.prompt_end for span in fused.layout.spans)
    question = fused.fresh[fused.fresh >= end]
    counts = [len(picks) for picks in fused.picks]
    num_later = [0, len(question), len(question), len(fused.fresh)]
    assert [sum(both) for both in zip(counts, num_later, strict=True)] == list(
        fused.report.rows_by_layer
    )
    assert fused.report.rows_asked == 3 * len(fused.fresh)
    for layer, (keys, others) in enumerate(zip(fused.kv.keys, plain.kv.keys, strict=True)):
        kept = torch.allclose(keys[0][:, question], others[0][:, question], atol=1e-6)
        assert kept == (layer < 2)  # the second layer's inputs are those of the look


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2"])
def test_relevance_is_attention_times_the_norm_of_values(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    ids = torch.arange(40) % 50 + 3
    rows, reused = torch.arange(40), torch.arange(5, 30)
    fused = FusedKV(model.spec, 40, 40)
    layers = range(model.spec.num_layers)
    attention = QuestionAttention(reused, 33, layers)
    with model.computing_rows():
        hidden = model.embed(ids)
        of = RowPass(rows, fused, model.tables(40))
        for layer_index in layers:
            attending = Attending(observer=attention.observer_of(layer_index))
            model.rows.forward(layer_index, hidden, of, attending=attending)
    model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        output = model.hf(ids[None], output_attentions=True, use_cache=False)
    groups = model.hf.config.num_attention_heads // model.spec.num_kv_heads
    for layer_index in layers:
        norms = fused.values[layer_index][0].norm(dim=-1).repeat_interleave(groups, 0)
        weights = output.attentions[layer_index][0, :, 33:].sum(dim=1) * norms
        expected = weights.sum(dim=0)[reused]
        # Soft-capping is left out of the look; the ranks stay.
        if family == "gemma2":
            assert (attention.relevance[layer_index] - expected).abs().max() < 0.2 * expected.max()
        else:
            assert torch.allclose(attention.relevance[layer_index], expected, atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        *POLICIES,
        LoadingController.name,
        *("boundary:tokens=4", "seam:ratio=0.2", "deviation:ratio=0.3:on=k", "gradual:spread=0.8"),
        *("two_stage:look=0.25", "query:depth=0.5", "query:ratio=0.1:shift=0.8"),
        *("auto:ttft=0.5:loss=0.02", "auto:ratio=0.2:shift=0.9", "random:ratio=1e-3"),
    ],
)
def test_what_a_report_says_can_be_asked_for(spec: str) -> None:
    policy = make_choice(spec)
    assert make_choice(str(policy)) == policy
    assert str(make_choice(str(policy))) == str(policy)
    takes_ratio(str(policy))
