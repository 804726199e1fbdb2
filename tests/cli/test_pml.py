"""`kvrag pml` and `kvrag bench pml`."""

from pathlib import Path

import pytest

from kvrag.ingest.index import Index
from tests.cli.conftest import Run

SCHEMA = """<schema name="tale">
  Tell it.
  <module name="fox">The quick brown fox jumps over the lazy dog near the old river bank.</module>
  <union>
    <module name="day">By day <parameter name="hours" length="20"/> long.</module>
    <module name="night">By night.</module>
  </union>
  <scaffold modules="fox night"/>
</schema>"""
PROMPT = "<prompt schema='tale'><fox/><day hours='two hours'/> Why?</prompt>"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    schema, prompt = tmp_path / "tale.xml", tmp_path / "prompt.xml"
    schema.write_text(SCHEMA)
    prompt.write_text(PROMPT)
    return schema, prompt


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    with Index.create(tmp_path / "index", model=model_folder, embedding="hashing"):
        return tmp_path / "index"


def test_check_says_where_modules_stand(
    run: Run, files: tuple[Path, Path], model_folder: Path
) -> None:
    schema, _ = files
    ran = run("pml", "check", schema, "--model", model_folder, "--json")
    modules = {one["path"]: one for one in ran.json["modules"]}
    assert modules["day"]["parameters"] == {"hours": 20}
    assert modules["day"]["start"] == modules["night"]["start"]
    assert ran.json["num_positions"] == modules["day"]["end"]
    assert ran.json["scaffolds"] == [["fox", "night"]]
    told = run("pml", "check", schema, "--model", model_folder).out
    assert f"{ran.json['num_positions']} positions in all" in told
    assert run("pml", "check", schema, "--json").json["num_positions"] is None


def test_check_names_the_place_of_a_mistake(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.xml").write_text("<schema name='x'>\n  <modul/></schema>")
    ran = run("pml", "check", tmp_path / "s.xml", code=1)
    assert f"{tmp_path / 's.xml'}:2:3: <modul> is not known here" in ran.err


def test_encode_then_run(run: Run, files: tuple[Path, Path], folder: Path) -> None:
    schema, prompt = files
    first = run("pml", "encode", schema, "--index", folder, "--json")
    assert first.json["num_tokens_computed"] > 40
    assert run("pml", "encode", schema, "--index", folder, "--json").json["num_records"] == 0
    arguments = ("pml", "run", prompt, "--index", folder, "--schema", schema, "--max-tokens", 3)
    ran = run(*arguments, "--json")
    report = ran.json["report"]
    assert report["num_cached"] > 20
    assert report["num_recomputed"] == 0
    assert not report["misses"]
    repaired = run(*arguments, "--policy", "deviation", "--ratio", 1, "--json").json
    assert repaired["report"]["num_recomputed"] > 10
    told = run(*arguments)
    assert "cached chunks" in told.out
    told = run("pml", "encode", schema, "--index", folder).out
    assert "passages; 0 tokens computed" in told
