"""Catalogs of a newer kvrag, files that changed unnoticed, and a catalog set aside."""

import json
import os
import time
from pathlib import Path

import pytest

from kvrag.errors import IndexFormatError
from kvrag.ingest.contexts import filler_ids
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.regularfile import checksum


def test_an_index_of_context_corpus_goes_on_with_the_filler(
    index: Index, model: KVModel, docs: Path
) -> None:
    index.close()
    path = index.path / "index.json"
    old = {"context": "corpus", "context_tokens": 8, "corpus_filler": "Read by the harbour."}
    values = json.loads(path.read_text()) | old
    path.write_text(json.dumps(values | {"checksum": checksum(values)}))
    with Index.open(index.path, model=model) as again:
        report = again.add(docs)
        assert (len(report.added), report.num_context_tokens) == (3, 8)
        chunks = again.get_chunks([hit.chunk.chunk_id for hit in again.search("ledger", 3)])
        assert {one.contexts for one in chunks} == {(filler_ids(model.tokenizer)[-8:], ())}
        assert again.upkeep.verify().ok


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
    state = index.catalog.documents.file(str(path))
    assert state.ctime_ns
    assert len(index.add(docs).unchanged) == 3
    change_unnoticed(path, "Ines", "Vera")
    assert index.add(docs).changed == (str(path),)
    assert "Vera" in index.search("ledger", 1)[0].chunk.text


def test_a_young_change_is_not_missed(index: Index, docs: Path) -> None:
    path = docs / "ledger.txt"
    for name in ("Vera", "Ines") * 2:
        path.write_text(f"{name} keeps the harbour ledger of Varn.")
        os.utime(path, ns=(10**18, 10**18))
        index.add(docs)
        assert name in index.search("ledger", 1)[0].chunk.text


@pytest.mark.parametrize("damage", ["missing", "empty", "foreign", "short"])
def test_a_catalog_that_cannot_be_opened_is_set_aside(
    index: Index, docs: Path, model: KVModel, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    index.add(docs)
    index.close()
    path = index.path / "catalog.sqlite"
    path.unlink()
    is_aside = damage in ("foreign", "short")
    if damage != "missing":
        path.write_bytes(b"x" * {"empty": 0, "foreign": 5000, "short": 10}[damage])
    said = "damaged" if is_aside else f"is {damage}: the index in .* has lost .*'kvrag ingest PATH"
    with pytest.raises(IndexFormatError, match=said):
        Index.open(index.path, model=model)
    with Index.open(index.path, model=model, mend=True) as again:
        verified = again.upkeep.verify(repair=True)
        assert not verified.ok
        assert verified.to_dict()["not_healed"] == (
            "all documents are lost; ingest all of them again",
        )
        what = "is set aside as catalog.sqlite.damaged" if is_aside else "was missing or empty"
        assert what in verified.catalog_problems[0]
        assert "verify --repair" not in caplog.text
        assert ("set aside" in caplog.text) == is_aside
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


def test_force_parses_with_a_loader_that_is_new(index: Index, docs: Path) -> None:
    index.add(docs)
    loaders = {".txt": "tests.ingest.bad_loaders:shout"}
    assert not index.add(docs, loaders=loaders).changed
    report = index.add(docs, loaders=loaders, force=True)
    assert len(report.changed) == 2
    assert len(report.unchanged) == 1
