"""The referee: right figures, full prefill itself as its yardstick, bad input named at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError
from kvrag.fusion.fuser import fuse
from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.query import QueryPolicy
from kvrag.fusion.repair import make_repair
from kvrag.kvcache import FusedKV
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_bench.judge.answers import Answerer
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.judgements import Contestant
from kvrag_bench.judge.questions import render
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.datasets import load_questions
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_bench.quality.oracle import TrueDeviation, policy_of
from kvrag_bench.quality.picture import draw_quality
from kvrag_bench.quality.rows import Estimate
from kvrag_testing.baselines import SeamPolicy
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer


def record(number: int = 0, **changed: Any) -> dict[str, Any]:
    texts = TEXTS[number % 4 :] + TEXTS[: number % 4]
    fields = {
        "question": f"who keeps ledger {number}?",
        "answers": ["Ines", "the keeper"],
        "ctxs": [{"title": "", "text": text} for text in texts],
        "type": ("near", "far")[number % 2],
        **changed,
    }
    return {name: value for name, value in fields.items() if value is not None}


def write(path: Path, records: Any) -> str:
    path.write_text(json.dumps(records))
    return str(path)


@pytest.fixture
def musique(tmp_path: Path) -> str:
    return write(tmp_path / "set.json", [record(number) for number in range(4)])


# -- data sets --------------------------------------------------------------------------------


def test_longbench_layout_cuts_at_passages_or_paragraphs(tmp_path: Path) -> None:
    qa = {
        "input": "Who?",
        "context": "Passage 1:\nInes keeps it.\n\nPassage 2:\nTomas repairs it.",
        "answers": ["Ines"],
        "dataset": "hotpotqa",
    }
    paragraphs = [f"{number} " + "word " * 200 for number in range(5)]
    summary = {"context": "\n".join(paragraphs), "answers": ["Words."], "dataset": "gov_report"}
    path = tmp_path / "l.jsonl"
    path.write_text(json.dumps(qa) + "\n\n" + json.dumps(summary) + "\n")
    first, second = load_questions(str(path))
    assert first.texts == ("Ines keeps it.", "Tomas repairs it.")
    assert (first.type, first.is_summary) == ("hotpotqa", False)
    assert len(second.texts) == 5
    assert second.is_summary
    assert second.question


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "empty"),
        ({}, "expected a JSON list"),
        ([record(), 7], r"record 1: expected an object"),
        ([record(), record(question=None)], r"record 1: field 'question' is missing"),
        ([record(question=" ")], r"record 0: field 'question' is empty"),
        ([record(answers=[])], r"record 0: field 'answers' is empty: expected a list"),
        ([record(answers="Ines")], r"field 'answers' is a string: expected a list"),
        ([record(ctxs=None)], r"record 0: field 'ctxs' is missing"),
        ([record(ctxs=[{"title": "x"}])], r"record 0, ctxs\[0\]: field 'text' is missing"),
        ([record(ctxs=[{"text": ""}])], r"ctxs\[0\]: field 'text' is empty"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, records: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        load_questions(write(tmp_path / "broken.json", records), 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no data set at"),
        (
            b'{"input": "Who?", "context": "Ines.", "answers": ["Ines"]}\n{"input"',
            "line 2: not JSON",
        ),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_files_that_are_no_data_set(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ParameterError, match=message):
        load_questions(str(path))


# -- nothing is computed for a request that cannot be met --------------------------------------


def test_prompts_that_do_not_fit_are_left_out_and_counted(model: KVModel, tmp_path: Path) -> None:
    long = record(1, ctxs=[{"text": "The clock of Varn is tall. " * 400}])
    path = write(tmp_path / "long.json", [record(), long])
    rows = run_quality_bench(
        QualityOptions(model=model, data=path, policies=("none",), controls=False)
    )
    assert [(r.question_type, r.num_questions, r.num_left_out) for r in rows] == [
        ("overall", 1, 1),
        ("near", 1, 0),
    ]
    path = write(tmp_path / "long.json", [long])
    with pytest.raises(ParameterError, match="none of the 1 prompts fits random"):
        run_quality_bench(QualityOptions(model=model, data=path))


# -- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_at_ratio_one_nothing_is_lost(family: str, musique: str) -> None:
    rows = run_quality_bench(
        QualityOptions(
            model=KVModel(make_model(family), make_tokenizer(), name=family),
            data=musique,
            ratios=(1.0,),
            controls=False,
        )
    )
    assert {(row.policy, row.ratio, row.question_type) for row in rows} == {
        (policy, ratio, kind)
        for policy, ratio in (
            ("none", None),
            *((one, 1.0) for one in ("random", "boundary", "deviation", "query", "two_stage")),
        )
        for kind in ("overall", "near", "far")
    }
    for row in rows:
        assert (row.model, row.dataset, row.codec) == (family, "set.json", "raw")
        assert row.num_questions == (4 if row.question_type == "overall" else 2)
        if row.policy == "none":
            assert row.recomputed_share == 0.0
            assert row.kl > 1e-3  # the others could not fail if plain reuse were exact too
            assert row.cached_share > 0.5
        else:
            assert row.recomputed_share == 1.0
            assert row.kl < 1e-6
            assert row.top1_agreement == row.first_top1_agreement == 1.0
            assert row.exact_match_difference == Estimate(0.0, 0.0, 0.0)
            assert row.gap_closed.mean == pytest.approx(1.0, abs=1e-4)
            assert row.agreed_tokens == 16
            assert row.f1 == row.reference_f1
        assert row.bytes_per_token > 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, D, float32
        assert row.ttft_seconds > 0
        assert row.plain_ttft_seconds > 0


def test_answers_are_those_of_plain_decoding(model: KVModel) -> None:
    """The shortcut (decode only from where an answer leaves the reference's) changes nothing."""
    bank = ChunkBank(model, [*TEXTS, TEXTS[0]], [get_codec("raw")])
    answerer = Answerer(model, max_tokens=10)
    num_different = 0
    for number in range(5):
        prompt = render(f"who is {number}?", TEXTS, model.tokenizer, number % 2 == 0)
        layout = bank.lay_out(prompt)
        assert len(layout.spans) == len(TEXTS)
        token_ids = prompt.token_ids(model.tokenizer)
        assert layout.token_ids == tuple(token_ids)
        reference = answerer.reference(token_ids)
        generated = model.hf.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=10,
            do_sample=False,
        )
        assert reference.token_ids == tuple(generated[0, len(token_ids) :].tolist())
        policy = make_repair("none")
        given = answerer.answer(answerer.fuse(layout, bank.opener("raw"), policy), reference)
        kv = FusedKV(model.spec, len(token_ids), len(token_ids) + 10)
        fused = fuse(model, layout, bank.opener("raw"), policy, kv)
        cache = FusedCache(kv, len(token_ids))
        expected = [int(fused.logits.argmax())]
        with torch.no_grad():
            while expected[-1] != 1 and len(expected) < 10:
                fed = torch.tensor([expected[-1:]])
                logits = model.hf(input_ids=fed, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
                expected.append(int(logits[0, -1].argmax()))
        assert given.token_ids == tuple(expected)
        compared = given.comparison
        assert len(compared.kl) == len(compared.agrees) == len(reference.token_ids)
        num_different += given.token_ids != reference.token_ids
    assert num_different


def _no_oracle() -> TrueDeviation:
    raise AssertionError("only the oracle knows the true deviation")


def test_a_policy_that_says_what_it_spends_is_judged_once(model: KVModel, musique: str) -> None:
    policies = ("query:ratio=0.5", "boundary:tokens=3", "seam")
    rows = run_quality_bench(
        QualityOptions(
            model=model, data=musique, policies=policies, ratios=(0.1, 0.2), controls=False
        )
    )
    overall = [row for row in rows if row.question_type == "overall"]
    assert [(row.policy, row.ratio) for row in overall] == [
        ("query:ratio=0.5", None),
        ("boundary:tokens=3", None),
        ("seam", 0.1),
        ("seam", 0.2),
    ]
    assert 0.5 <= overall[0].recomputed_share < 0.6
    made = [policy_of(Contestant(row.policy, row.ratio), _no_oracle).policy for row in overall]
    assert made[:3] == [QueryPolicy(0.5), BoundaryPolicy(3), SeamPolicy(ratio=0.1)]


def test_the_tiny_model_tells_reuse_from_full_prefill() -> None:
    rows = run_quality_bench(
        QualityOptions(
            policies=("none", "deviation"),
            ratios=(1.0,),
            num_questions=30,
            max_tokens=6,
            controls=False,
        )
    )
    none, full = (row for row in rows if row.question_type == "overall")
    assert full.exact_match == full.reference_exact_match >= 0.75
    assert none.exact_match < full.exact_match
    difference = none.exact_match_difference
    assert difference.low <= difference.mean <= difference.high
    carried = next(row for row in rows if row.question_type == "carried_over")
    assert carried.exact_match_difference.high < 0
    assert carried.kl > 0.1


# -- pictures ----------------------------------------------------------------------------------


def test_picture(model: KVModel, musique: str, tmp_path: Path) -> None:
    few = {"policies": ("none", "deviation"), "ratios": (0.1, 1.0), "num_questions": 1}
    rows = run_quality_bench(QualityOptions(model=model, data=musique, max_tokens=2, **few))
    rows += [replace(row, codec="small", bytes_per_token=row.bytes_per_token / 2) for row in rows]
    draw_quality(rows, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes()[:4] == b"\x89PNG"
