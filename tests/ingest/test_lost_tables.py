"""Lost tables, columns and indexes of the catalog, and damaged numbers of tokens."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.support.properties import in_turn

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
QUESTION = "When was the mill built?"
TABLES = ("state", "files", "documents", "chunks", "other_keys")
LOST = [
    *(f"DROP TABLE {name}" for name in TABLES),
    "DROP TABLE documents; DROP TABLE chunks; DROP TABLE other_keys",
    *(f"DROP INDEX {name}" for name in ("chunks_by_key", "chunks_by_source", "other_keys_by_key")),
    "ALTER TABLE chunks DROP COLUMN vector_seal",
    "ALTER TABLE files RENAME COLUMN digest TO other",
]
NUMBERS = ["9223372036854775807", "-1", "'zzz'", "x'00'", "1e308", "7", "CAST(x'ff' AS TEXT)"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, KVModel]:
    base = tmp_path_factory.mktemp("lost")
    docs = base / "docs"
    docs.mkdir()
    for path in sorted(DOCUMENTS.iterdir())[:2]:
        shutil.copy(path, docs)
    model = KVModel.load("kvrag-tiny")
    with Index.create(
        base / "index", model=model, embedding="hashing", chunk_tokens=64, context="neighbours"
    ) as index:
        assert index.add(docs).ok
    return base / "index", docs, model


def damaged(world: tuple[Path, Path, KVModel], tmp_path: Path, statements: str) -> Path:
    folder = tmp_path / "index"
    shutil.copytree(world[0], folder)
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as connection:
        connection.executescript(f"PRAGMA foreign_keys = OFF; {statements}")
    return folder


def check_mending(world: tuple[Path, Path, KVModel], folder: Path, by_ingesting: bool) -> None:
    whole, docs, model = world
    with Index.open(folder, model=model) as index:
        if by_ingesting:
            assert index.add(docs).ok
        else:
            report = index.upkeep.verify(repair=True)
            assert report.catalog_problems
            index.add(docs)  # what is lost whole, only its files know
    with Index.open(folder, model=model) as index, Index.open(whole, model=model) as sound:
        report = index.upkeep.verify()
        assert report.ok, report
        assert index.documents() == sound.documents()
        assert index.stats().num_tokens == sound.stats().num_tokens
        assert index.search(QUESTION, 3) == sound.search(QUESTION, 3)


@pytest.mark.parametrize(("statements", "by_ingesting"), in_turn(LOST))
def test_a_lost_table(
    world: tuple[Path, Path, KVModel], tmp_path: Path, statements: str, by_ingesting: bool
) -> None:
    folder = damaged(world, tmp_path, statements)
    with Index.open(folder, model=world[2]) as index:
        index.search(QUESTION, 3)
        index.documents()
        index.stats()
        assert not index.upkeep.verify().ok
    if by_ingesting and "INDEX" in statements:
        return  # no row is damaged, so that ingestion need not come upon it
    check_mending(world, folder, by_ingesting)


@pytest.mark.parametrize(("number", "by_ingesting"), in_turn(NUMBERS))
def test_a_damaged_number_of_tokens(
    world: tuple[Path, Path, KVModel], tmp_path: Path, number: str, by_ingesting: bool
) -> None:
    folder = damaged(world, tmp_path, f"UPDATE chunks SET num_tokens = {number} WHERE row = 1")
    with Index.open(folder, model=world[2]) as index, Index.open(world[0]) as sound:
        # The chunk's tokens are not counted.
        sizes = [len(one.token_ids) for one in sound.catalog.chunks_at([1]).values()]
        assert index.stats().num_tokens == sound.stats().num_tokens - sizes[0]
        both = zip(sound.documents(), index.documents(), strict=True)
        lost = [whole.num_tokens - part.num_tokens for whole, part in both]
        assert sorted(lost) == [0, sizes[0]]
        assert index.counters.counts()["damaged_rows", ()]
        assert not index.upkeep.verify().ok
    check_mending(world, folder, by_ingesting)
