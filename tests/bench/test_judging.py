"""Calibration's judge comes to what `kvrag bench quality` comes to."""

from __future__ import annotations

from kvrag.fusion.chosen_links import LINKS_OFF
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.judging import check_policies, judge_policies
from kvrag_bench.judge.questions import JudgedQuestion
from kvrag_bench.quality.contest import judge_questions
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer

POLICIES = ("none", "deviation", "boundary:tokens=2")
RATIOS = (0.1, 0.5)


def test_both_judges_find_the_same() -> None:
    model = KVModel(make_model(num_hidden_layers=2), make_tokenizer())
    questions = [
        JudgedQuestion(
            place=f"question {number}",
            type="",
            question=f"Who keeps ledger {number}?",
            answers=("Ines",),
            texts=tuple(TEXTS[number : number + 3]),
        )
        for number in range(2)
    ]
    judged = judge_policies(
        model,
        questions,
        POLICIES,
        RATIOS,
        max_tokens=4,
        use_chat_template=False,
        say=lambda _: None,
    )
    options = QualityOptions(
        policies=POLICIES,
        ratios=RATIOS,
        max_tokens=4,
        use_chat_template=False,
        links=LINKS_OFF,
        controls=False,
    )
    contest, _ = judge_questions(model, questions, options, lambda _: None)
    assert list(judged) == list(contest)
    for trials, judgements in zip(judged.values(), contest.values(), strict=True):
        assert [(one.agrees, one.num_rows, one.num_cached) for one in trials] == [
            (one.agrees, one.num_rows, one.num_cached) for one in judgements
        ]
        assert [(one.given, one.reference) for one in trials] == [
            (one.given, one.reference) for one in judgements
        ]
    rows = [trials[0].num_rows for trials in judged.values()]
    assert rows[0] == min(rows) < max(rows)


def test_a_policy_that_says_what_it_spends_needs_no_ratio() -> None:
    check_policies(["none", "query:ratio=0.1", "boundary:tokens=8"], [])
