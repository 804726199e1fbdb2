"""The commands over a shared index, by its URL."""

from pathlib import Path

import pytest

from tests.cli.conftest import TEXTS, Run


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / "views"))
    return f"file://{tmp_path}/bucket/index"


def test_from_ingest_to_gc(
    run: Run, url: str, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = run("ls", "--index", url, code=1)
    assert f"there is no index at {url}" in missing.err
    made = ("--model", "kvrag-tiny", "--embedding", "hashing")
    run("ingest", documents, "--index", url, *made)
    # Another machine.
    monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / "other"))
    listed = run("ls", "--index", url, "--json")
    assert len(listed.json) == len(TEXTS)
    found = run("search", "harbour ledger", "--index", url, "--json")
    assert "harbour.txt" in found.out
    run("query", "Who keeps the ledger?", "--index", url, "--max-tokens", "2", "--json")
    assert run("verify", "--index", url).out.endswith("sound\n")
    removed = run("rm", documents / "notes" / "fox.txt", "--index", url)
    assert f"kvrag gc --index {url}" in removed.err
    assert "deleted: 0 records" in run("gc", "--index", url).out
    assert "deleted: 1 record " in run("gc", "--index", url, "--grace", "0").out
    monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / "views"))
    assert len(run("ls", "--index", url, "--json").json) == len(TEXTS) - 1
    assert run("verify", "--index", url).out.endswith("sound\n")
