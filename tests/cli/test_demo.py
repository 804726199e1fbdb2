from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrag.cli.demo import DemoQuestion, read_questions
from kvrag.errors import KVRagError
from tests.cli.conftest import Run

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
QUESTIONS = [
    {"question": "Who keeps the harbour ledger?", "answers": ["Ines"]},
    {"question": "Who jumps over the dog?"},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(QUESTIONS))
    return path


def test_json(run: Run, documents: Path, questions: Path, model_folder: Path) -> None:
    done = run(
        "demo",
        "--documents",
        documents,
        "--questions",
        questions,
        "--model",
        model_folder,
        "--json",
    )
    assert done.code == 0, done.err
    first, second = done.json["questions"]
    assert first["plain"]["prompt_tokens"] == first["kvrag"]["usage"]["prompt_tokens"]
    assert first["kvrag"]["sources"]
    assert first["kvrag"]["ttft_seconds"] > 0
    assert first["plain"]["ttft_seconds"] > 0
    assert first["kvrag"]["right"] in (True, False)
    assert second["kvrag"]["right"] is None
    assert [line["way"] for line in done.json["summary"]] == [
        "plain prefill",
        "kvrag",
        "reuse without repair",
    ]


def test_for_a_person(run: Run, documents: Path, questions: Path, model_folder: Path) -> None:
    done = run("demo", "--documents", documents, "--questions", questions, "--model", model_folder)
    assert done.code == 0, done.err
    assert "3 documents" in done.out
    assert "Who keeps the harbour ledger?" in done.out
    assert "[1]" in done.out
    assert "plain prefill: first token" in done.out
    assert "(right: Ines)" in done.out


def test_kept_index_can_be_asked(
    run: Run, documents: Path, questions: Path, model_folder: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    done = run(
        *("demo", "--documents", documents, "--questions", questions, "--model", model_folder),
        *("-n", 1, "--keep", kept),
    )
    assert done.code == 0, done.err
    assert run("ls", "--index", kept).code == 0


def test_the_shipped_questions_can_be_read() -> None:
    assert all(question.answers for question in read_questions(EXAMPLES / "questions.json"))


def test_the_handbook_answers_its_questions() -> None:
    pages = [page.read_text("utf-8") for page in (EXAMPLES / "handbook").glob("*.md")]
    for question in read_questions(EXAMPLES / "handbook-questions.json"):
        assert question.answers
        assert any(question.is_right(page) for page in pages), question.question


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"q": "?"}]', '{"a": 1}'])
def test_bad_question_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(KVRagError, match="bad"):
        read_questions(path)


def test_missing_question_file(tmp_path: Path) -> None:
    with pytest.raises(KVRagError, match="none"):
        read_questions(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "right"),
    [("Ines.", True), (" it is ines ", True), ("Inesa", False), ("", False), ("Tomas", False)],
)
def test_answers_are_judged_by_their_words(text: str, right: bool) -> None:
    assert DemoQuestion("Who?", ("Ines",)).is_right(text) is right


def test_nobody_judges_without_a_known_answer() -> None:
    assert DemoQuestion("Who?", ()).is_right("Ines") is None
