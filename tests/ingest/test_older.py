"""Indexes made before rows had checksums, files that changed unnoticed, and a catalog set aside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from kvrag.errors import IndexFormatError
from kvrag.ingest import plan
from kvrag.ingest.config import FORMAT_VERSION, OLDEST_VERSION
from kvrag.ingest.index import Index
from kvrag.ingest.schema import SCHEMA_VERSION
from kvrag.models.kv_model import KVModel
from tests.support.older import make_older


def test_an_older_index_gets_checksums_when_it_is_opened(
    index: Index, docs: Path, model: KVModel, caplog: pytest.LogCaptureFixture
) -> None:
    index.add(docs)
    index.search("ledger", 1)
    index.close()
    make_older(index.path)
    with Index.open(index.path, model=model) as again:
        assert "made by an older kvrag" in caplog.text
        assert again.upkeep.verify().ok
        assert len(again.add(docs).unchanged) == 3
        assert "ledger" in again.search("harbour ledger", 1)[0].chunk.text
    caplog.clear()
    with Index.open(index.path, model=model) as again:
        assert again.upkeep.verify().ok
    assert not caplog.text
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        connection.execute("UPDATE chunks SET text = 'another' WHERE source LIKE '%ledger.txt'")
        connection.commit()
    with Index.open(index.path, model=model) as again:
        assert not again.upkeep.verify().ok


def test_each_version_of_an_index_is_opened_or_refused_with_a_remedy(
    index: Index, docs: Path, model: KVModel
) -> None:
    index.add(docs)
    index.close()
    make_older(index.path)
    for version in range(1, FORMAT_VERSION + 2):
        folder = index.path.parent / f"version-{version}"
        shutil.copytree(index.path, folder)
        path = folder / "index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
        if version > FORMAT_VERSION:
            with pytest.raises(IndexFormatError, match=r"newer kvrag.*Upgrade kvrag"):
                Index.open(folder, model=model)
            continue
        # Version 5 always has a checksum: without one it is no index of that version.
        if not OLDEST_VERSION <= version < FORMAT_VERSION:
            with pytest.raises(IndexFormatError, match=r"ingest (again )?into a new"):
                Index.open(folder, model=model)
            continue
        with Index.open(folder, model=model) as opened:
            assert opened.stats().num_documents == 3
            assert "ledger" in opened.search("harbour ledger", 1)[0].chunk.text
    # The table of docs/compatibility.md.
    assert (OLDEST_VERSION, FORMAT_VERSION) == (3, 5)


def test_a_catalog_of_a_newer_kvrag_is_left_as_it_is(index: Index, docs: Path) -> None:
    index.add(docs)
    index.close()
    path = index.path / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(IndexFormatError, match=r"newer kvrag.*Upgrade kvrag"):
        Index.open(index.path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("column", ["text = 'another'", "token_ids = x'05000000'", "kv_key = 'z'"])
def test_damage_of_an_older_index_gets_no_checksum(
    index: Index, docs: Path, model: KVModel, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    index.add(docs)
    index.close()
    make_older(index.path)
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        connection.execute(f"UPDATE chunks SET {column} WHERE source LIKE '%ledger.txt'")
        connection.commit()
    with Index.open(index.path, model=model) as again:
        assert "1 chunks contradicted themselves and are left out" in caplog.text
        assert all("ledger" not in hit.chunk.source for hit in again.search("ledger", 3))
        assert again.upkeep.verify().ok
        report = again.add(docs)
        assert report.changed + report.added == (str(docs / "ledger.txt"),)
        assert "ledger" in again.search("harbour ledger", 1)[0].chunk.text
        assert again.upkeep.verify().ok


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE documents SET metadata = '{' WHERE source",
        "UPDATE documents SET metadata = '[]' WHERE source",
        "UPDATE documents SET metadata = '{\"a\": 1e999}' WHERE source",
        "UPDATE documents SET digest = x'00' WHERE source",
        "UPDATE documents SET file = x'00' WHERE source",
        "UPDATE documents SET source = x'00' WHERE source",
        "UPDATE files SET mtime_ns = 'x' WHERE path",
        "UPDATE files SET digest = x'00' WHERE path",
        "UPDATE chunks SET embedding = 'text' WHERE source",
        "UPDATE chunks SET embedding = x'010203' WHERE source",
        "UPDATE chunks SET source = x'00' WHERE source",
    ],
)
def test_an_older_index_with_a_value_that_is_none_opens_and_is_completed(
    index: Index, docs: Path, model: KVModel, statement: str
) -> None:
    index.add(docs)
    num_documents = len(index.documents())
    index.close()
    make_older(index.path)
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        assert connection.execute(f"{statement} LIKE '%ledger.txt'").rowcount == 1
        connection.commit()
    with Index.open(index.path, model=model) as again:
        assert again.upkeep.verify().ok
        assert not again.add(docs).failed
        assert "ledger" in again.search("harbour ledger", 1)[0].chunk.text
        assert again.upkeep.verify().ok
        assert len(again.documents()) == num_documents


def test_an_older_index_json_beside_a_sealed_catalog_is_refused(index: Index, docs: Path) -> None:
    index.add(docs)
    index.close()
    sealed = (index.path / "catalog.sqlite").read_bytes()
    make_older(index.path)
    (index.path / "catalog.sqlite").write_bytes(sealed)
    with pytest.raises(IndexFormatError, match=r"index\.json is older than the catalog"):
        Index.open(index.path)


def change_unnoticed(path: Path, old: str, new: str) -> None:
    """Change a file's bytes, and set back its size and times."""
    status = path.stat()
    text = path.read_text().replace(old, new)
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def test_a_file_changed_under_its_size_and_time_is_read_again(index: Index, docs: Path) -> None:
    path = docs / "ledger.txt"
    index.add(docs)
    time.sleep(0.1)
    index.add(docs)  # its state is old enough now to be believed
    state = index.catalog.file(str(path))
    assert state is not None
    assert state.ctime_ns
    assert len(index.add(docs).unchanged) == 3
    change_unnoticed(path, "Ines", "Vera")
    assert index.add(docs).changed == (str(path),)
    assert "Vera" in index.search("ledger", 1)[0].chunk.text


def test_a_young_change_is_not_missed(index: Index, docs: Path) -> None:
    path = docs / "ledger.txt"
    for name in ("Vera", "Ines") * 5:
        path.write_text(f"{name} keeps the harbour ledger of Varn.")
        os.utime(path, ns=(10**18, 10**18))
        index.add(docs)
        assert name in index.search("ledger", 1)[0].chunk.text


def test_force_reads_every_file(index: Index, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add(docs)
    time.sleep(0.1)
    index.add(docs)
    read: list[str] = []
    real = plan.read_file
    monkeypatch.setattr(
        plan, "read_file", lambda path, most: read.append(Path(path).name) or real(path, most)
    )
    assert len(index.add(docs).unchanged) == 3
    assert not {"ledger.txt", "clock.md", "fox.txt"} & set(read)
    assert len(index.add(docs, force=True).unchanged) == 3
    assert {"ledger.txt", "clock.md", "fox.txt"} <= set(read)


@pytest.mark.parametrize("damage", ["missing", "foreign", "short"])
def test_a_catalog_that_cannot_be_opened_is_set_aside(
    index: Index, docs: Path, model: KVModel, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    index.add(docs)
    index.close()
    path = index.path / "catalog.sqlite"
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"x" * (5000 if damage == "foreign" else 10))
    with pytest.raises(IndexFormatError, match=r"missing|damaged"):
        Index.open(index.path, model=model)
    with Index.open(index.path, model=model, mend=True) as again:
        verified = again.upkeep.verify(repair=True)
        assert not verified.ok
        assert verified.to_dict()["not_healed"] == (
            "all documents are lost; ingest all of them again",
        )
        what = "was missing" if damage == "missing" else "is set aside as catalog.sqlite.damaged"
        assert what in verified.catalog_problems[0]
        assert "verify --repair" not in caplog.text
        assert ("set aside" in caplog.text) == (damage != "missing")
        report = again.add(docs)
        assert "all documents were lost; ingest all the others again" in report.note
        assert not again.add(docs).note
        assert (len(report.added), report.num_records) == (3, 0)
        assert again.upkeep.verify().ok
    assert path.with_name("catalog.sqlite.damaged").exists() == (damage != "missing")


def test_a_second_catalog_set_aside_leaves_the_first(index: Index, model: KVModel) -> None:
    index.close()
    path = index.path / "catalog.sqlite"
    for content in (b"first", b"second"):
        path.write_bytes(content)
        Index.open(index.path, model=model, mend=True).close()
    assert path.with_name("catalog.sqlite.damaged").read_bytes() == b"first"
    assert path.with_name("catalog.sqlite.damaged.2").read_bytes() == b"second"


def test_an_edited_cache_of_vectors_is_not_believed(
    index: Index, docs: Path, model: KVModel
) -> None:
    import xxhash

    index.add(docs)
    expected = [hit.chunk.source for hit in index.search("ledger", 3)]
    index.close()
    path = index.path / "vectors.cache"
    content = bytearray(path.read_bytes())
    content[-4 * 384 :] = bytes(4 * 384)
    assert xxhash.xxh3_128_digest(bytes(content))
    path.write_bytes(bytes(content))
    with Index.open(index.path, model=model) as again:
        assert [hit.chunk.source for hit in again.search("ledger", 3)] == expected
    assert path.read_bytes() != bytes(content)


def test_force_parses_with_a_loader_that_is_new(index: Index, docs: Path) -> None:
    index.add(docs)
    loaders = {".txt": "tests.ingest.bad_loaders:shout"}
    assert not index.add(docs, loaders=loaders).changed
    report = index.add(docs, loaders=loaders, force=True)
    assert len(report.changed) == 2
    assert len(report.unchanged) == 1
