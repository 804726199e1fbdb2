"""A request is checked when it is made, and says one thing from whichever door it comes."""

from dataclasses import replace

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Recompute, Request
from kvrag.errors import ParameterError
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.repair import Repair
from kvrag.ingest.index import Index
from kvrag_testing.bench_top import TEXTS

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS[:3]) + "\n\nQuestion: who keeps it?\nAnswer:"
ENGINE = Recompute("deviation", ratio=0.4)


def test_an_option_or_a_request_give_the_same(index: Index) -> None:
    engine = KVEngine(index, max_tokens=4)
    request = Request(PROMPT, policy="query", ratio=0.3, stop=["zzz"])
    by_options = engine.generate(PROMPT, policy="query", ratio=0.3, stop=["zzz"])
    by_request = engine.generate(request)
    assert by_request.text == by_options.text
    assert by_request.report.policy == by_options.report.policy == "query(ratio=0.3)"
    assert engine.fuse(request).report.num_recomputed == by_options.report.num_recomputed
    *_, last = engine.stream(replace(request, max_tokens=2))
    assert last.answer.usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (Recompute(), ENGINE),
        (Recompute("deviation"), ENGINE),
        (Recompute(ratio=0.1), Recompute("deviation", 0.1)),
        (Recompute("deviation", 0.1), Recompute("deviation", 0.1)),
        (Recompute("query"), Recompute("query")),
        (Recompute("boundary", boundary_tokens=3), Recompute("boundary", None, 3)),
        # They give way together: a policy takes the one or the other.
        (Recompute(boundary_tokens=3), Recompute("deviation", None, 3)),
    ],
)
def test_what_a_request_says_goes_before_the_engines(said: Recompute, meant: Recompute) -> None:
    assert said.over(ENGINE) == meant


def test_a_policy_object_says_its_ratio_itself() -> None:
    assert Request("x", policy=DeviationPolicy(0.2)).recompute.choice() == Repair(
        DeviationPolicy(0.2)
    )
    with pytest.raises(ParameterError, match=r"ratio 0\.1 given with policy deviation"):
        Request("x", policy=DeviationPolicy(0.2), ratio=0.1)


def test_a_request_does_not_change_with_the_callers_lists() -> None:
    stop, hints = ["end"], ["chunk"]
    request = Request("x", stop=stop, hints=hints)
    stop[0] = hints[0] = "other"
    assert request == Request("x", stop=("end",), hints=("chunk",))
    assert request.stop == ("end",)


def test_options_beside_a_request_are_refused(index: Index) -> None:
    with pytest.raises(ParameterError, match="ratio given with a Request"):
        KVEngine(index).generate(Request(PROMPT), ratio=0.5)
