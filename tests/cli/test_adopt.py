"""`kvrag adopt`: another store's documents, from the command line."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run

STORE = """
from kvrag.chunk import Document
texts = [Document("a", "The fox keeps the ledger. " * 40), Document("b", "The owl counts coins.")]
def store():
    return texts
nothing = 3
def needy(place):
    return texts
def broken():
    raise RuntimeError("no such server")
def leaving():
    raise SystemExit(3)
def lacking():
    import no_such_library_of_mine
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_adopted_store.py").write_text(STORE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_adopted_store"


def test_adopt(run: Run, module: str, model_folder: Path, tmp_path: Path) -> None:
    common = ("-i", tmp_path / "i", "-m", model_folder, "--embedding", "hashing")
    dry = run("adopt", f"{module}:store", *common, "--dry-run")
    assert "would compute" in dry.out
    assert not (tmp_path / "i" / "index.json").exists()
    made = run("adopt", f"{module}:store", *common, "--json")
    assert (made.json["num_chunks"], sorted(made.json["added"])) == (2, ["a", "b"])
    again = run("adopt", f"{module}:texts", *common)
    assert "2 unchanged" in again.out
    hits = run("search", "coins", "-i", tmp_path / "i", "--sparse", "--json").json["hits"]
    assert [hit["source"] for hit in hits] == ["b"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "does not list"),
        ("absent", "no attribute"),
        ("broken", "my_adopted_store.py, line 10)"),
        ("leaving", "failed with SystemExit: 3"),
        ("lacking", "No module named 'no_such_library_of_mine'"),
        ("needy", "called without arguments: missing a required argument: 'place'"),
    ],
)
def test_what_lists_nothing(run: Run, module: str, tmp_path: Path, name: str, why: str) -> None:
    done = run("adopt", f"{module}:{name}", "-i", tmp_path / "i", "-m", "kvrag-tiny", code=1)
    assert why in " ".join(done.err.split())
    assert "report it" not in done.err
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def store(:\n", "failed with SyntaxError: invalid syntax"),
        ("\nraise OSError(5)", "failed with OSError: 5"),
        ("import sys\nsys.exit(3)", "failed with SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("command", ["adopt", "search fox --embedding"])
def test_a_module_that_fails_is_named_with_its_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, text: str, why: str
) -> None:
    (tmp_path / "my_broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    done = run(*command.split(), "my_broken_module:store", "-i", tmp_path / "i", code=1)
    assert why in " ".join(done.err.split())
    assert f"my_broken_module.py, line {len(text.splitlines())}" in done.err
    assert "report it" not in done.err
