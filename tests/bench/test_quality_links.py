"""The referee judges policies without link tokens and with them."""

import pytest

from kvrag.errors import LinksError
from kvrag.fusion.layout import Layout
from kvrag.fusion.linked_rows import insert_links
from kvrag.fusion.policies.base import NonePolicy
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.answers import Answerer
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_testing.bench_top import Bench
from tests.fusion.test_links import ORDER, make_links
from tests.support.models import make_model, make_tokenizer


def test_each_policy_is_judged_twice(model: KVModel, questions: str) -> None:
    options = QualityOptions(
        model=model,
        data=questions,
        policies=("none", "deviation", "oracle"),
        ratios=(0.3, 1.0),
        links=make_links(model),
        max_tokens=4,
        controls=False,
    )
    rows = run_quality_bench(options)
    pairs = [("none", None), ("deviation", 0.3), ("deviation", 1.0)]
    twice = [(name + links, ratio) for name, ratio in pairs for links in ("", " + links")]
    assert [(row.policy, row.ratio) for row in rows] == [*twice, ("oracle", 0.3), ("oracle", 1.0)]
    by_name = {(row.policy, row.ratio): row for row in rows}
    # Without links ratio 1 is full prefill; with random links it is something else.
    assert by_name["deviation", 1.0].kl < 1e-6
    assert by_name["deviation + links", 1.0].kl > 1e-3
    assert by_name["none + links", None].kl != by_name["none", None].kl
    assert by_name["none + links", None].work_share > by_name["none", None].work_share


def test_absent_links_are_named_before_anything_is_loaded(questions: str) -> None:
    with pytest.raises(LinksError, match="no links at 'absent'"):
        run_quality_bench(QualityOptions(model="./absent", data=questions, links="absent"))


def test_an_adapter_answers_too() -> None:
    """The answer's rows go through the adapter, as the question's do."""
    bench = Bench(KVModel(make_model(), make_tokenizer()))
    links = make_links(bench.model, "adapter").on(bench.model)
    answerer = Answerer(bench.model, 6)
    layout = bench.lay_out(bench.prompt(*ORDER))
    reference = answerer.reference(layout.token_ids)

    def kl(given: Layout) -> tuple[float, ...]:
        return answerer.answer(
            answerer.fuse(given, bench.open_kv, NonePolicy(), links), reference
        ).comparison.kl

    assert kl(insert_links(layout, links.header)) != kl(layout)
    assert answerer.reference(layout.token_ids).token_ids == reference.token_ids
