import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.cli.upkeep import matching_documents
from kvrag.errors import ParameterError
from kvrag.ingest.schema import DocumentRow
from tests.cli.conftest import Run


def names_in(run: Run, index: Path) -> set[str]:
    return {Path(row["source"]).name for row in run("ls", "-i", index, "--json").json}


def test_files_folders_and_patterns_are_removed(
    run: Run, index_folder: Path, documents: Path
) -> None:
    assert names_in(run, index_folder) == {"harbour.txt", "river.md", "fox.txt"}
    asked = run("rm", documents / "notes", "-i", index_folder, "--dry-run")
    assert "would remove 1 document, 1 chunk\n" in asked.out
    assert names_in(run, index_folder) == {"harbour.txt", "river.md", "fox.txt"}

    done = run("rm", documents / "notes", documents / "*.md", "-i", index_folder, "--json")
    assert [Path(one["source"]).name for one in done.json["removed"]] == ["fox.txt", "river.md"]
    assert done.json["num_chunks"] == 2
    assert names_in(run, index_folder) == {"harbour.txt"}
    # The KV goes with the next gc, the file stays and comes back.
    assert run("gc", "-i", index_folder, "--json").json["num_records"] == 2
    run("ingest", documents, "-i", index_folder)
    assert names_in(run, index_folder) == {"harbour.txt", "river.md", "fox.txt"}


def test_what_matches_nothing_is_told_its_neighbours(
    run: Run, index_folder: Path, documents: Path
) -> None:
    done = run("rm", "harbor.txt", documents / "river.md", "-i", index_folder, code=1)
    assert "error: harbor.txt: no document" in done.err
    assert "harbour.txt'" in done.err
    # What did match is gone all the same, and is said to be.
    assert "removed 1 document, 1 chunk\n" in done.out
    assert f"kvrag gc --index {index_folder}" in done.err
    assert names_in(run, index_folder) == {"harbour.txt", "fox.txt"}
    nothing = run("rm", "/", "-i", index_folder, code=1)
    assert "error: /: the root folder would mean every file; for that, write" in nothing.err
    every = run("rm", "/**", "-i", index_folder, "--dry-run")
    assert "would remove 2 documents" in every.out
    assert names_in(run, index_folder) == {"harbour.txt", "fox.txt"}


def test_a_name_begins_no_line_and_hides_nothing(
    run: Run, model_folder: Path, tmp_path: Path
) -> None:
    folder, index = tmp_path / "docs", tmp_path / "i"
    folder.mkdir()
    name = "a\nsound\u202etxt.b\x1b[2J\u200f.txt"
    (folder / name).write_text("The fox keeps the ledger.")
    run("ingest", folder, "-i", index, "-m", model_folder, "--embedding", "hashing")
    escaped = r"a\nsound\u202etxt.b\x1b[2J\u200f.txt"
    for command in (
        ("ls",),
        ("search", "fox"),
        ("query", "Who keeps the ledger?", "--max-tokens", "1"),
        ("rm", folder, "--dry-run"),
    ):
        shown = run(*command, "-i", index)
        assert escaped in "".join(shown.out.split("\n")) + shown.err, command
        for one in ("\nsound", "\u202e", "\x1b", "\u200f"):
            assert one not in shown.out + shown.err, command
    (row,) = run("ls", "-i", index, "--json").json
    assert Path(row["source"]).name == name


def matching_sources(pattern: str, sources: list[str]) -> list[str]:
    """Return the sources of matching documents: paths, rows of files, and ids that were given."""
    files = {one: re.sub(r"#\d+$", "", one) if "/" in one else None for one in sources}
    rows = [DocumentRow(one, files[one], 1, 1, 1, {}) for one in sources]
    return [row.source for row in matching_documents(pattern, rows)]


def test_a_name_is_no_pattern_before_it_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ["/d/a[1].txt", "/d/a1.txt", "/d/t.csv#1", "/d/t.csv#2", "/d/t.csv.bak", "id-7"]
    assert matching_sources("/d/a[1].txt", sources) == ["/d/a[1].txt"]
    assert matching_sources("/d/a?.txt", sources) == ["/d/a1.txt"]
    assert matching_sources("/d/t.csv", sources) == ["/d/t.csv#1", "/d/t.csv#2"]
    assert matching_sources("/d/", sources) == sources[:5]
    assert matching_sources("id-7", sources) == ["id-7"]
    assert matching_sources("id", sources) == []
    assert matching_sources("", ["/x"]) == []
    monkeypatch.chdir("/")
    assert matching_sources("d/a1.txt", sources) == ["/d/a1.txt"]
    assert matching_sources("d/*.txt", sources) == ["/d/a[1].txt", "/d/a1.txt"]


def test_a_step_up_after_a_wildcard_is_refused(
    run: Run, index_folder: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in ("*/../x.md", "d/*/../../e", "/d/?/..", "d/[a]/b/../*.md"):
        with pytest.raises(ParameterError, match=r"expected no '\.\.' after a wildcard"):
            matching_sources(pattern, ["/d/x.md", "/x.md"])
        assert matching_sources(pattern, [pattern]) == [pattern]  # the name of a document
    monkeypatch.chdir(documents / "notes")
    done = run("rm", "fox.txt", "*/../fox.txt", "-i", index_folder, code=1)
    assert "after a wildcard" in done.err
    assert len(names_in(run, index_folder)) == 3
    run("rm", "../*.md", "-i", index_folder)
    assert names_in(run, index_folder) == {"harbour.txt", "fox.txt"}


def test_wildcards_in_the_working_directorys_name_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a[1]", "a1", "b*"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("b*")
    sources = [f"{tmp_path}/{name}/x.md" for name in ("a[1]", "a1", "b*", "bc")]
    monkeypatch.chdir(tmp_path / "a[1]")
    assert matching_sources("*.md", sources) == sources[:1]
    assert matching_sources("deep/../*.md", sources) == sources[:1]
    assert matching_sources("../a1/*.md", sources) == sources[1:2]
    assert matching_sources("../link/*.md", sources) == sources[2:3]
    monkeypatch.chdir("/")
    assert matching_sources("/*/x", ["/a/x", "b/x"]) == ["/a/x"]
    assert matching_sources("*/x", ["/a/x", "b/x"]) == ["/a/x", "b/x"]


def test_a_star_stays_within_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ["/d/x.md", "/d/old/y.md", "/d/old/deep/z.md", "/e/w.md", "row 1"]
    monkeypatch.chdir("/")
    assert matching_sources("d/*.md", sources) == sources[:1]
    assert matching_sources("/d/???/y.md", sources) == sources[1:2]
    assert matching_sources("d?x.md", sources) == []
    assert matching_sources("d[/]x.md", sources) == []
    assert matching_sources("d/*/*.md", sources) == sources[1:2]
    assert matching_sources("d/**/*.md", sources) == sources[:3]
    assert matching_sources("d/**", sources) == sources[:3]
    assert matching_sources("d/**//./*.md", sources) == sources[:3]
    assert matching_sources("row *", sources) == ["row 1"]
    # Relative ones end at the working directory.
    monkeypatch.setattr("os.path.abspath", lambda path: os.path.normpath(f"/d/{path}"))
    monkeypatch.setattr("os.path.realpath", lambda path: os.path.normpath(f"/d/{path}"))
    assert matching_sources("**/*.md", sources) == sources[:3]


def test_a_damaged_document_is_not_passed_over_in_silence(
    run: Run, index_folder: Path, documents: Path
) -> None:
    with closing(sqlite3.connect(index_folder / "catalog.sqlite")) as connection:
        connection.execute("UPDATE documents SET digest = 'x' WHERE source LIKE '%fox.txt'")
        connection.commit()
    done = run("rm", documents, "-i", index_folder, code=1)
    assert "removed 2 documents" in done.out
    assert "1 damaged row of the index could not be compared" in done.err
