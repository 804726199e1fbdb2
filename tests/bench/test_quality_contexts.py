"""Ways of encoding chunks, held against full prefill of the same prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrag.codec.registry import get_codec
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.questions import Passage, render
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.datasets import LEFT_OUT, load_questions
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_bench.quality.rows import Estimate
from kvrag_testing.bench_top import TEXTS

FIRST, SECOND, THIRD, FOURTH = TEXTS[:4]


def context(text: str, *before: str) -> dict[str, Any]:
    return {"title": "", "text": text, "before": list(before)}


def write(path: Path, **changed: Any) -> str:
    ctxs = [context(THIRD), context(FIRST), context(SECOND, FIRST), context(FOURTH, THIRD)]
    asked = {"question": "who?", "answers": ["Ines"], "type": "near", "ctxs": ctxs}
    alone = {
        "question": "who is it?",
        "answers": ["unknown"],
        "document_answers": ["Tomas"],
        "type": "far",
        "ctxs": [context(THIRD), context(SECOND, FIRST)],
    }
    path.write_text(json.dumps([{**asked, **changed}, asked, alone]))
    return str(path)


def test_earlier_text_and_the_documents_truth_are_read(tmp_path: Path) -> None:
    first, _, alone = load_questions(write(tmp_path / "set.json"))
    assert first.before == ((), (), (FIRST,), (THIRD,))
    assert first.passages[2] == Passage(SECOND, (FIRST,))
    assert (first.document_answers, alone.document_answers) == ((), ("Tomas",))


def test_generated_questions_are_asked_again_without_the_predecessor() -> None:
    plain = load_questions("generated", 100)
    both = load_questions("generated", 100, with_left_out=True)
    assert both[: len(plain)] == plain
    alone = both[len(plain) :]
    carried_over = {one.place: one for one in plain if one.type == "carried_over"}
    assert len(carried_over) > len(alone) > len(carried_over) / 2
    for one in alone:
        whole = carried_over[one.place.removesuffix(", left out")]
        assert one.type == LEFT_OUT
        assert (one.answers, one.document_answers) == (("unknown",), whole.answers)
        (missing,) = set(whole.texts) - set(one.texts)
        assert one.texts == tuple(text for text in whole.texts if text != missing)
        # The answer still stands in the prompt; who it is about only in the document.
        (holder,) = [p for p in one.passages if p.before == (missing,)]
        assert whole.answers[0] in holder.text


def test_rows_of_every_context(model: KVModel, tmp_path: Path) -> None:
    rows = run_quality_bench(
        QualityOptions(
            model=model,
            data=write(tmp_path / "set.json"),
            policies=("none", "deviation"),
            ratios=(1.0,),
            contexts=("none", "document", "neighbours"),
            max_tokens=4,
            controls=False,
        )
    )
    by_name = {(row.context, row.policy, row.question_type): row for row in rows}
    assert len(by_name) == len(rows) == 3 * 2 * 3
    for row in rows:
        if row.policy == "deviation":
            assert (row.exact_match_difference, row.top1_agreement) == (Estimate(0, 0, 0), 1.0)
            assert row.kl < 1e-6
        # What the prompt cannot answer is counted apart.
        assert (row.document_match is None) == (row.question_type != "far")
        assert row.num_questions == (1 if row.question_type == "far" else 2)
    kl = {name: by_name[name, "none", "far"].kl for name in ("none", "document", "neighbours")}
    assert kl["document"] != kl["none"]
    # Its predecessor is not in that prompt: the plain record is used.
    assert kl["neighbours"] == pytest.approx(kl["none"], rel=1e-3)
    near = {name: by_name[name, "none", "near"].kl for name in kl}
    assert near["neighbours"] == pytest.approx(near["document"], rel=1e-3)


def test_the_same_text_in_two_documents_is_told_apart(model: KVModel) -> None:
    passages = [Passage(SECOND, (FIRST,)), Passage(SECOND, (THIRD,)), Passage(FIRST)]
    codecs = [get_codec("raw")]
    bank = ChunkBank(model, passages, codecs, context="document")
    prompt = render("who?", [FOURTH, SECOND], model.tokenizer, False)
    found = {bank.lay_out(prompt, [passage]).spans[0].context_ids for passage in passages[:2]}
    assert len(found) == 2
    alone = ChunkBank(model, passages, codecs)
    assert alone.lay_out(prompt, passages[:1]).spans[0].context_ids == ()


def test_what_ingestion_stores_counts_in_the_bytes(model: KVModel) -> None:
    passages = [Passage(FIRST), Passage(SECOND, (FIRST,))]
    sizes = {
        name: ChunkBank(model, passages, [get_codec("raw")], context=name).stored("raw", passages)
        for name in ("none", "document", "neighbours", "filler:9")
    }
    # The record of a chunk alone, beside a filler, is made by the prompts that begin with it.
    assert sizes["none"] == sizes["document"] == sizes["filler:9"]
    assert sizes["neighbours"][0] > 1.4 * sizes["none"][0]
    assert sizes["neighbours"][1] == sizes["none"][1]
