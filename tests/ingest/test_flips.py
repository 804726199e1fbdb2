"""Flips, edits and losses in the catalog: no wrong answer, nothing stopped, all mended.

Each trial damages a copy of a small index in one place: a value of one column through SQLite, a
whole row, or bytes of a value in the file itself. Questions are then asked, the index is verified,
and it is mended, in turn by a repair and by a new ingestion.
"""

import contextlib
import json
import random
import re
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrag.chunk import Chunk
from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.support.properties import IS_EXHAUSTIVE, in_turn

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
QUESTIONS = Path(__file__).parents[2] / "examples" / "questions.json"
TOP_K = 4
COLUMNS = {
    "chunks": (
        *("row", "chunk_id", "source", "ordinal", "text", "token_ids", "token_starts"),
        *("num_tokens", "kv_key", "embedding", "metadata", "contexts", "seal", "vector_seal"),
    ),
    "documents": ("source", "file", "digest", "metadata", "num_chunks", "chunks", "seal"),
    "files": ("path", "digest", "size_bytes", "mtime_ns", "inode", "ctime_ns", "seal"),
    "state": ("generation", "num_documents", "documents", "num_files", "files", "seal"),
    "other_keys": ("row", "place", "kv_key"),
}
_OF_INDEX = re.compile("missing from index|entries in index|rowid .* out of order|^\\*\\*\\*")
PLACES = [(table, column) for table, columns in COLUMNS.items() for column in columns]


@dataclass
class World:
    """An index without damage, and what is right."""

    folder: Path
    docs: Path
    model: KVModel
    chunks: dict[str, Chunk]
    questions: list[str]
    answers: dict[tuple[str, ...], set[str]]

    def right_answers(self, engine: KVEngine, prompt: str, key: tuple[str, ...]) -> set[str]:
        """Return what the index without damage, and full prefill, answer to a prompt."""
        if key not in self.answers:
            self.answers[key] = {
                engine.generate(prompt, max_tokens=12).text,
                engine.generate(prompt, max_tokens=12, reuse=False).text,
            }
        return self.answers[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, KVEngine]]:
    base = tmp_path_factory.mktemp("flips")
    docs = base / "docs"
    docs.mkdir()
    for path in sorted(DOCUMENTS.iterdir())[:5]:
        shutil.copy(path, docs)
    (docs / "rows.jsonl").write_text('{"text": "Nobody reads the tenth ledger."}\n"Rain."\n')
    model = KVModel.load("kvrag-tiny")
    with Index.create(
        base / "index", model=model, embedding="hashing", chunk_tokens=32, context="neighbours"
    ) as index:
        assert index.add(docs).ok
        ids = [i for row in index.documents() for i in index.catalog.chunk_ids_of(row.source)]
        chunks = {chunk.chunk_id: chunk for chunk in index.get_chunks(ids)}
        assert any(len(chunk.contexts) > 1 for chunk in chunks.values())
        asked = json.loads(QUESTIONS.read_text())
        known = " ".join(chunk.text for chunk in chunks.values())
        questions = [one["question"] for one in asked if one["answers"][0] in known][:4]
        index.search(questions[0], TOP_K)  # writes the vectors' cache
    # Closed, so that all of it is in the files themselves.
    copied = base / "pristine"
    shutil.copytree(index.path, copied)
    with Index.open(base / "index", model=model) as index:
        yield World(copied, docs, model, chunks, questions, {}), KVEngine(index)


def content_of(path: Path) -> list[list[Any]] | None:
    """Return all that the tables hold, None where it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            if connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                return None
            # A number of place only orders the rows of a chunk.
            names = "SELECT row, kv_key FROM other_keys ORDER BY row, place"
            return [
                connection.execute(
                    names if table == "other_keys" else f"SELECT {', '.join(columns)} FROM {table}"
                ).fetchall()
                for table, columns in COLUMNS.items()
            ]
    except sqlite3.DatabaseError:
        return None


def flipped(chance: random.Random, value: Any) -> Any:
    """Return a value with one bit flipped, or another that an edit could leave."""
    if isinstance(value, int):
        return chance.choice([value ^ (1 << chance.randrange(40)), 0, -1, "text", 1 << 60])
    if value is None:
        return "/etc/hostname"
    content = bytearray(value.encode() if isinstance(value, str) else value)
    kind = chance.randrange(6) if content else 5
    if kind < 3:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == 3:
        content = bytearray(len(content))
    elif kind == 4:
        content = content[: len(content) // 2]
    else:
        content += b"\x00\x00\xc0\x7f"  # NaN, in a vector
    return bytes(content)


def damage(path: Path, chance: random.Random, place: tuple[str, str]) -> str:
    """Damage a catalog in one place; say how."""
    table, column = place
    key = {"documents": "source", "files": "path", "state": "rowid"}.get(table, "row")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        values = connection.execute(f"SELECT {key}, {column} FROM {table}").fetchall()
        number, value = chance.choice(values)
        cast = "CAST(? AS TEXT)" if isinstance(value, str) else "?"  # valid or not
        update = f"UPDATE {table} SET {column} = {cast} WHERE {key} = ?"
        way = chance.randrange(8)
        if way == 0:
            connection.execute(f"DELETE FROM {table} WHERE {key} = ?", (number,))
            return f"row {number!r} of {table} deleted"
        if way < 6 or not isinstance(value, str | bytes) or len(value) < 4:
            new = chance.choice(values)[1] if way == 2 else flipped(chance, value)
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(update, (new, number))
            return f"{table}.{column} of {number!r}: {value!r:.60} to {new!r:.60}"
    content = bytearray(path.read_bytes())
    sought = value.encode() if isinstance(value, str) else value
    starts = [at for at in range(len(content)) if content.startswith(sought, at)]
    if starts:
        content[chance.choice(starts) + chance.randrange(len(sought))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    return f"byte of {table}.{column} of {number!r} in the file"


def prompt_of(question: str, chunks: list[Chunk]) -> str:
    return "\n".join(["Context:", *(chunk.text for chunk in chunks), f"Question: {question}"])


def check_answers(world: World, engine: KVEngine, index: Index, question: str, told: str) -> None:
    """Ask with what is retrieved, which must be right, and with what would have been."""
    hits = index.search_dense(question, TOP_K)
    for hit in hits:
        assert hit.chunk == world.chunks[hit.chunk.chunk_id], told
    found = [hit.chunk for hit in hits]
    whole = [hit.chunk for hit in engine.index.search_dense(question, TOP_K)]
    damaged = KVEngine(index)
    for chunks in (found, whole):
        prompt = prompt_of(question, chunks)
        key = (question, *(chunk.chunk_id for chunk in chunks))
        answer = damaged.generate(prompt, max_tokens=12)
        assert answer.text in world.right_answers(engine, prompt, key), told


def check_mending(
    world: World, engine: KVEngine, folder: Path, question: str, by_ingesting: bool, told: str
) -> None:
    with Index.open(folder, model=world.model) as index:
        if not by_ingesting:
            assert index.upkeep.verify(repair=True).catalog_problems, told
        # What is lost whole, only its files know.
        added = index.add(world.docs)
        assert added.ok, told
        assert not by_ingesting or added.changed or added.added or added.note, told
        after = index.upkeep.verify()
        assert after.ok, (told, after)
        assert not index.add(world.docs, dry_run=True).changed, told
        assert index.documents() == engine.index.documents()
        assert index.stats().num_tokens == engine.index.stats().num_tokens
        ids = [i for row in index.documents() for i in index.catalog.chunk_ids_of(row.source)]
        assert {chunk.chunk_id: chunk for chunk in index.get_chunks(ids)} == world.chunks, told
        expected = [hit.chunk.chunk_id for hit in engine.index.search(question, TOP_K)]
        assert [hit.chunk.chunk_id for hit in index.search(question, TOP_K)] == expected, told


def trial(world: World, engine: KVEngine, folder: Path, number: int) -> bool:
    """Damage a copy, ask, verify, mend; return whether the damage had an effect."""
    chance = random.Random(number)
    shutil.copytree(world.folder, folder)
    path = folder / "catalog.sqlite"
    if number % 3 == 0:
        (folder / "vectors.cache").unlink()
    before = content_of(path)
    told = damage(path, chance, PLACES[number % len(PLACES)])
    if content_of(path) == before:
        return False
    question = world.questions[number % len(world.questions)]
    with Index.open(folder, model=world.model) as index:
        check_answers(world, engine, index, question, told)
        report = index.upkeep.verify()
        assert report.catalog_problems, told
        assert not report.ok, told
    # Where rows are sound and SQLite's index of them alone is not, ingestion need not come upon it.
    is_of_index = all(_OF_INDEX.search(problem) for problem in report.catalog_problems)
    by_ingesting = number % 2 == 0 and not is_of_index
    told += f": {report.catalog_problems}"
    check_mending(world, engine, folder, question, by_ingesting, told)
    return True


def test_flips_in_the_catalog(world: tuple[World, KVEngine], tmp_path: Path) -> None:
    """One for each seventh column, or many everywhere."""
    numbers = range(1000, 2400) if IS_EXHAUSTIVE else range(0, len(PLACES), 7)
    num_effective = 0
    for number in numbers:
        num_effective += trial(*world, tmp_path / str(number), number)
        shutil.rmtree(tmp_path / str(number))
    assert num_effective >= len(numbers) // 2


LOST = [
    *(f"DROP TABLE {name}" for name in COLUMNS),
    "DROP TABLE documents; DROP TABLE chunks; DROP TABLE other_keys",
    *(f"DROP INDEX {name}" for name in ("chunks_by_key", "chunks_by_source", "other_keys_by_key")),
    "ALTER TABLE chunks DROP COLUMN vector_seal",
    "ALTER TABLE files RENAME COLUMN digest TO other",
]
NUMBERS = ["9223372036854775807", "-1", "'zzz'", "x'00'", "1e308", "7", "CAST(x'ff' AS TEXT)"]
TOKENS = [f"UPDATE chunks SET num_tokens = {number} WHERE row = 1" for number in NUMBERS]


@pytest.mark.parametrize(("statements", "by_ingesting"), in_turn([*LOST, *TOKENS]))
def test_lost_tables_and_numbers_of_tokens(
    world: tuple[World, KVEngine], tmp_path: Path, statements: str, by_ingesting: bool
) -> None:
    right, engine = world
    folder, question = tmp_path / "index", right.questions[0]
    shutil.copytree(right.folder, folder)
    with contextlib.closing(sqlite3.connect(folder / "catalog.sqlite")) as connection:
        connection.executescript(f"PRAGMA foreign_keys = OFF; {statements}")
    with Index.open(folder, model=right.model) as index:
        index.search(question, TOP_K)
        found, sound = index.documents(), engine.index.documents()
        if statements in TOKENS:  # the chunk's tokens are not counted
            (chunk,) = engine.index.catalog.chunks_at([1]).values()
            lost = [
                whole.num_tokens - part.num_tokens for whole, part in zip(sound, found, strict=True)
            ]
            assert {*lost} == {0, len(chunk.token_ids)}
            assert engine.index.stats().num_tokens - index.stats().num_tokens == sum(lost)
        assert not index.upkeep.verify().ok
    if not (by_ingesting and "INDEX" in statements):  # no row is damaged then
        check_mending(right, engine, folder, question, by_ingesting, statements)
