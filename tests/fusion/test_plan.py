"""A plan says all that is decided about a prompt, and what becomes of it when records are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvrag.fusion.calibration import Measured
from kvrag.fusion.controller import LoadingController, make_choice
from kvrag.fusion.layout import LinkRow
from kvrag.fusion.plan import FusePlan, Loading, plan_fusion
from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.policies.query import QueryPolicy
from kvrag.fusion.repair import Repair
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import Bench
from tests.fusion.test_auto import CALIBRATION, TWO_TIERS
from tests.support.models import make_model, make_tokenizer

ORDER = (0, 2, 1, 3)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(KVModel(make_model(num_hidden_layers=4), make_tokenizer()))


def planned(bench: Bench, choice: object, loading: Loading = Loading()) -> FusePlan:  # noqa: B008
    layout = bench.lay_out(bench.prompt(*ORDER))
    return plan_fusion(bench.model, layout, choice, loading)  # type: ignore[arg-type]


def test_spans_are_exact_or_inexact_and_all_else_is_fresh(bench: Bench) -> None:
    plan = planned(bench, Repair(NonePolicy()))
    assert [span.chunk_id for span in plan.exact] == ["chunk-0"]
    assert [span.chunk_id for span in plan.inexact] == ["chunk-2", "chunk-1", "chunk-3"]
    covered = {row for span in plan.spans for row in range(span.prompt_start, span.prompt_end)}
    assert set(plan.fresh.tolist()) == set(range(len(plan.layout.token_ids))) - covered


def test_a_prompts_first_token_is_computed_unless_it_is_exact(bench: Bench) -> None:
    exact = bench.lay_out(bench.prompt(*ORDER))
    assert exact.spans[0].prompt_start == exact.prefix_length
    cut = exact.prefix_length + 1
    # The same prompt without its head and its first chunk's first token: nothing is exact there.
    first, *others = exact.spans
    spans = [replace(first, prompt_start=0, chunk_start=1, length=first.length - 1)]
    spans += [replace(one, prompt_start=one.prompt_start - cut) for one in others]
    layout = replace(
        exact,
        token_ids=exact.token_ids[cut:],
        spans=tuple(spans),
        prefix_length=0,
        has_prefix=exact.prefix_length == 0,
    )
    plan = plan_fusion(bench.model, layout, Repair(NonePolicy()), Loading())
    assert plan.fresh[0] == 0
    rest = plan.spans[0]
    assert (rest.prompt_start, rest.chunk_start, rest.length) == (1, 2, first.length - 2)
    assert plan.spans[1:] == layout.spans[1:]
    # An exact first chunk, and rows that are kept, stay whole.
    assert plan_fusion(bench.model, exact, Repair(NonePolicy()), Loading()).spans == exact.spans
    kept = replace(layout, num_kept=spans[0].prompt_end)
    assert plan_fusion(bench.model, kept, Repair(NonePolicy()), Loading()).spans == layout.spans[1:]


def test_without_a_record_its_tokens_are_fresh_and_the_miss_is_counted(bench: Bench) -> None:
    plan = planned(bench, Repair(BoundaryPolicy(ratio=0.2)))
    lost, chosen = plan.inexact[0], plan.inexact[1]
    fewer = plan.without({lost.record_id: "record damaged", chosen.record_id: None})
    assert [span.chunk_id for span in fewer.inexact] == ["chunk-3"]
    assert fewer.misses == {"record damaged": 1}
    assert len(fewer.fresh) == len(plan.fresh) + lost.length + chosen.length
    assert fewer.layout is plan.layout
    assert plan.misses == {}


def test_the_question_is_asked_only_where_there_is_something_to_choose(bench: Bench) -> None:
    plan = planned(bench, Repair(QueryPolicy(0.2)))
    assert plan.question_layers == range(4)
    alone = plan.without(dict.fromkeys(span.record_id for span in plan.inexact))
    assert alone.question_layers == range(0)
    assert alone.exact == plan.exact


def test_the_question_starts_after_the_last_chunk_and_its_links(bench: Bench) -> None:
    plan = planned(bench, Repair(QueryPolicy(0.2)))
    last = plan.spans[-1].prompt_end
    assert plan.question_start == last
    linked = replace(plan, layout=replace(plan.layout, links=(LinkRow(last + 2, 0),)))
    assert linked.question_start == last + 3


def test_layers_that_recompute_everything_load_nothing(bench: Bench) -> None:
    assert planned(bench, Repair(NonePolicy())).num_whole_layers == 0
    assert planned(bench, Repair(DeviationPolicy(0.3))).num_whole_layers == 1
    assert planned(bench, Repair(DeviationPolicy(1.0))).num_whole_layers == 4


def test_a_model_of_one_layer_needs_no_repair() -> None:
    bench = Bench(KVModel(make_model(num_hidden_layers=1), make_tokenizer()))
    assert planned(bench, Repair(DeviationPolicy(0.5))).repair == Repair(NonePolicy())


def test_a_controller_says_what_is_computed_before_anything_is_opened(bench: Bench) -> None:
    nothing = (Measured("none", None, 0.0, 0.0, 0.0),)
    calibration = replace(CALIBRATION, policies=nothing, loading=TWO_TIERS)
    controller = LoadingController(calibration=calibration)
    far = {"chunk-1"}
    plan = planned(bench, controller, Loading(0, lambda chunk_id, _: int(chunk_id in far)))
    assert {one.chunk_id for one in plan.decisions.values() if one.is_computed} == far
    assert "chunk-1" not in {span.chunk_id for span in plan.spans}
    # A choice is no miss, and the question still starts after every chunk.
    assert plan.misses == {}
    assert plan.question_start == plan.layout.spans[-1].prompt_end
    assert plan.expected.seconds is not None


def test_rows_are_counted_before_anything_is_computed(bench: Bench) -> None:
    choice = make_choice("boundary", ratio=0.3)
    plan = planned(bench, choice)
    report = bench.fuse(bench.prompt(*ORDER), choice).report
    assert plan.num_planned_rows(plan.spans) == sum(report.rows_by_layer)
    assert plan.num_planned_rows(()) == 4 * report.num_tokens


def test_a_plan_carried_out_twice_gives_the_same(bench: Bench) -> None:
    made = [bench.fuse(bench.prompt(*ORDER), make_choice("deviation")) for _ in range(2)]
    assert torch.equal(made[0].logits, made[1].logits)
