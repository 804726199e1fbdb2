"""What `kvrag calibrate` asks where nobody gives it questions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.calibration import Calibration
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.testing.bench_top import TEXTS
from kvrag.tune.calibrate import CalibrationOptions, calibrate, usual_choice
from kvrag.tune.contexts import check_contexts, compare_contexts
from tests.support.models import make_model, make_tokenizer


def make_index(folder: Path, *texts: str, context: str | None = None) -> Index:
    model = KVModel(make_model(num_hidden_layers=2), make_tokenizer())
    index = Index.create(folder, model=model, embedding="hashing", context=context)
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


CONTEXTS = CalibrationOptions(num_questions=2, max_tokens=2, num_chunks=2)


def test_contexts_are_compared_on_the_same_questions(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS) as index:
        own, *others = compare_contexts(index, ["filler:16", "corpus:16", "none"], CONTEXTS)
        assert own.context == "none"
        assert own.share_low == own.share_high == 1.0
        assert [one.context for one in others] == ["filler:16", "corpus:16"]
        # Each context gives other keys, so other divergences.
        assert len({one.reused for one in (own, *others)}) == 3
        assert index.config.context == "none"


def test_an_index_is_judged_after_its_own_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvrag.tune import calibrate as module

    given = []
    judge = module.judge_policies

    def noting(*rest, **options):  # type: ignore[no-untyped-def]
        given.append((options["contexts"], options["corpus_filler"]))
        return judge(*rest, **options)

    monkeypatch.setattr(module, "judge_policies", noting)
    with make_index(tmp_path / "i", *TEXTS, context="corpus:16") as index:
        calibrate(index, CalibrationOptions(num_questions=1, max_tokens=2, policies=("none",)))
        assert given == [(["corpus:16"], index.config.corpus_filler)]
        assert index.config.corpus_filler


def test_what_a_context_needs_is_checked_first(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS) as index:
        for name, message in {
            "document": "cannot be calibrated",
            "filler:999999": "exceed",
            "nothing": "expected one of",
        }.items():
            with pytest.raises(ParameterError, match=message):
                check_contexts(index, [name], CONTEXTS)
        everything = CalibrationOptions(num_chunks=9)
        with pytest.raises(ParameterError, match="a question holds all"):
            check_contexts(index, ["corpus:16"], everything)
    with make_index(tmp_path / "own", *TEXTS, context="document") as index:
        check_contexts(index, [], CONTEXTS)
        with pytest.raises(ParameterError, match="context document:256 cannot be calibrated"):
            check_contexts(index, ["none"], CONTEXTS)
    with (
        make_index(tmp_path / "corpus", *TEXTS, context="corpus:16") as index,
        pytest.raises(ParameterError, match="longer than the index's own, corpus:16"),
    ):
        check_contexts(index, ["corpus:17"], CONTEXTS)


def test_a_small_index_leaves_out_questions_for_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvrag.tune import contexts as module

    given = []
    judge = module.judge_policies

    def noting(model, questions, *rest, **options):  # type: ignore[no-untyped-def]
        given.append((questions, options["corpus_filler"]))
        return judge(model, questions, *rest, **options)

    monkeypatch.setattr(module, "judge_policies", noting)
    options = CalibrationOptions(num_questions=200, max_tokens=2, num_chunks=2)
    with make_index(tmp_path / "i", *TEXTS) as index:
        found = compare_contexts(index, ["corpus:16"], options)
        assert [one.context for one in found] == ["none", "corpus:16"]
    ((questions, text),) = given
    assert questions
    assert text
    assert not any(text[:40] in asked for one in questions for asked in one.texts)


def test_what_auto_takes_for_a_usual_prompt_is_known(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS) as index:
        found = calibrate(index, CalibrationOptions(num_questions=2, max_tokens=2, num_chunks=2))
        losing = [replace(one, loss=0.5) for one in found.policies]
        losing[-1] = replace(losing[-1], loss=0.25)
        chosen = usual_choice(index, replace(found, policies=tuple(losing)), 5)
        assert chosen is not None
        repair, expected = chosen
        assert repair == losing[-1].make()
        assert expected.loss == 0.25
    with make_index(tmp_path / "empty") as index:
        assert usual_choice(index, found, 5) is None


def test_time_ends_the_questions_after_eight(tmp_path: Path) -> None:
    with make_index(tmp_path / "i", *TEXTS, *(f"{text} Again." for text in TEXTS)) as index:
        options = CalibrationOptions(
            num_questions=12, seconds=0, max_tokens=2, num_chunks=2, policies=("none",)
        )
        assert calibrate(index, options).num_questions == 8
