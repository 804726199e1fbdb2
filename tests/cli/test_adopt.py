"""`kvrag adopt`: another store's documents, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

STORE = """
from kvrag.chunk import Document
texts = [Document("a", "The fox keeps the ledger. " * 40), Document("b", "The owl counts coins.")]
def store():
    return texts
nothing = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_adopted_store.py").write_text(STORE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_adopted_store"


def test_adopt(run: Run, module: str, model_folder: Path, tmp_path: Path) -> None:
    common = ("-i", tmp_path / "i", "-m", model_folder, "--embedding", "hashing")
    dry = run("adopt", f"{module}:store", *common, "--dry-run")
    assert (dry.code, "would compute" in dry.out) == (0, True), dry.err
    assert not (tmp_path / "i" / "index.json").exists()
    made = run("adopt", f"{module}:store", *common, "--json")
    assert made.code == 0, made.err
    assert (made.json["num_chunks"], sorted(made.json["added"])) == (2, ["a", "b"])
    again = run("adopt", f"{module}:texts", *common)
    assert "2 unchanged" in again.out
    hits = run("search", "coins", "-i", tmp_path / "i", "--sparse", "--json").json["hits"]
    assert [hit["source"] for hit in hits] == ["b"]


def test_adopt_refuses_what_lists_nothing(run: Run, module: str, tmp_path: Path) -> None:
    for name, why in (
        ("nothing", "does not list"),
        ("absent", "no attribute"),
        ("x.y", "expected MODULE:NAME"),
    ):
        done = run("adopt", f"{module}:{name}", "-i", tmp_path / "i", "-m", "kvrag-tiny")
        assert done.code == 1
        assert why in " ".join(done.err.split())
