from __future__ import annotations

from pathlib import Path

import pytest

from kvrag.ingest.index import Index
from tests.cli.conftest import Run

QUESTION = "Who keeps the harbour ledger?"


def test_answer_sources_and_report(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 4)
    assert "[1] best match, " in done.out
    assert "harbour.txt#0" in done.out
    assert "first token" in done.out
    assert "recomputed" in done.out


def test_json_is_one_document(run: Run, index_folder: Path) -> None:
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 4, "--json")
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
    assert plain["usage"]["prompt_tokens"] == fused["usage"]["prompt_tokens"]
    assert plain["usage"]["cached_tokens"] == 0 < fused["report"]["num_recomputed"]


def test_eviction_is_reported(run: Run, index_folder: Path) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 4)
    done = run(*common, "--eviction", "corm:window=4:recent=4")
    assert "of the KV kept by corm(window=4, recent=4, threshold=1.0)" in done.out
    report = run(*common, "--eviction", "streaming:share=0.5", "--json").json["report"]
    assert 0.4 < report["eviction"]["prompt_share"] < 0.6
    assert run(*common, "--json").json["report"]["eviction"] is None


def test_a_time_to_first_token(run: Run, index_folder: Path) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 4)
    done = run(*common, "--ttft", "30")
    assert "streamed in" in done.out
    stream = run(*common, "--ttft", "30", "--json").json["report"]["stream"]
    assert stream["is_met"]
    assert stream["levels"] == {"1/1": len(stream["chunks"])}
    assert run(*common, "--json").json["report"]["stream"] is None
    for wrong in ("0", "-1", "nan", "inf"):
        done = run(*common, "--ttft", wrong, code=2)
        assert "ttft" in done.err


def test_an_empty_index_is_told(
    run: Run, index_folder: Path, documents: Path, model_folder: Path
) -> None:
    for path in [*documents.rglob("*.txt"), *documents.rglob("*.md")]:
        path.unlink()
    run("ingest", documents, "--index", index_folder)
    done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    assert "empty" in done.err


def test_an_answer_is_verified(run: Run, index_folder: Path) -> None:
    asked = ("query", QUESTION, "--index", index_folder, "--max-tokens", 8)
    done = run(*asked, "--policy", "none", "--verify", "--json")
    verdict = done.json["verdict"]
    assert verdict["num_tokens"] == 8
    assert verdict["num_agreed"] < 8
    assert verdict["instead"] == run(*asked, "--plain", "--json").json["answer"]
    told = run(*asked, "--policy", "none", "--verify")
    assert f"full prefill differs from token {verdict['num_same'] + 1}, and agrees" in told.out
    assert told.out.rstrip().endswith(f"full prefill says: {verdict['instead']}".rstrip())
    same = run(*asked, "--policy", "boundary", "--ratio", 1.0, "--verify")
    assert "full prefill says the same: all 8 tokens, KL" in same.out


def test_what_cannot_be_verified(run: Run, index_folder: Path) -> None:
    asked = ("query", QUESTION, "--index", index_folder, "--verify")
    evicting = run(*asked, "--eviction", "streaming", code=1)
    assert "leave eviction out" in evicting.err
    plain = run(*asked, "--plain", code=1)
    assert "it has no use for --verify" in plain.err
