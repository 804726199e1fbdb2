from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize("options", [[], ["--sparse"]])
def test_search_shows_what_would_be_retrieved(
    run: Run, index_folder: Path, options: list[str]
) -> None:
    done = run("search", "Who keeps the harbour ledger?", "-i", index_folder, "-k", 2, *options)
    assert done.code == 0, done.err
    first = done.out.splitlines()[1]
    assert "harbour.txt#0" in first
    assert "Ines keeps the harbour ledger" in first


def test_search_as_json(run: Run, index_folder: Path) -> None:
    found = run("search", "the river bank", "-i", index_folder, "--sparse", "--json").json
    assert found["mode"] == "sparse"
    best = found["hits"][0]
    assert (best["rank"], Path(best["source"]).name, best["ordinal"]) == (1, "river.md", 0)
    assert best["heading"] == "The river"
    assert best["text"].startswith("# The river")
    scores = [hit["score"] for hit in found["hits"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0


def test_search_that_finds_nothing(run: Run, index_folder: Path) -> None:
    done = run("search", "zyzzyva", "-i", index_folder, "--sparse")
    assert (done.code, done.out) == (0, "")
    assert "nothing was found" in done.err
    assert run("search", "zyzzyva", "-i", index_folder, "--sparse", "--json").json["hits"] == []
    blank = run("search", "  ", "-i", index_folder)
    assert blank.code == 1
    assert "the question is empty" in blank.err
