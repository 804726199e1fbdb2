"""`kvrag bench store`, small."""

from contextlib import closing
from pathlib import Path

import pytest

from kvrag.store.file import FileStore
from kvrag_bench.store import crash
from kvrag_bench.store.contents import content_of, key_of
from kvrag_bench.store.crash import measure_crashes
from kvrag_bench.store.reads import measure_readers, measure_reads
from kvrag_bench.store.records import key_number, record_number
from kvrag_bench.store.soak import measure_soak
from kvrag_bench.store.victim import open_victim
from tests.cli.conftest import Run, run  # noqa: F401 (a fixture)


def say(_: str) -> None:
    pass


def test_reads(tmp_path: Path) -> None:
    row = measure_reads(f"file:{tmp_path / 'kv'}", tmp_path, 3, 10_000, 2)
    assert row.size_bytes == 3 * len(record_number(0, 10_000))
    assert row.checked_bytes_per_second > 0
    assert row.share == pytest.approx(
        row.read_bytes_per_second / row.copy_bytes_per_second, rel=0.9
    )


def test_readers_notice_wrong_bytes(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'kv'}"
    row = measure_readers(url, 4, 1000, 8, 40)
    assert (row.num_threads, row.num_reads, row.num_wrong) == (8, 40, 0)
    store = FileStore(tmp_path / "kv")
    store.replace(key_number(1), bytes(len(record_number(1, 1000))))
    store.replace(key_number(2), b"short")
    assert measure_readers(url, 4, 1000, 8, 40).num_wrong == 20


def test_crashes(tmp_path: Path) -> None:
    rows = measure_crashes(tmp_path, 6, 1, say)
    assert [row.kind for row in rows] == ["ingest", "write-behind", "eviction"]
    for row in rows:
        assert row.num_kills == 2
        found = (row.num_not_opened, row.num_wrong, row.num_lost, row.num_beyond)
        assert found == (0, 0, 0, 0)


def test_what_a_crash_spoils_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is gone, and one with other bytes, behind the backs of the victims."""

    def kill_one(kind: str, folder: Path, *_: object) -> list[int]:
        with closing(open_victim(kind, folder)) as store:
            for number in (1, 2):
                store.put(key_of(number), content_of(1))
        return [1, 2, 3]

    monkeypatch.setattr(crash, "_kill_one", kill_one)
    rows = measure_crashes(tmp_path, 3, 1, say)
    assert [(row.num_wrong, row.num_lost) for row in rows] == [(1, 1), (1, 1), (1, 0)]


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    row = measure_soak(tmp_path, 10, say)
    assert row.num_misses == 0
    assert row.num_files_growth < 10
    assert sum(row.hits.values()) >= 30


def test_command_line(run: Run, tmp_path: Path) -> None:  # noqa: F811
    options = ("--records", "2", "--layer-bytes", "1000", "--rounds", "1", "--threads", "4")
    done = run("bench", "store", "--parts", "reads,readers", *options, "--json")
    assert done.json["readers"]["num_wrong"] == 0
    assert done.json["reads"]["num_records"] == 2
    kept = f"file:{tmp_path / 'kept'}"
    told = run("bench", "store", "--parts", "readers", *options, "--store", kept)
    assert kept in told.out
    assert len(list(FileStore(tmp_path / "kept").keys())) == 2
    refused = run("bench", "store", "--folder", str(tmp_path / "none"), code=1)
    assert "expected a folder that exists" in refused.err
    refused = run("bench", "store", "--parts", "reads,all", code=1)
    assert "--parts 'all': expected reads, readers, million, crash, soak" in refused.err
