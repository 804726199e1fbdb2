"""A plan says all that is decided about a prompt, and what becomes of it when records are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrag.fusion.controller import LoadingController, Measured
from kvrag.fusion.layout import LinkRow
from kvrag.fusion.plan import FusePlan, Loading, plan_fusion
from kvrag.fusion.policies.base import NonePolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
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


def test_the_question_starts_after_the_last_chunk_and_its_links(bench: Bench) -> None:
    plan = planned(bench, Repair(QueryPolicy(0.2)))
    last = plan.spans[-1].prompt_end
    assert plan.question_start == last
    linked = replace(plan, layout=replace(plan.layout, links=(LinkRow(last + 2, 0),)))
    assert linked.question_start == last + 3


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
