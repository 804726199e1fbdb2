from __future__ import annotations

from pathlib import Path

import pytest

from kvrag.ingest.index import Index
from tests.cli.conftest import Run
from tests.support.models import make_model, make_tokenizer

QUESTION = "Who keeps the harbour ledger?"


def test_answer_sources_and_report(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 4)
    assert done.code == 0, done.err
    assert "[1] best match, " in done.out
    assert "harbour.txt#0" in done.out
    assert "first token" in done.out
    assert "recomputed" in done.out


def test_json_is_one_document(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 4, "--json")
    assert done.code == 0, done.err
    document = done.json
    assert document["question"] == QUESTION
    with Index.open(index_folder) as index:
        best = [hit.chunk.chunk_id for hit in index.search(QUESTION, 4)]
    assert [one["chunk_id"] for one in document["sources"]] == best
    assert document["report"]["num_cached"] > 0
    assert document["usage"]["completion_tokens"] <= 4
    assert document["ttft_seconds"] > 0


@pytest.mark.parametrize("flags", [(), ("--no-chat",)])
def test_everything_recomputed_equals_plain(
    run: Run, index_folder: Path, flags: tuple[str, ...]
) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 8, "--json", *flags)
    plain = run(*common, "--plain").json
    fused = run(*common, "--ratio", "1.0").json
    assert plain["answer"] == fused["answer"]
    assert plain["prompt_tokens"] == fused["usage"]["prompt_tokens"]
    assert plain["policy"] == "plain"


def test_eviction_is_reported(run: Run, index_folder: Path) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 4)
    done = run(*common, "--eviction", "corm:window=4:recent=4")
    assert done.code == 0, done.err
    assert "of the KV kept by corm(window=4, recent=4, threshold=1.0)" in done.out
    report = run(*common, "--eviction", "streaming:share=0.5", "--json").json["report"]
    assert 0.4 < report["eviction"]["prompt_share"] < 0.6
    assert run(*common, "--json").json["report"]["eviction"] is None


def test_a_time_to_first_token(run: Run, index_folder: Path) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 4)
    done = run(*common, "--ttft", "30")
    assert done.code == 0, done.err
    assert "streamed in" in done.out
    stream = run(*common, "--ttft", "30", "--json").json["report"]["stream"]
    assert stream["is_met"]
    assert stream["levels"] == {"1/1": len(stream["chunks"])}
    assert run(*common, "--json").json["report"]["stream"] is None
    for wrong in ("0", "-1", "nan", "inf"):
        done = run(*common, "--ttft", wrong)
        assert (done.code, "ttft" in done.err) == (2, True)


def test_plain_for_a_person(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 4, "--plain")
    assert done.code == 0, done.err
    assert "full prefill" in done.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--eviction", "lru"), "none, corm, streaming, h2o, snapkv"),
        (("--eviction", "corm:window=0"), "expected 1 or more"),
        (("--policy", "none:scale=2.0"), "scale of reused keys left kvrag with 0.3"),
        (("--policy", "none", "--ratio", "0.5"), "none"),
        (("--boundary-tokens", "3"), "boundary_tokens"),
        (("--device", "nonsense"), "device 'nonsense'"),
    ],
)
def test_bad_values_are_named(
    run: Run, index_folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    done = run("query", "--index", index_folder, QUESTION, *arguments)
    assert done.code == 1
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert expected in done.err
    assert done.err.count("\n") == 1


def test_empty_question(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, "  ")
    assert done.code == 1
    assert "question" in done.err


def test_an_empty_index_is_told(
    run: Run, index_folder: Path, documents: Path, model_folder: Path
) -> None:
    for path in [*documents.rglob("*.txt"), *documents.rglob("*.md")]:
        path.unlink()
    emptied = run("ingest", documents, "--index", index_folder)
    assert emptied.code == 0, emptied.err
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    assert done.code == 0
    assert "empty" in done.err


def test_missing_index(run: Run, tmp_path: Path) -> None:
    done = run("query", "--index", tmp_path / "nowhere", QUESTION)
    assert done.code == 1
    assert "nowhere" in done.err
    assert "kvrag ingest" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--max-tokens", "many"), ("-k", "0"), ("--bogus",), ("--policy", "magic")),
        *(
            ("--ratio", "nan"),
            ("--ratio", "1.5"),
            ("--ratio", "-0.1"),
            ("--max-tokens", "0"),
            ("--temperature", "-1"),
        ),
    ],
)
def test_what_help_rules_out_is_a_usage_error(
    run: Run, index_folder: Path, arguments: tuple[str, ...]
) -> None:
    assert run("query", "--index", index_folder, QUESTION, *arguments).code == 2


def test_device(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, QUESTION, "--device", "cpu", "--max-tokens", 2)
    assert done.code == 0, done.err


def test_another_model_is_refused(run: Run, index_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-model"
    make_model("llama", seed=1).save_pretrained(other)
    make_tokenizer().save_pretrained(other)
    done = run("query", "--index", index_folder, QUESTION, "--model", other)
    assert done.code == 1
    assert "model" in done.err
    assert "Traceback" not in done.err


def test_prompt_longer_than_the_context(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, "why " * 3000)
    assert done.code == 1
    assert "tokens" in done.err
