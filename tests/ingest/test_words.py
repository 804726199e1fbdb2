"""The index of words: in step with the chunks whatever happens to them, and never a way in."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.errors import IndexFormatError, ParameterError, StoreError
from kvrag.ingest import words
from kvrag.ingest.index import Index

FOX = "The quick brown fox jumps over the lazy dog near the old river bank."
INES = "Ines keeps the harbour ledger of Varn, and the café's too."


def found(index: Index, question: str, k: int = 4) -> list[str]:
    return [hit.chunk.source for hit in index.search_words(question, k)]


@pytest.fixture
def filled(index: Index) -> Index:
    index.add([Document("fox", FOX), Document("ines", INES)])
    return index


def change(index: Index, *statements: str) -> None:
    with sqlite3.connect(index.path / "catalog.sqlite") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_words_follow_the_chunks(filled: Index) -> None:
    assert found(filled, "harbour ledger") == ["ines"]
    filled.add([Document("ines", "Ines keeps a bakery now.")])
    assert found(filled, "harbour ledger") == []
    assert found(filled, "bakery") == ["ines"]
    filled.delete(sources=["ines"])
    assert found(filled, "bakery") == []
    (hit,) = filled.search_words("fox")
    filled.delete(chunk_ids=[hit.chunk.chunk_id])
    assert found(filled, "fox") == []
    assert filled.verify().ok


def test_the_best_comes_first_and_equals_in_order(index: Index) -> None:
    index.add(
        [
            Document("twice", "river bank, river bank"),
            Document("long", "the river is " + "very " * 20 + "long"),
            Document("same-1", "a keeper"),
            Document("same-2", "a keeper"),
            *(Document(f"other-{n}", f"nothing of that kind {n}") for n in range(9)),
        ]
    )
    assert found(index, "river bank") == ["twice", "long"]
    assert found(index, "keeper") == ["same-1", "same-2"]
    assert found(index, "keeper", 1) == ["same-1"]


@pytest.mark.parametrize(
    "question",
    [
        *('fox"', "fox OR", "fox AND NOT dog", "text:fox", "fox*", "NEAR(fox dog)", "(fox", "^fox"),
        *("fox -dog", 'fox" OR "x', "fox; DROP TABLE chunks", "{fox}", "fox\0dog", "--fox", "FOX"),
        *("fox?" * 3000, " ".join(f"w{n}" for n in range(200)) + " fox", "fox_", "'fox'"),
    ],
)
def test_no_question_is_an_expression(filled: Index, question: str) -> None:
    assert found(filled, question)[0] == "fox"


def test_accents_and_case_are_alike(filled: Index) -> None:
    assert found(filled, "CAFE") == ["ines"]
    assert found(filled, "Café") == ["ines"]


def test_a_question_without_words_finds_nothing(filled: Index) -> None:
    assert found(filled, "?! ...") == []
    with pytest.raises(ParameterError, match="the question is empty"):
        filled.search_words("  ")


def test_a_catalog_without_it_gets_it(filled: Index) -> None:
    drops = [f"DROP TRIGGER {name}" for name in words._TRIGGERS]
    change(filled, *drops, f"DROP TABLE {words.TABLE}")
    filled.add([Document("new", "A lantern.")])
    assert found(filled, "fox") == ["fox"]
    assert found(filled, "lantern") == ["new"]
    assert filled.verify().ok
    # Half of it is none: without a trigger it would fall behind.
    change(filled, f"DROP TRIGGER {words.TABLE}_added")
    filled.add([Document("newer", "A lighthouse.")])
    assert found(filled, "lighthouse") == ["newer"]


def test_what_cannot_be_written_is_searched_in_memory(filled: Index) -> None:
    drops = [f"DROP TRIGGER {name}" for name in words._TRIGGERS]
    change(filled, *drops, f"DROP TABLE {words.TABLE}", "PRAGMA wal_checkpoint(TRUNCATE)")
    path = filled.path / "catalog.sqlite"
    with_only_reading = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
    for _ in range(2):
        (first, score), *others = words.search(with_only_reading, "fox", 4)
        assert others == []
        assert score > 0
    assert filled.catalog.chunks_at([first])[first].source == "fox"
    filled.delete(sources=["fox"])
    filled.add([Document("wolf", "A wolf, no fox; a fox, no wolf.")])
    ((second, _),) = words.search(with_only_reading, "fox", 4)
    assert second != first
    with_only_reading.close()


def test_damage_is_found_and_mended(filled: Index) -> None:
    assert filled.verify().ok
    change(filled, f"DELETE FROM {words.TABLE}_data WHERE id > 10")
    report = filled.verify()
    assert not report.ok
    assert "index of words" in report.catalog_problems[0]
    assert filled.verify(repair=True).ok
    assert found(filled, "harbour") == ["ines"]

    change(filled, f"UPDATE {words.TABLE}_content SET c0 = 'nothing'")
    assert not filled.verify().ok
    assert filled.verify(repair=True).ok
    assert filled.verify().ok


def test_damage_is_no_wrong_answer(filled: Index) -> None:
    change(filled, f"UPDATE {words.TABLE}_data SET block = x'00ff00ff00ff' WHERE id >= 10")
    with pytest.raises(IndexFormatError, match="verify --repair"):
        filled.search_words("harbour")


def test_sqlite_without_full_text_search_says_so() -> None:
    class Without:
        """A connection of such a SQLite."""

        OperationalError, DatabaseError = sqlite3.OperationalError, sqlite3.DatabaseError
        in_transaction = False

        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if "fts5" in statement:
                raise sqlite3.OperationalError("no such module: fts5")
            return sqlite3.connect(":memory:").execute("SELECT 0")

    words.create(Without())  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="FTS5"):
        words.search(Without(), "fox", 4)  # type: ignore[arg-type]


def test_rare_words_count_more(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    connection.execute("CREATE TABLE chunks (row INTEGER PRIMARY KEY, text TEXT)")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO chunks VALUES (?, ?)", ((n, f"word{n % 97} word{n}") for n in range(5000))
    )
    connection.execute("COMMIT")
    words.create(connection)
    assert [row for row, _ in words.search(connection, "word4321", 3)] == [4321]
    # Those that hold the rarer word too come before those with the common one alone.
    assert words.search(connection, "word3 word100", 2)[0][0] == 100
    connection.close()
