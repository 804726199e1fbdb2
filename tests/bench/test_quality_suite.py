"""The referee on the real suite: choices, controls, a file of judgements, several processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.models.kv_model import KVModel
from kvrag.tune.calibrate import mean_interval
from kvrag_bench.judge.answers import Answerer
from kvrag_bench.quality.contest import run_quality_bench
from kvrag_bench.quality.entrants import QualityOptions
from kvrag_bench.quality.metrics import ratio_interval
from tests.support.models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> KVModel:
    model = make_model(num_hidden_layers=2, max_position_embeddings=4096)
    return KVModel(model, make_tokenizer(), name="random")


def options(**changed: Any) -> QualityOptions:
    return replace(
        QualityOptions(
            suite=("biography:2",),
            num_questions=2,
            policies=("none", "two_stage"),
            ratios=(0.3,),
            max_tokens=4,
        ),
        **changed,
    )


def test_choices_controls_and_the_gap(model: KVModel) -> None:
    rows = run_quality_bench(options(model=model, noise_floor=True))
    overall = {row.policy: row for row in rows if row.question_type == "overall"}
    assert list(overall) == ["none", "two_stage", "no document", "bfloat16", "boundary"]
    assert {row.question_type for row in rows} == {"overall", "biography 2"}
    whole = overall["boundary"]
    assert (whole.ratio, whole.num_questions, whole.recomputed_share) == (1.0, 1, 1.0)
    assert whole.work_share < 1  # the first of two chunks is exact
    assert whole.kl < 1e-6 < overall["bfloat16"].kl < overall["none"].kl
    assert whole.gold.mean == pytest.approx(0, abs=1e-5)
    assert overall["no document"].work_share < overall["two_stage"].work_share < 1
    plain, repaired = overall["none"], overall["two_stage"]
    assert (plain.gap_closed.low, plain.gap_closed.mean, plain.gap_closed.high) == (0, 0, 0)
    assert repaired.gap_closed.mean == pytest.approx(1 - repaired.kl / plain.kl)
    assert repaired.gap_closed.low <= repaired.gap_closed.mean <= repaired.gap_closed.high
    for row in overall.values():
        assert row.choice is not None
        assert row.reference_choice is not None
        assert row.choice_difference is not None
        assert 0 <= row.agreed_tokens <= 4
        # A random model answers nothing, so nobody writes an answer of their own.
        assert row.answered_share == 0
        assert row.exact_match is row.answered_contains is None


def test_a_run_continues_from_its_file(
    model: KVModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "judged.jsonl"
    rows = run_quality_bench(options(model=model, out=out))
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * 3 + 1
    first = json.loads(lines[0])
    assert first["type"] == "biography 2"
    assert first["contestant"]["policy"] == "none"
    # Stopped in the middle of a line: that one is judged again, and nothing else.
    out.write_bytes(b"".join(lines)[:-20])
    judged = []
    answer = Answerer.answer

    def note(*given: Any, **more: Any) -> Any:
        judged.append(given)
        return answer(*given, **more)

    monkeypatch.setattr(Answerer, "answer", note)
    again = run_quality_bench(options(model=model, out=out))
    # One of the prompt's first chunk, as warming up, and the one that was missing.
    assert len(judged) <= 2
    assert [row.kl for row in again] == pytest.approx([row.kl for row in rows])
    assert out.read_bytes().count(b"\n") == len(lines)
    monkeypatch.setattr(Answerer, "reference", lambda *_: pytest.fail("was judged already"))
    assert run_quality_bench(options(model=model, out=out)) == again
    # Another setting is another judgement.
    with pytest.raises(BaseException, match="was judged already"):
        run_quality_bench(options(model=model, out=out, max_tokens=3))


def test_a_model_in_bfloat16_is_its_own_noise_floor() -> None:
    low = KVModel(make_model(dtype=torch.bfloat16), make_tokenizer(), name="low")
    with pytest.raises(ParameterError, match="bfloat16 already"):
        run_quality_bench(options(model=low, noise_floor=True))


def test_the_interval_of_a_ratio_is_paired() -> None:
    wholes = [0.5, 2.0, 1.0, 4.0] * 5
    assert ratio_interval([one / 4 for one in wholes], wholes) == pytest.approx((0.25, 0.25))
    ones = [1.0] * len(wholes)
    assert ratio_interval(wholes, ones) == mean_interval(wholes)
