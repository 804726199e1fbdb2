"""The examples of the README and of docs/pml.md, run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvrag
from kvrag.pml.engine import PMLEngine

ROOT = Path(kvrag.__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the index that the README's examples open."""
    folder = tmp_path_factory.mktemp("examples")
    lease = kvrag.Document("lease", "Ines Varga signed the lease of the harbour house in 2019.")
    with kvrag.Index.create(folder / "my-index", model="kvrag-tiny", embedding="hashing") as index:
        index.add(lease)
    return folder


@pytest.mark.parametrize("number", range(3), ids=["kvrag", "langchain", "llamaindex"])
def test_readme(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks("README.md", "python")
    assert len(found) == 3
    monkeypatch.chdir(folder)
    exec(found[number], {})
    assert capsys.readouterr().out.strip()


def test_markup(folder: Path) -> None:
    schema, prompt = blocks("docs/pml.md", "xml")[:2]
    (folder / "schema.xml").write_text(schema)
    (folder / "rules.txt").write_text("Be kind. Pay cash.")
    with kvrag.Index.open(folder / "my-index") as index:
        engine = PMLEngine(kvrag.KVEngine(index))
        engine.add(folder / "schema.xml")
        engine.place(prompt)
