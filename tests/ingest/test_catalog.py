"""The catalog when its rows are damaged, and when its reader may not write."""

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrag.chunk import Chunk, ChunkKey, Document, chunk_id_of
from kvrag.errors import IndexFormatError, IndexMismatchError, RecordError, StoreError
from kvrag.ingest import maintenance
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.catalogfile import damage_of
from kvrag.ingest.index import Index
from kvrag.ingest.maintenance import salvage
from kvrag.ingest.schema import Change, ChunkRow
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex
from tests.support.properties import in_turn

# -- damaged rows ----------------------------------------------------------------------------


def damage(index: Index, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        assert connection.execute(statement, values).rowcount
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
        "token_ids = CAST(x'05000000' || substr(token_ids, 5) AS BLOB)",
        "token_starts = zeroblob(length(token_starts))",
        "token_starts = substr(token_starts, 5)",
        "num_tokens = 3",
        "metadata = '{'",
        "metadata = '[]'",
        "metadata = '{\"a\": 1}'",
        "ordinal = 'first'",
        "ordinal = 3",
        "source = 'long'",
        "text = x'00ff'",
        "text = CAST(x'ff' AS TEXT)",
        "text = replace(text, 'ledger', 'lodger')",
        "seal = x''",
        "row = 99",
    ],
)
def test_a_damaged_chunk_is_left_out_counted_told_and_mended(
    index: Index, chunk_id: str, value: str
) -> None:
    (sound,) = index.get_chunks([chunk_id])
    damage(index, f"UPDATE chunks SET {value} WHERE chunk_id = ?", chunk_id)
    assert index.get_chunks([chunk_id]) == []
    assert [hit.chunk.source for hit in index.search("ledger", 2)] == ["long"]
    with pytest.raises(IndexFormatError, match="is not what was written"):
        index.open_kv(chunk_id)
    assert index.counters.counts()["damaged_rows", ()]
    report = index.upkeep.verify()
    assert not report.ok
    assert any(chunk_id in problem for problem in report.catalog_problems)
    report = index.add(Document("short", sound.text))
    assert report.changed + report.added == ("short",)
    assert report.note == "the catalog was damaged and has been mended"
    assert index.get_chunks([chunk_id]) == [sound]
    assert {hit.chunk.source for hit in index.search("ledger", 2)} == {"short", "long"}


@pytest.mark.parametrize(
    "value",
    [
        "'text'",
        "x''",
        "zeroblob(length(embedding))",
        "CAST(x'0000c07f' || substr(embedding, 5) AS BLOB)",
        "(SELECT embedding FROM chunks WHERE source = 'long')",
    ],
)
def test_a_damaged_vector_is_left_out_and_computed_again(
    index: Index, chunk_id: str, value: str
) -> None:
    damage(index, f"UPDATE chunks SET embedding = {value} WHERE chunk_id = ?", chunk_id)
    assert [hit.chunk.source for hit in index.search_dense("ledger", 2)] == ["long"]
    # Its words still find it.
    assert {hit.chunk.source for hit in index.search("ledger", 2)} == {"short", "long"}
    assert index.counters.counts()["damaged_rows", ()] == 1
    (problem,) = index.upkeep.verify().catalog_problems
    assert problem == f"short, chunk 0 ({chunk_id}): its vector is not what was written"
    assert index.upkeep.verify(repair=True).ok  # of its text, though there is no file
    assert index.upkeep.verify().ok
    assert index.add(Document("short", "Ines keeps the ledger.")).unchanged
    assert index.search_dense("ledger", 1)[0].chunk.source == "short"


DAMAGE = [
    ("DELETE FROM state", "the catalog's own state is not what was written"),
    ("UPDATE state SET generation = 'first'", "the catalog's own state is not what"),
    ("UPDATE state SET generation = 0", "the catalog's own state is not what was written"),
    ("UPDATE state SET num_documents = 3", "the catalog's own state is not what was"),
    ("DELETE FROM documents", "short: its entry is missing, 1 of its chunks are there"),
    ("DELETE FROM documents WHERE source = 'short'", "there were 2 documents, 1 are there"),
    ("UPDATE documents SET digest = 'x' WHERE source = 'short'", "short: its entry is not"),
    ("UPDATE documents SET metadata = '{' WHERE source = 'short'", "short: its entry is not"),
    ("UPDATE documents SET source = 'other' WHERE source = 'short'", "short: its entry is mis"),
    ("UPDATE documents SET num_chunks = 0 WHERE source = 'short'", "short: its entry is not"),
    ("DELETE FROM chunks WHERE source = 'short'", "short: it had 1 chunks, 0 are there"),
]


@pytest.mark.parametrize(("damaged", "by_ingesting"), in_turn(DAMAGE))
def test_damaged_documents_are_told_and_mended(
    index: Index, chunk_id: str, damaged: tuple[str, str], by_ingesting: bool
) -> None:
    statement, told = damaged
    documents = [Document("short", "Ines keeps the ledger."), Document("long", "the light " * 20)]
    damage(index, statement)
    with Index.open(index.path, model=index.model) as opened:
        opened.documents()
        opened.search("ledger", 2)
        assert any(told in problem for problem in opened.upkeep.verify().catalog_problems)
        if not by_ingesting:
            opened.upkeep.verify(repair=True)
            assert opened.upkeep.verify().ok
        opened.add(documents)
        assert opened.upkeep.verify().ok
        assert len(opened.search("ledger", 9)) == 2
        assert [row.num_chunks for row in opened.documents()] == [1, 1]
        assert len(opened.add(documents).unchanged) == 2


def test_a_repair_reads_documents_again_from_their_files(index: Index, docs: Path) -> None:
    index.add([docs, Document("own", "a document of its own")])
    path = str(docs / "ledger.txt")
    damage(index, "UPDATE chunks SET token_ids = x'01' WHERE source = ?", path)
    damage(index, "UPDATE chunks SET text = 'another' WHERE source = 'own'")
    assert not index.upkeep.verify().ok
    (docs / "ledger.txt").write_text("Ines has a new ledger.")
    report = index.upkeep.verify(repair=True)
    assert not report.ok
    assert report.is_healed
    assert report.not_healed == (
        "1 documents are gone with all their chunks; ingest all documents again",
    )
    assert index.upkeep.verify().ok
    assert index.search("ledger", 1)[0].chunk.text == "Ines has a new ledger."
    assert index.add(docs).unchanged
    assert index.add(Document("own", "a document of its own")).added


def test_a_damaged_file_named_like_a_row_stays(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.csv").write_text("name\nInes\nTomas\n")
    (folder / "a.csv#2.txt").write_text("The fox keeps the ledger.")
    index.add(folder)
    files = {row.source: row.file for row in index.documents()}
    path = str(folder / "a.csv#2.txt")
    damage(index, "DELETE FROM files WHERE path = ?", path)
    for source in (path, f"{folder}/a.csv#2"):
        damage(index, "UPDATE documents SET digest = 'x' WHERE source = ?", source)
    index.upkeep.verify(repair=True)
    assert {Path(row.source).name for row in index.documents()} >= {Path(one).name for one in files}
    index.add(folder)
    assert {row.source: row.file for row in index.documents() if "/" in row.source} == files
    assert index.upkeep.verify().ok


def test_an_upkeep_of_damage_keeps_what_is_sound_of_a_document(index: Index) -> None:
    text = "\n\n".join(f"Paragraph {i} of the northern light. " * 8 for i in range(6))
    index.add(Document("own", text, {"lang": "en"}))
    first, *others = index.catalog.chunk_ids_of("own")
    damage(index, "UPDATE chunks SET text = 'another' WHERE chunk_id = ?", first)
    report = index.upkeep.verify(repair=True)
    assert report.not_healed == ("own: part of it was damaged and is gone; add it again",)
    assert index.catalog.chunk_ids_of("own") == others
    assert index.documents()[0].metadata == {"lang": "en"}
    assert index.upkeep.verify().ok
    assert index.add(Document("own", text, {"lang": "en"})).changed == ("own",)
    assert index.catalog.chunk_ids_of("own") == [first, *others]


def test_gc_keeps_the_records_of_damaged_rows(index: Index, chunk_id: str) -> None:
    damage(index, "UPDATE chunks SET kv_key = 'zz' WHERE chunk_id = ?", chunk_id)
    (other,) = index.catalog.chunk_ids_of("long")
    damage(index, "UPDATE chunks SET text = 'another' WHERE chunk_id = ?", other)
    assert index.upkeep.gc().num_records == 0


def test_a_damaged_name_never_leads_to_other_kv(index: Index, chunk_id: str) -> None:
    (other,) = index.catalog.chunk_ids_of("long")
    for name in ("zz", index.key_of(*index.get_chunks([other])).digest):
        damage(index, "UPDATE chunks SET kv_key = ? WHERE chunk_id = ?", name, chunk_id)
        with pytest.raises(RecordError, match=f"names the KV '{name}', expected"):
            index.open_kv(chunk_id)
        report = index.upkeep.verify()
        assert not report.ok
        assert f"names the KV '{name}'" in report.catalog_problems[0]
        assert report.num_records == 2
    assert index.upkeep.verify(repair=True).ok
    assert index.open_kv(chunk_id) is not None


def test_a_removal_of_a_damaged_chunk_is_refused(index: Index, chunk_id: str) -> None:
    damage(index, "UPDATE chunks SET source = 'other' WHERE chunk_id = ?", chunk_id)
    with pytest.raises(IndexFormatError, match="is not what was written"):
        index.delete(chunk_ids=[chunk_id])
    index.delete(sources=["short"])


def test_many_damaged_rows_are_counted(index: Index) -> None:
    index.add([Document(f"d{i}", f"text number {i}") for i in range(30)])
    damage(index, "UPDATE chunks SET seal = x''")
    *_, last = index.upkeep.verify().catalog_problems
    assert last == "and 40 more"


def test_damage_is_said_once(index: Index, chunk_id: str, caplog: pytest.LogCaptureFixture) -> None:
    damage(index, "UPDATE chunks SET metadata = '{' WHERE chunk_id = ?", chunk_id)
    for _ in range(3):
        index.search("ledger", 2)
    (record,) = caplog.records
    assert "kvrag verify --repair" in record.getMessage()
    assert index.counters.counts()["damaged_rows", ()] == 3


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
import sys
from pathlib import Path
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.schema import Change
catalog = Catalog(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    catalog.write(Change(put=[(f"d{number}", None, "", {"x": "x" * 3000}, [])]))
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
        assert (catalog.version()[0], catalog.documents.counts()[0]) == (3, 3)
    for end in (4, 60):  # a page more, and many
        write(shared, catalog.documents.counts()[0], end)
        with stranger(shared):
            assert (catalog.version()[0], catalog.documents.counts()[0]) == (end, end)
            assert damage_of(catalog) == []
            assert catalog.documents.digest_of(f"d{end - 1}") == ""
    # While the writer has the catalog open, and after it was killed.
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, str(shared), "60", "70", "stay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout.readline() == "written\n"
        with stranger(shared):
            assert (catalog.version()[0], catalog.documents.counts()[0]) == (70, 70)
        writer.communicate()
    with stranger(shared):
        assert (catalog.version()[0], catalog.documents.counts()[0]) == (70, 70)
    write(shared, 70, 71)
    with stranger(shared):
        assert (catalog.version()[0], catalog.documents.counts()[0]) == (71, 71)
        assert damage_of(catalog) == []
        catalog.close()


def test_a_read_during_a_write_is_begun_again(shared: Path) -> None:
    chunk_id = chunk_id_of("a", 0, "text")
    chunk = Chunk(chunk_id, "text", (1,), (0,), "a", 0, {})
    row = ChunkRow(chunk, [ChunkKey("ab" * 20)], np.zeros(3, dtype=np.float32))
    with contextlib.closing(Catalog(shared)) as writer:
        writer.write(Change(put=[("a", None, "", {}, [row])]))
    with stranger(shared):
        catalog = Catalog(shared)
        assert catalog._stamp is not None
    seen: list[str] = []

    def use(chunk_id: str, _: str) -> None:
        if not seen:
            write(shared, 0, 5)
        seen.append(chunk_id)

    assert catalog.texts.each_text(use)[0] == 6
    assert seen == [chunk_id, chunk_id]
    catalog.close()


def test_an_open_index_recovers_when_its_file_is_good_again(index: Index) -> None:
    index.add([Document("a", "The harbour ledger.")])
    index.catalog._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    path = index.path / "catalog.sqlite"
    good = path.read_bytes()

    def replace(content: bytes) -> None:
        other = path.with_name("other")
        other.write_bytes(content)
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        other.replace(path)

    replace(b"garbage" * 2000)
    for _ in range(2):
        with pytest.raises(IndexFormatError, match="replaced by another file while"):
            index.search("ledger")
    replace(good)
    assert [hit.chunk.source for hit in index.search("ledger")] == ["a"]


def test_rows_behind_a_damaged_page_are_read_by_the_index(index: Index, model: KVModel) -> None:
    index.add(
        [Document(f"d{number}", f"text {number}", {"page": "x" * 3000}) for number in range(9)]
    )
    damage(index, "UPDATE chunks SET row = row + 20000000 WHERE source >= 'd6'")
    index.close()
    path = index.path / "catalog.sqlite"
    content = bytearray(path.read_bytes())
    page = content.index(b"text 4") // 4096 * 4096
    content[page : page + 8] = bytes(8)
    path.write_bytes(content)
    with Index.open(index.path, model=model) as again:
        tried = list[object]()
        rows = again.catalog.rows
        again.catalog.rows = lambda *asked: tried.append(asked) or rows(*asked)  # type: ignore
        found = [source for _, source, _ in again.catalog.scan("row, source, text")]
        assert {"d0", "d6", "d7", "d8"} <= set(found) < {f"d{number}" for number in range(9)}
        assert len(tried) < 20
        assert not again.upkeep.verify().ok
        assert "ingest all documents again" in again.upkeep.verify(repair=True).not_healed[-1]
        assert again.upkeep.verify().ok
        again.add([Document(f"d{number}", f"text {number}") for number in range(9)])
        assert len(again.search("text", 99)) == 9


def test_a_row_of_another_index_is_damage(index: Index, make_index: MakeIndex) -> None:
    index.add([Document("a", "The capital is Favuda."), Document("b", "Rain.")])
    other = make_index("other")
    other.add([Document("a", "The capital is Fevuda."), Document("b", "Rain.")])
    with contextlib.closing(sqlite3.connect(other.path / "catalog.sqlite")) as connection:
        row = connection.execute("SELECT * FROM chunks WHERE source = 'a'").fetchone()
    damage(index, "DELETE FROM chunks WHERE source = 'a'")
    damage(index, f"INSERT INTO chunks VALUES ({', '.join('?' * len(row))})", *row)
    assert "a" not in {hit.chunk.source for hit in index.search("capital")}
    assert not index.upkeep.verify().ok


def _no_vector(text: str) -> NDArray[np.float32]:
    raise AssertionError(f"no vector is damaged, and {text!r} was embedded")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("catalog*")}


def test_the_catalog_of_another_index_is_refused(
    index: Index, make_index: MakeIndex, model: KVModel
) -> None:
    other = make_index("other")
    for one, text in ((index, "The capital is Favuda."), (other, "The capital is Fevuda.")):
        one.add([Document("a", text), Document("b", "Rain.")])
        one.close()
    shutil.copy(other.path / "catalog.sqlite", index.path)
    before = files_of(index.path)
    for mend in (False, True):
        with pytest.raises(IndexMismatchError, match=r"another index than index\.json .* Move it"):
            Index.open(index.path, model=model, mend=mend)
    assert files_of(index.path) == before


def test_a_catalog_with_one_sound_row_is_the_indexs_own(index: Index, model: KVModel) -> None:
    index.add([Document("a", "The capital is Favuda."), Document("b", "Rain.")])
    damage(index, "UPDATE chunks SET text = 'another'")
    damage(index, "UPDATE state SET generation = generation + 7")
    damage(index, "UPDATE documents SET digest = 'x' WHERE source = 'a'")
    index.close()
    with Index.open(index.path, model=model) as again:
        assert not again.upkeep.verify().ok
        again.upkeep.verify(repair=True)
        assert again.upkeep.verify().ok


def test_a_second_opening_keeps_the_locks_of_the_first(index: Index, model: KVModel) -> None:
    """A process that closes any descriptor of a file ends all its locks on that file (POSIX)."""
    index.add([Document("a", "Ines keeps the ledger.")])
    Index.open(index.path, model=model).close()
    # Without a lock, this process would be the last one, and remove the log that is in use.
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('select * from documents')"
    subprocess.run([sys.executable, "-c", code, str(index.path / "catalog.sqlite")], check=True)
    assert (index.path / "catalog.sqlite-wal").exists()
    index.add([Document("b", "Tomas repairs the clock.")])
    with Index.open(index.path, model=model) as again:
        assert again.catalog.chunk_ids_of("b")


def test_a_replacement_that_was_killed_is_finished(
    index: Index, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add([Document(f"d{n}", f"The harbour ledger {n}.") for n in range(30)])
    with contextlib.closing(
        sqlite3.connect(index.path / "catalog.sqlite", isolation_level=None)
    ) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM chunks").fetchone()
        index.delete(sources=["d3"])  # stays in the log as long as it is read
        index.catalog._connection.execute("PRAGMA busy_timeout = 1")
        real, steps = Path.replace, []

        def die(path: Path, target: Path) -> Path:
            steps.append(path.name)
            if path.name.endswith(".ready"):
                assert not (index.path / "catalog.sqlite-wal").exists()
                raise KeyboardInterrupt
            return real(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", die)
            with pytest.raises(KeyboardInterrupt):
                salvage(index.catalog, _no_vector)
        assert steps[1:] == ["catalog.sqlite.next", "catalog.sqlite.ready"]
    with Index.open(index.path, model=model) as again:
        assert not (index.path / "catalog.sqlite.ready").exists()
        assert damage_of(again.catalog) == []
        assert len(again.documents()) == 29


def test_a_repair_without_room_leaves_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_BATCH", 100)
    path, key = tmp_path / "catalog.sqlite", ChunkKey("ab" * 20)
    with contextlib.closing(Catalog.create(path)) as catalog:
        catalog.config = SimpleNamespace(key_of=lambda _: key, context="none")  # type: ignore[assignment]
        for number in range(120):
            source, vector = f"d{number}", np.ones((1, 8), np.float32)
            texts = [f"{number} {place} ".ljust(3000, "x") for place in range(10)]
            chunks = [
                Chunk(chunk_id_of(source, place, text), text, (1,), (0,), source, place, {})
                for place, text in enumerate(texts)
            ]
            rows = [ChunkRow(chunk, [key], vector) for chunk in chunks]
            catalog.write(Change(put=[(source, None, "x", {}, rows)]))
        held = catalog.documents.counts()
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        outcomes = []
        for limit in range(3_800_000, 6_400_000, 500_000):
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
                salvage(catalog, _no_vector)
                outcomes.append(True)
            except StoreError:
                outcomes.append(False)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            assert catalog.documents.counts() == held
            assert damage_of(catalog) == []
            assert [one.name for one in tmp_path.iterdir() if ".tmp" in one.name] == []
    assert set(outcomes) == {True, False}
