import json
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from kvrag.cli import console
from tests.cli.conftest import Run


@pytest.mark.parametrize("options", [[], ["--sparse"], ["--dense"]])
def test_search_shows_what_would_be_retrieved(
    run: Run, index_folder: Path, options: list[str]
) -> None:
    done = run("search", "Who keeps the harbour ledger?", "-i", index_folder, "-k", 2, *options)
    first = done.out.splitlines()[1]
    assert "harbour.txt#0" in first
    assert "Ines keeps the harbour ledger" in first


def test_search_as_json(run: Run, index_folder: Path) -> None:
    found = run("search", "the river bank", "-i", index_folder, "--sparse", "--json").json
    assert found["mode"] == "sparse"
    best = found["hits"][0]
    assert (best["rank"], Path(best["source"]).name, best["ordinal"]) == (1, "river.md", 0)
    assert best["heading"] == "The river"
    assert best["headings"] == ["The river"]
    assert best["text"].startswith("# The river")
    scores = [hit["score"] for hit in found["hits"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0


@pytest.mark.parametrize("columns", [50, 80])
def test_a_narrow_terminal_shows_rank_score_and_chunk(
    run: Run, index_folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = partial(Console, width=columns, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    done = run("search", "Who keeps the harbour ledger?", "-i", index_folder)
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= columns
    names = re.match(r" +score +chunk +", lines[0])
    assert names
    place = "".join(line[lines[0].index("chunk") : names.end()].strip() for line in lines[1:5])
    assert "harbour.txt#0" in place
    assert re.match(r"1 +[0-9.]+ ", lines[1])
    assert lines[1].endswith("…")


def test_search_that_finds_nothing(run: Run, index_folder: Path) -> None:
    done = run("search", "zyzzyva", "-i", index_folder, "--sparse")
    assert done.out == ""
    assert "nothing was found" in done.err
    assert run("search", "zyzzyva", "-i", index_folder, "--sparse", "--json").json["hits"] == []
    blank = run("search", "  ", "-i", index_folder, code=1)
    assert "the question is empty" in blank.err


@pytest.mark.parametrize("options", [[], ["--sparse"], ["--dense"]])
def test_a_filter_narrows_the_search(run: Run, index_folder: Path, options: list[str]) -> None:
    found = run("search", "the harbour ledger", "-i", index_folder, "--json").json["hits"]
    wanted = json.dumps({"source": {"$ne": found[0]["source"]}, "ordinal": {"$gte": 0}})
    common = ("search", "the river", "-i", index_folder, *options)
    hits = run(*common, "--filter", wanted, "--json").json["hits"]
    assert hits
    assert found[0]["source"] not in {hit["source"] for hit in hits}
    for text, why in (
        ("{", "not JSON"),
        ('{"a": {"$like": 1}}', "unknown operator '$like'"),
        ("3", "expected a mapping"),
        ("[" * 100_000, "not JSON"),
    ):
        done = run(*common, "--filter", text, code=2)
        assert why in " ".join(done.err.split())


def test_times_of_json_lines_are_compared(run: Run, model_folder: Path, tmp_path: Path) -> None:
    moments = ["2024-03-01 12:30", "2024-03-01T10:00", "2024-03-01T13:00+02:00", "soon"]
    rows = [{"text": f"Fox {n}.", "when": when} for n, when in enumerate(moments)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    index = ("--index", tmp_path / "index")
    settings = ("--model", model_folder, "--embedding", "hashing")
    run("ingest", tmp_path / "rows.jsonl", *index, *settings)
    for wanted, expected in (
        ({"$gte": "2024-03-01T10:30:00Z"}, ["Fox 0.", "Fox 2."]),
        ({"$lt": "2024-03-01T11:00:00"}, ["Fox 1."]),
        ("2024-03-01T12:30:00", ["Fox 0."]),
        ("2024-03-01 12:30", ["Fox 0."]),
        ("soon", ["Fox 3."]),
    ):
        hits = run(
            *("search", "fox", *index, "--filter", json.dumps({"when": wanted}), "--json")
        ).json["hits"]
        assert sorted(hit["text"].strip() for hit in hits) == expected


def test_modes_exclude_each_other(run: Run, index_folder: Path) -> None:
    for options in (("--dense", "--sparse"), ("--dense", "--rerank", "x")):
        done = run("search", "the river", "-i", index_folder, *options, code=1)
        assert "exclude each other" in done.err


def test_a_custom_embedding_is_named_by_module_and_attribute(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_vectors.py").write_text(
        "class Mine:\n"
        "    def embed_documents(self, texts):\n"
        "        return [[1.0, 0.0] if 'river' in text else [0.0, 1.0] for text in texts]\n"
        "    def embed_query(self, text):\n"
        "        return [1.0, 0.0]\n"
        "made = Mine()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    index = tmp_path / "index"
    common = ("-i", index, "--embedding")
    run("ingest", documents, *common, "my_vectors:Mine", "-m", model_folder)
    run("ingest", documents, *common, "my_vectors:made")
    for name in ("my_vectors:Mine", "my_vectors:made"):
        found = run("search", "water", *common, name, "--dense", "--json").json
        assert Path(found["hits"][0]["source"]).name == "river.md"
    without = run("search", "water", "-i", index, code=1)
    assert "--embedding MODULE:NAME" in without.err
    for name, why in (("my_vectors:other", "no attribute"), ("nowhere:x", "No module"), ("x", "")):
        refused = run("search", "water", *common, name, code=1)
        assert f"--embedding '{name}'" in refused.err
        assert why in refused.err
