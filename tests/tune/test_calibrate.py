"""What `kvrag calibrate` asks where nobody gives it questions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrag.engine.asking import Asking
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.fusion.controller import Calibration, Cost, Measured
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.tune.calibrate import CalibrationOptions, calibrate, usual_choice
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer
from tests.support.rag import text_index


def make_index(folder: Path, *texts: str, context: str | None = None) -> Index:
    model = KVModel(make_model(num_hidden_layers=2), make_tokenizer())
    return text_index(folder, model, texts, context=context)


def test_no_question_holds_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these chunks is one sentence, short enough to be quoted whole."""
    asked: list[str] = []
    request = Asking.request

    def noting(self: Asking, index: Index, turns: Any, **options: Any) -> Request:
        asked.append(turns[-1]["content"])
        return request(self, index, turns, **options)

    monkeypatch.setattr(Asking, "request", noting)
    with make_index(tmp_path / "i", "Ines keeps the harbour.", *TEXTS) as index:
        options = CalibrationOptions(num_questions=5, max_tokens=2, policies=("none",))
        found = calibrate(index, options)
        assert found.num_questions == len(asked) == 5
        engine = KVEngine(index)
        for question in asked:
            assert len(question) > len('What is said about ""?') + 5
            assert engine.fuse(question).report.num_chunks == 0


def test_chunks_of_a_word_cannot_be_asked_about(tmp_path: Path) -> None:
    with (
        make_index(tmp_path / "i", "Lighthouse-keepers.") as index,
        pytest.raises(ParameterError, match="no chunk is longer than a word"),
    ):
        calibrate(index)


def test_what_was_measured_can_be_read_again(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS) as index:
        found = calibrate(index, CalibrationOptions(num_questions=2, max_tokens=2))
    assert Calibration.from_json(found.to_json(), "here") == found


def test_a_loss_is_how_often_the_likeliest_token_differs(tmp_path: Path) -> None:
    """Nothing is lost where all is computed again; rows and seconds are those of the prompts."""
    options = CalibrationOptions(
        num_questions=3, max_tokens=6, policies=("none", "query"), ratios=(0.1, 1.0)
    )
    with make_index(tmp_path / "i", *TEXTS, context="filler:16") as index:
        found = calibrate(index, options)
        losses = {(one.policy, one.ratio): one.loss for one in found.policies}
        assert losses.keys() == {("none", None), ("query", 0.1), ("query", 1.0)}
        assert losses["query", 1.0] == 0.0
        assert all(0.0 <= one <= 1.0 for one in losses.values())
        assert found.measure == "agreement"
        assert found.loading is not None
        assert found.cost.of(1000, 0) > 0.0


def test_prompts_that_do_not_fit_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse, too_long = KVEngine.fuse, ["the first"]

    def fuse_or_not(self: KVEngine, prompt: Any, **options: Any) -> Any:
        if too_long:
            raise PromptTooLongError(too_long.pop())
        return fuse(self, prompt, **options)

    monkeypatch.setattr(KVEngine, "fuse", fuse_or_not)
    options = CalibrationOptions(num_questions=3, max_tokens=2, policies=("none",))
    with make_index(tmp_path / "i", *TEXTS) as index:
        assert calibrate(index, options).num_questions == 2
        too_long += ["one"] * 3
        with pytest.raises(ParameterError, match="none of the prompts fits the model: one"):
            calibrate(index, options)


def test_what_auto_takes_for_a_usual_prompt_is_known(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS) as index:
        found = calibrate(index, CalibrationOptions(num_questions=2, max_tokens=2, num_chunks=2))
        losing = [replace(one, loss=0.5) for one in found.policies]
        losing[-1] = replace(losing[-1], loss=0.25)
        measured = tuple(losing)
        ((chosen, speed),) = usual_choice(index, replace(found, policies=measured), 5)
        assert chosen == losing[-1]
        assert speed > 0.0
        # `none` is within what auto may lose, and the fastest; of two that lose less, the one that
        # computes fewer rows is named.
        by_rows = Cost(0.0, 1e-3, 0.0)
        whole, half = (Measured("query", share, 0.0, 0.0, 0.0) for share in (1.0, 0.5))
        cheap = Measured("none", None, 0.005, 0.0, 0.01)
        made = replace(found, policies=(whole, cheap, half), cost=by_rows, loading=None)
        (first, fast), (second, slower) = usual_choice(index, made, 5)
        assert (first, second) == (cheap, half)
        assert fast > slower > 1.0
    with make_index(tmp_path / "empty") as index:
        assert usual_choice(index, found, 5) == []


def test_time_ends_the_questions_after_eight(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS, *(f"{text} Again." for text in TEXTS)) as index:
        options = CalibrationOptions(
            num_questions=12, seconds=0, max_tokens=2, num_chunks=2, policies=("none",)
        )
        assert calibrate(index, options).num_questions == 8
