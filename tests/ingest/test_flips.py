"""Flips and edits of stored bytes of the catalog: no wrong answer, nothing stopped, all mended.

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
from tests.support.properties import IS_EXHAUSTIVE

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
    if isinstance(value, bytes):
        return bytes(content)
    return content.decode(errors="surrogateescape").encode(errors="surrogateescape")


def damage(path: Path, chance: random.Random, place: tuple[str, str]) -> str:
    """Damage a catalog in one place; say how."""
    table, column = place
    key = {"chunks": "row", "documents": "source", "files": "path"}.get(table, "rowid")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if table == "other_keys":
            values = connection.execute("SELECT row, place, kv_key FROM other_keys").fetchall()
            key = "row"
        else:
            values = connection.execute(f"SELECT {key}, {column} FROM {table}").fetchall()
        names = ("row", "place", "kv_key") if table == "other_keys" else (key, column)
        chosen = dict(zip(names, chance.choice(values), strict=True)) if values else {}
        number, value = chosen[key], chosen[column]
        way = chance.randrange(8)
        if way == 0 and table != "other_keys":
            connection.execute(f"DELETE FROM {table} WHERE {key} = ?", (number,))
            return f"row {number!r} of {table} deleted"
        if way == 1 and chance.randrange(4) == 0:
            connection.execute(f"DELETE FROM {table}")
            return f"{table} emptied"
        if way == 2 and len(values) > 1 and table != "other_keys":
            other = chance.choice([one for one in values if one[0] != number])[1]
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(
                    f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (other, number)
                )
            return f"{table}.{column} of {number!r} has another row's"
        if way < 6 or not isinstance(value, str | bytes) or len(value) < 4:
            new = flipped(chance, value)
            # As text again, valid or not.
            cast = "CAST(? AS TEXT)" if isinstance(value, str) and isinstance(new, bytes) else "?"
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(
                    f"UPDATE {table} SET {column} = {cast} WHERE {key} = ?", (new, number)
                )
            return f"{table}.{column} of {number!r}: {value!r:.60} to {new!r:.60}"
    content = bytearray(path.read_bytes())
    sought = value.encode() if isinstance(value, str) else value
    starts = [at for at in range(len(content)) if content.startswith(sought, at)]
    if starts:
        at = chance.choice(starts) + chance.randrange(len(sought))
        content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    return f"byte of {table}.{column} of {number!r} in the file"


def prompt_of(question: str, chunks: list[Chunk]) -> str:
    return "\n".join(["Context:", *(chunk.text for chunk in chunks), f"Question: {question}"])


def trial(
    world: World, engine: KVEngine, folder: Path, number: int, caplog: pytest.LogCaptureFixture
) -> str:
    """Damage a copy, ask, verify, mend; return what was done, or "" where it had no effect."""
    chance = random.Random(number)
    shutil.copytree(world.folder, folder)
    path = folder / "catalog.sqlite"
    if number % 3 == 0:
        (folder / "vectors.cache").unlink()
    before = content_of(path)
    told = damage(path, chance, PLACES[number % len(PLACES)])
    if content_of(path) == before:
        return ""
    with Index.open(folder, model=world.model) as index:
        damaged = KVEngine(index)
        question = world.questions[number % len(world.questions)]
        # Retrieved: only what is right, and everything that is not damaged.
        hits = index.search_dense(question, TOP_K)
        for hit in hits:
            assert hit.chunk == world.chunks[hit.chunk.chunk_id], told
        found = [hit.chunk for hit in hits]
        # Asked with what is retrieved, and with what would have been.
        whole = [hit.chunk for hit in engine.index.search_dense(question, TOP_K)]
        for chunks in (found, whole):
            prompt = prompt_of(question, chunks)
            key = (question, *(chunk.chunk_id for chunk in chunks))
            right = world.right_answers(engine, prompt, key)
            answer = damaged.generate(prompt, max_tokens=12)
            assert answer.text in right, told
        report = index.upkeep.verify()
        assert not report.ok, told
        assert report.catalog_problems, told
        told += f": {report.catalog_problems}"
    # Where rows are sound and SQLite's index of them alone is not, ingestion need not come upon it.
    is_of_index = all(_OF_INDEX.search(problem) for problem in report.catalog_problems)
    mends_by_ingesting = number % 2 == 0 and not is_of_index
    with Index.open(folder, model=world.model) as index:
        if mends_by_ingesting:
            added = index.add(world.docs)
            assert added.ok, told
            assert added.changed or added.added or added.note, told
        else:
            mended = index.upkeep.verify(repair=True)
            assert mended.ok, (told, mended)
        after = index.upkeep.verify()
        assert after.ok, (told, after)
        assert not index.add(world.docs, dry_run=True).changed, told
        ids = [i for row in index.documents() for i in index.catalog.chunk_ids_of(row.source)]
        assert {chunk.chunk_id: chunk for chunk in index.get_chunks(ids)} == world.chunks, told
        expected = [hit.chunk.chunk_id for hit in engine.index.search(question, TOP_K)]
        assert [hit.chunk.chunk_id for hit in index.search(question, TOP_K)] == expected, told
        assert not index.counters.counts().get(("damaged_rows", ())) or told
    return told


def run_trials(
    world: World, engine: KVEngine, folder: Path, numbers: range, caplog: pytest.LogCaptureFixture
) -> int:
    num_effective = 0
    for number in numbers:
        place = folder / str(number)
        num_effective += bool(trial(world, engine, place, number, caplog))
        shutil.rmtree(place)
    return num_effective


def test_flips_in_the_catalog(
    world: tuple[World, KVEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One for each seventh column, or many everywhere."""
    numbers = range(1000, 2400) if IS_EXHAUSTIVE else range(0, len(PLACES), 7)
    assert run_trials(*world, tmp_path, numbers, caplog) >= len(numbers) // 2
