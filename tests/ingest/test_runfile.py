"""The table of fingerprints on disk: read instead of made, in step with the catalog."""

import shutil
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.ingest.catalog import Texts
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex
from tests.support.folders import key_file


def text(name: str) -> str:
    return " ".join(f"The {name} of pier {n} writes the ledger." for n in range(12))


def entries(index: Index) -> list[int]:
    parts = index.run_finder.fingerprints.parts
    return sorted(int(one) for part in parts for one in part)


@pytest.fixture
def read_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows whose tokens are read from the catalog."""
    found: list[int] = []
    tokens_behind = Texts.tokens_behind

    def noting(self: Texts, row: int, most: int) -> list[tuple[int, bytes]]:
        batch = tokens_behind(self, row, most)
        found.extend(number for number, _ in batch)
        return batch

    monkeypatch.setattr(Texts, "tokens_behind", noting)
    return found


@pytest.fixture
def filled(index: Index) -> Index:
    index.add([Document(name, text(name)) for name in ("clerk", "warden", "pilot")])
    return index


def test_a_second_opening_reads_no_tokens(
    filled: Index, model: KVModel, read_rows: list[int]
) -> None:
    expected = entries(filled)
    assert expected
    assert read_rows
    read_rows.clear()
    with Index.open(filled.path, model=model) as again:
        assert entries(again) == expected
        assert not read_rows
        again.add([Document("cook", text("cook"))])
        whole = entries(again)
        assert set(whole) > set(expected)
    new = list(read_rows)
    read_rows.clear()
    with Index.open(filled.path, model=model) as again:
        assert entries(again) == whole
        assert read_rows == new  # of the new chunks only


def test_removed_chunks_leave_the_file(filled: Index, model: KVModel, read_rows: list[int]) -> None:
    entries(filled)
    size = (filled.path / "runs.cache").stat().st_size
    filled.delete(sources=["warden"])
    assert (filled.path / "runs.cache").stat().st_size < size
    read_rows.clear()
    with Index.open(filled.path, model=model) as again:
        rows = {entry & ((1 << 30) - 1) for entry in entries(again)}
        assert rows
        assert rows <= set(again.catalog.texts.marks()[0].tolist())
        assert not read_rows


def test_a_catalog_that_was_put_back_is_read_again(
    filled: Index, model: KVModel, tmp_path: Path
) -> None:
    filled.close()
    catalog = filled.path / "catalog.sqlite"
    shutil.copyfile(catalog, tmp_path / "backup")
    with Index.open(filled.path, model=model) as later:
        later.add([Document("cook", text("cook"))])
        entries(later)
    shutil.copyfile(tmp_path / "backup", catalog)
    with Index.open(filled.path, model=model) as back:
        back.add([Document("diver", text("diver"))])  # in the rows that the cook had
        back.add([Document("smith", text("smith"))])
        found = entries(back)
    (filled.path / "runs.cache").unlink()
    with Index.open(filled.path, model=model) as back:
        assert entries(back) == found


def test_mending_makes_it_again(filled: Index, model: KVModel) -> None:
    expected = entries(filled)
    with filled.catalog._lock:
        filled.catalog._connection.execute("UPDATE chunks SET token_ids = x'00' WHERE row = 1")
    (filled.path / "runs.cache").unlink()
    filled.close()
    with Index.open(filled.path, model=model) as again:
        assert entries(again) != expected
        again.upkeep.verify(repair=True)
        assert not (again.path / "runs.cache").exists()


def test_an_encrypted_catalog_has_none(make_index: MakeIndex, tmp_path: Path) -> None:
    pytest.importorskip("sqlcipher3")
    key = key_file(tmp_path / "key")
    index = make_index(store=f"file:{tmp_path / 'kv'}?key_file={key}")
    index.add([Document("clerk", text("clerk"))])
    assert entries(index)
    assert not (index.path / "runs.cache").exists()
