"""verify, repair, gc, and moves to another store: nothing lost, nothing damaged taken along."""

import os
import time
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey, Document
from kvrag.errors import ParameterError, RecordError, StoreError
from kvrag.ingest.index import Index
from kvrag.store.file import FileStore
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


# -- moves to another store ------------------------------------------------------------------------


@pytest.fixture
def filled(index: Index, docs: Path) -> Index:
    index.add([docs])
    return index


def test_records_go_to_another_folder_and_back(filled: Index, tmp_path: Path) -> None:
    before = stored_bytes(filled)
    seen: list[tuple[int, int]] = []
    report = filled.upkeep.move(
        f"file:{tmp_path / 'elsewhere'}", on_progress=lambda *progress: seen.append(progress)
    )
    assert report.num_records == len(before) == report.num_removed
    assert report.size_bytes == sum(map(len, before.values()))
    assert seen == [(number, len(before)) for number in range(len(before))]
    assert stored_bytes(filled) == before
    assert list(FileStore(filled.path / "kv").keys()) == []
    assert list((filled.path / "kv").rglob("*.kv")) == []
    assert filled.config.store

    again = Index.open(filled.path, model=filled.model)
    assert again.store.url == f"file:{tmp_path / 'elsewhere'}"
    assert again.upkeep.verify().ok
    back = again.upkeep.move(f"file:{filled.path / 'kv'}")
    assert back.num_records == len(before)
    assert back.num_removed == 0  # others may need what is elsewhere
    assert not again.config.store
    assert stored_bytes(again) == before
    again.close()


def test_what_is_damaged_or_gone_stays_behind_and_is_told(filled: Index, tmp_path: Path) -> None:
    first, second, *_ = sorted(filled.store.keys())
    filled.store.replace(first, b"x" * 500)
    filled.store.delete(second)
    report = filled.upkeep.move(f"file:{tmp_path / 'elsewhere'}")
    assert report.num_lost == 2
    assert not filled.store.contains(first)
    assert filled.upkeep.verify(repair=True).num_repaired == 2


def test_a_move_that_was_broken_off_is_completed(
    filled: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored_bytes(filled)
    put, left = FileStore.put, [1]

    def fail(store: FileStore, key: ChunkKey, record: bytes) -> None:
        if not left:
            raise StoreError("the disk is full")
        left.pop()
        put(store, key, record)

    url = f"file:{tmp_path / 'elsewhere'}"
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", fail)
        with pytest.raises(StoreError, match="full"):
            filled.upkeep.move(url)
    assert not filled.config.store
    assert stored_bytes(filled) == before
    report = filled.upkeep.move(url)
    assert (report.num_present, report.num_records) == (1, len(before) - 1)
    assert stored_bytes(filled) == before


def test_a_store_that_cannot_be_used(filled: Index, tmp_path: Path) -> None:
    before = stored_bytes(filled)
    with pytest.raises(ParameterError, match="holds no chunk"):
        filled.upkeep.move(f"file:{tmp_path / 'small'}?limit=100")
    with pytest.raises(ParameterError, match="a store is"):
        filled.upkeep.move("nowhere")
    for url in ("memory:", f"tiered:file:{tmp_path / 'disk'}|memory:?limit=1GB"):
        with pytest.raises(ParameterError, match="gone when the process ends"):
            filled.upkeep.move(url)
    assert stored_bytes(filled) == before
    assert Index.open(filled.path, model=filled.model).store.url == f"file:{filled.path / 'kv'}"


def test_a_move_to_tiers_reaches_the_last_one(filled: Index, tmp_path: Path) -> None:
    before = stored_bytes(filled)
    filled.upkeep.move(f"tiered:file:{tmp_path / 'disk'}?limit=100MB|file:{tmp_path / 'home'}")
    assert set(stored_bytes_of(tmp_path / "home")) == set(before)
    filled.close()


@pytest.mark.parametrize("way", ["link", "tiers"])
def test_the_same_folder_by_another_name_loses_nothing(
    filled: Index, tmp_path: Path, way: str
) -> None:
    before = stored_bytes(filled)
    own = filled.path / "kv"
    link = tmp_path / "link"
    link.symlink_to(own)
    url = {"link": f"file:{link}", "tiers": f"tiered:memory:|file:{own}"}
    report = filled.upkeep.move(url[way])
    assert report.num_present == len(before)
    assert report.num_removed == 0
    assert stored_bytes(filled) == before
    assert set(stored_bytes_of(own)) == set(before)
    filled.close()


def stored_bytes_of(folder: Path) -> list[str]:
    return [key.digest for key in FileStore(folder).keys()]  # noqa: SIM118 (a store is no mapping)


def test_what_is_there_already_but_damaged_is_written_anew(filled: Index, tmp_path: Path) -> None:
    before = stored_bytes(filled)
    target = FileStore(tmp_path / "elsewhere")
    first, second, *_ = sorted(filled.store.keys())
    target.put(first, b"x" * 500)
    target.put(second, before[second.digest])
    target.close()
    report = filled.upkeep.move(f"file:{tmp_path / 'elsewhere'}")
    assert (report.num_present, report.num_lost) == (1, 0)
    assert report.num_records == len(before) - 1
    assert stored_bytes(filled) == before


def test_a_move_killed_while_it_removed_is_completed(
    filled: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored_bytes(filled)
    url = f"file:{tmp_path / 'elsewhere'}"
    delete = FileStore.delete

    def killed(store: FileStore, key: ChunkKey) -> bool:
        if key.digest in before:
            raise KeyboardInterrupt
        return delete(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            filled.upkeep.move(url)
    again = Index.open(filled.path, model=filled.model)
    assert again.store.url == url
    report = again.upkeep.move(url)
    assert report.num_removed == len(before) == report.num_present
    assert stored_bytes_of(filled.path / "kv") == []
    assert stored_bytes(again) == before
    again.close()


def test_stats_take_a_file_that_another_process_removes(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add([Document("a", "The harbour ledger.")])
    stat = Path.stat

    def removed(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        if path.name == "vectors.cache":
            path.unlink()
        return found

    index.search("ledger", 1)
    assert index.stats().vectors_bytes
    monkeypatch.setattr(Path, "stat", removed)
    index.stats()
    assert not index.stats().vectors_bytes
