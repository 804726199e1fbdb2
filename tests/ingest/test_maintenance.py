"""verify, repair and gc."""

import os
import time
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.errors import RecordError
from kvrag.ingest.index import Index
from tests.ingest.conftest import stored_bytes


def test_damaged_and_missing_records_are_reported_by_chunk_and_repaired(
    index: Index, docs: Path
) -> None:
    index.add([docs, Document("copy", "Ines keeps the harbour ledger of Varn.")])
    good = stored_bytes(index)
    assert index.upkeep.verify().to_dict()["ok"]
    keys = {
        name: index.key_of(index.search(name, 1)[0].chunk) for name in ("ledger", "clock", "fox")
    }
    content = bytearray(good[keys["ledger"].digest])
    content[-100] ^= 4  # in the last layer
    index.store.replace(keys["ledger"], bytes(content))
    index.store.replace(keys["clock"], good[keys["clock"].digest][:-64])
    index.store.delete(keys["fox"])

    seen: list[tuple[int, int]] = []
    report = index.upkeep.verify(on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert not report.ok
    assert (report.num_chunks, report.num_records, report.num_repaired) == (4, 3, 0)
    assert {Path(problem.source).name for problem in report.problems} == {
        "ledger.txt",
        "copy",
        "clock.md",
        "fox.txt",
    }
    assert [p.reason for p in report.problems if "fox" in p.source] == ["missing"]

    repaired = index.upkeep.verify(repair=True)
    assert (repaired.num_repaired, len(repaired.problems)) == (3, 4)
    assert repaired.ok
    assert stored_bytes(index) == good
    assert not index.upkeep.verify().problems


def test_a_record_of_another_chunk_is_noticed(index: Index, docs: Path) -> None:
    index.add(docs)
    first, second, _ = sorted(index.store.keys())
    index.store.replace(first, stored_bytes(index)[second.digest])
    (problem,) = index.upkeep.verify().problems
    assert problem.key == first.digest
    with pytest.raises(RecordError):
        index.open_kv(problem.chunk_id)


def test_gc_removes_what_nobody_needs_and_nothing_else(index: Index, docs: Path) -> None:
    index.add(docs)
    index.search("x", 1)
    good = stored_bytes(index)
    folder = index.path / "kv" / "00"
    folder.mkdir()
    left = folder / f".{'0' * 40}.{'1' * 16}.tmp"
    left.write_bytes(b"half a record")
    (folder / "notes.txt").write_text("not ours")
    old = index.path / ".vectors.cache.0123.tmp"
    young = index.path / ".vectors.cache.4567.tmp"
    log = index.path / ".catalog.sqlite.0123.tmp-wal"
    for path in (old, log, young):
        path.write_bytes(b"x")
    for path in (old, log):
        os.utime(path, (time.time() - 9999,) * 2)
    orphan = index.coding.codec.encode(
        key := index.key_of(index.search("clock", 1)[0].chunk).__class__("ab" * 20),
        index.model.prefill((0,), [[5, 6]])[0],
    )
    index.store.put(key, orphan)
    assert index.stats().num_unreferenced_records == 1
    report = index.upkeep.gc()
    assert (report.num_records, report.size_bytes) == (1, len(orphan))
    assert report.num_temporary_files == 3
    assert young.exists()
    assert not old.exists()
    assert not log.exists()
    assert not left.exists()
    assert (folder / "notes.txt").read_text() == "not ours"
    assert stored_bytes(index) == good
    again = index.upkeep.gc()
    assert (again.num_records, again.size_bytes, again.num_temporary_files) == (0, 0, 0)
