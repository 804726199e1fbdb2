"""What `kvrag calibrate` asks where nobody gives it questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.calibration import Calibration
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.testing.bench_top import TEXTS
from kvrag.tune.calibrate import CalibrationOptions, calibrate
from tests.support.models import make_model, make_tokenizer


def make_index(folder: Path, *texts: str) -> Index:
    model = KVModel(make_model(num_hidden_layers=2), make_tokenizer())
    index = Index.create(folder, model=model, embedding="hashing")
    index.add([Document(source=f"text-{i}", text=text) for i, text in enumerate(texts)])
    return index


def test_no_question_holds_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these chunks is one sentence, short enough to be quoted whole."""
    asked: list[str] = []
    from kvrag.tune import calibrate as module

    judge = module.judge_policies

    def noting(model, questions, *rest, **options):  # type: ignore[no-untyped-def]
        asked.extend(question.question for question in questions)
        return judge(model, questions, *rest, **options)

    monkeypatch.setattr(module, "judge_policies", noting)
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
