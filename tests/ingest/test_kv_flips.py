"""Damage to the list of stored records: no wrong answer, nothing stopped, all mended."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.support.folders import pack_all
from tests.support.properties import in_turn

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
QUESTION = "When was the mill built?"
ONE = "key = (SELECT MIN(key) FROM records)"
EDITS = [
    f"UPDATE records SET size = 1 << 40 WHERE {ONE}",
    f"UPDATE records SET key = x'00' WHERE {ONE}",
    "DROP TABLE records",
    "garbage",
    "pipe",
    "segment is a pipe",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, KVModel, set[str]]:
    base = tmp_path_factory.mktemp("kvflips")
    docs = base / "docs"
    docs.mkdir()
    for path in sorted(DOCUMENTS.iterdir())[:2]:
        shutil.copy(path, docs)
    model = KVModel.load("kvrag-tiny")
    with Index.create(base / "index", model=model, embedding="hashing", chunk_tokens=64) as index:
        assert index.add(docs).ok
        answers = {ask(index), ask(index, reuse=False)}
    pack_all(base / "index" / "kv")
    return base / "index", docs, model, answers


def ask(index: Index, reuse: bool = True) -> str:
    texts = [hit.chunk.text for hit in index.search(QUESTION, 3)]
    prompt = "\n".join([*texts, QUESTION])
    return KVEngine(index).generate(prompt, max_tokens=8, reuse=reuse).text


def damage(folder: Path, edit: str) -> None:
    path = folder / "kv" / "records.sqlite"
    if edit == "garbage":
        path.write_bytes(os.urandom(path.stat().st_size))
    elif edit == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif edit == "segment is a pipe":
        segment = folder / "kv" / "segments" / "00000001.seg"
        segment.unlink()
        os.mkfifo(segment)
    else:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(f"PRAGMA foreign_keys = OFF; {edit}")


@pytest.mark.parametrize(("edit", "by_ingesting"), in_turn(EDITS))
def test_damage_to_the_list_of_records(
    world: tuple[Path, Path, KVModel, set[str]], tmp_path: Path, edit: str, by_ingesting: bool
) -> None:
    whole, docs, model, answers = world
    folder = tmp_path / "index"
    shutil.copytree(whole, folder)
    more = tmp_path / "more.txt"
    more.write_text("The mill was built by nobody in particular.")
    damage(folder, edit)
    with Index.open(folder, model=model) as index:
        assert ask(index) in answers
        assert index.stats().num_documents == 2
        report = index.upkeep.verify()
        assert not report.ok
        assert report.problems
    with Index.open(folder, model=model) as index:
        if by_ingesting:
            assert index.add([docs, more]).ok
            # The records of unchanged documents are not looked at.
            assert index.upkeep.verify(repair=True).problems == report.problems
        else:
            assert index.upkeep.verify(repair=True).ok
            assert index.add([docs, more]).ok
        index.upkeep.gc()
        assert not (folder / "kv" / "records.sqlite").exists()
        after = index.upkeep.verify()
        assert after.ok, after
        assert ask(index)
