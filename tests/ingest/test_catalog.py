"""The catalog when its rows are damaged, and when its reader may not write."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.errors import IndexFormatError, RecordError
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.index import Index
from kvrag.ingest.rows import Change, ChunkRow

# -- damaged rows ----------------------------------------------------------------------------


def damage(index: Index, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        assert connection.execute(statement, values).rowcount == 1
        connection.commit()


@pytest.fixture
def chunk_id(index: Index) -> str:
    """Return a chunk of an index in which another one has a longer record."""
    index.add([Document("short", "Ines keeps the ledger."), Document("long", "the light " * 20)])
    (chunk_id,) = index.catalog.chunk_ids_of("short")
    return chunk_id


@pytest.mark.parametrize(
    "value",
    [
        "token_ids = x'01'",
        "token_ids = x''",
        "token_ids = 'text'",
        "token_ids = CAST(x'ffffffff' || substr(token_ids, 5) AS BLOB)",
        "token_starts = substr(token_starts, 5)",
        "token_starts = CAST(x'ffffff7f' || substr(token_starts, 5) AS BLOB)",
        "metadata = '{'",
        "metadata = '[]'",
        "ordinal = 'first'",
        "text = x'00ff'",
    ],
)
def test_a_damaged_row_is_told_as_such(index: Index, chunk_id: str, value: str) -> None:
    damage(index, f"UPDATE chunks SET {value} WHERE chunk_id = ?", chunk_id)
    for read in (
        lambda: index.get_chunks([chunk_id]),
        lambda: index.search("ledger", 2),
        lambda: index.open_kv(chunk_id),
    ):
        with pytest.raises(IndexFormatError, match="damaged"):
            read()
    (problem,) = index.verify().catalog_problems
    assert chunk_id in problem


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE chunks SET embedding = 'text' WHERE source = 'short'",
        "UPDATE chunks SET text = CAST(x'ff' AS TEXT) WHERE source = 'short'",
        "DELETE FROM state",
        "UPDATE state SET generation = 'first'",
    ],
)
def test_other_damaged_rows_are_told_as_such(index: Index, chunk_id: str, statement: str) -> None:
    damage(index, statement)
    with pytest.raises(IndexFormatError, match="damaged"):
        index.search("ledger", 2)


def test_verify_tells_of_a_text_that_cannot_be_decoded(index: Index, chunk_id: str) -> None:
    damage(index, "UPDATE chunks SET text = CAST(x'ff' AS TEXT) WHERE source = 'short'")
    report = index.verify()
    assert not report.ok
    assert "Could not decode" in report.catalog_problems[0]


def test_a_text_that_is_none_is_told_as_such(index: Index, chunk_id: str) -> None:
    matcher = index.matcher
    damage(index, "UPDATE chunks SET text = x'00' WHERE chunk_id = ?", chunk_id)
    with pytest.raises(IndexFormatError, match="a chunk's text is no text"):
        matcher.find("Context: Ines keeps the ledger.")
    index.add(Document("more", "more text"))
    with pytest.raises(IndexFormatError, match="a chunk's text is no text"):
        _ = index.matcher


def test_damaged_metadata_of_a_document_is_told_as_such(index: Index, chunk_id: str) -> None:
    damage(index, "UPDATE documents SET metadata = '{' WHERE source = 'short'")
    with pytest.raises(IndexFormatError, match="damaged"):
        index.documents()


def test_a_damaged_name_never_leads_to_other_kv(index: Index, chunk_id: str) -> None:
    (other,) = index.catalog.chunk_ids_of("long")
    for name in ("zz", index.key_of(*index.get_chunks([other])).digest):
        damage(index, "UPDATE chunks SET kv_key = ? WHERE chunk_id = ?", name, chunk_id)
        with pytest.raises(RecordError, match=f"names the KV '{name}', expected"):
            index.open_kv(chunk_id)
        report = index.verify()
        assert not report.ok
        assert f"names the KV '{name}'" in report.catalog_problems[0]
        assert report.num_records == 1


def test_verify_compares_the_number_of_tokens(index: Index, chunk_id: str) -> None:
    damage(index, "UPDATE chunks SET num_tokens = 3 WHERE chunk_id = ?", chunk_id)
    report = index.verify()
    assert not report.ok
    assert "of 3 tokens, expected" in report.catalog_problems[0]


def test_a_record_of_another_length_is_refused(
    index: Index, chunk_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Longer:
        num_tokens = 99

    monkeypatch.setattr(type(index.coding), "open", lambda *_: Longer())
    with pytest.raises(RecordError, match="holds 99 tokens, expected"):
        index.open_kv(chunk_id)


def test_a_repair_lets_the_next_ingestion_write_damaged_rows_anew(index: Index, docs: Path) -> None:
    index.add(docs)
    damage(index, "UPDATE chunks SET token_ids = x'01' WHERE source = ?", str(docs / "ledger.txt"))
    assert index.add(docs).unchanged
    assert not index.verify(repair=True).ok
    assert index.add(docs).changed == (str(docs / "ledger.txt"),)
    assert index.verify().ok


def test_a_repair_takes_the_tokens_of_a_sound_row(index: Index) -> None:
    index.add([Document("a", "the same text"), Document("b", "the same text")])
    damage(index, "UPDATE chunks SET token_ids = x'01' WHERE source = 'a'")
    index.store.delete(next(iter(index.store.keys())))
    report = index.verify(repair=True)
    assert report.num_repaired == 1
    assert {problem.source for problem in report.problems} == {"a", "b"}
    assert len(report.catalog_problems) == 1


def test_many_damaged_rows_are_counted(index: Index) -> None:
    index.add([Document(f"d{i}", f"text number {i}") for i in range(30)])
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        connection.execute("UPDATE chunks SET kv_key = 'zz'")
        connection.commit()
    *_, last = index.verify().catalog_problems
    assert last == "and 10 more chunks alike"


# -- readers who may not write ---------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a catalog in a folder that everybody may read and one may write."""
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "catalog.sqlite"
        Catalog.create(path).close()
        folder.chmod(0o755)
        path.chmod(0o644)
        yield path
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def stranger(path: Path) -> Iterator[None]:
    """Read as somebody who may not write the catalog or its folder."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        yield
    finally:
        path.parent.chmod(0o755)
        path.chmod(0o644)


WRITE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    connection.execute("BEGIN")
    connection.execute(
        "INSERT INTO documents VALUES (?, NULL, '', ?)", (f"d{number}", '"' + "x" * 3000 + '"')
    )
    connection.execute("UPDATE state SET generation = generation + 1")
    connection.execute("COMMIT")
print("written", flush=True)
if len(sys.argv) > 4:
    import os, signal
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(path: Path, first: int, end: int) -> None:
    subprocess.run(
        [sys.executable, "-c", WRITE, str(path), str(first), str(end)],
        check=True,
        capture_output=True,
    )


def test_a_reader_who_may_not_write_sees_what_others_write(shared: Path) -> None:
    write(shared, 0, 3)
    with stranger(shared):
        catalog = Catalog(shared)
        assert catalog._stamp is not None  # else this tests nothing
        assert (catalog.generation(), catalog.counts()[0]) == (3, 3)
    for end in (4, 60):  # a page more, and many
        write(shared, catalog.counts()[0], end)
        with stranger(shared):
            assert (catalog.generation(), catalog.counts()[0]) == (end, end)
            assert catalog.damage() == []
            assert catalog.digest_of(f"d{end - 1}") == ""
    # While the writer has the catalog open, and after it was killed.
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, str(shared), "60", "70", "stay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        with stranger(shared):
            assert (catalog.generation(), catalog.counts()[0]) == (70, 70)
        writer.communicate()
    with stranger(shared):
        assert (catalog.generation(), catalog.counts()[0]) == (70, 70)
    write(shared, 70, 71)
    with stranger(shared):
        assert (catalog.generation(), catalog.counts()[0]) == (71, 71)
        assert catalog.damage() == []
        catalog.close()


def test_a_read_during_a_write_is_begun_again(shared: Path) -> None:
    chunk = Chunk("c", "text", (1,), (0,), "a", 0, {})
    row = ChunkRow(chunk, [ChunkKey("ab" * 20)], np.zeros(3, dtype=np.float32))
    with contextlib.closing(Catalog(shared)) as writer:
        writer.apply(Change(put=[("a", None, "", {}, [row])]))
    with stranger(shared):
        catalog = Catalog(shared)
        assert catalog._stamp is not None
    seen: list[str] = []

    def use(chunk_id: str, _: str) -> None:
        if not seen:
            write(shared, 0, 5)
        seen.append(chunk_id)

    assert catalog.each_text(use) == 6
    assert seen == ["c", "c"]
    catalog.close()
