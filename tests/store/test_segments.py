"""Records that kvrag 0.2 packed into segments: unpacked when their folder is opened."""

import contextlib
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.sqlitefile import connect
from kvrag.store.file import FileStore
from kvrag_testing.store_contract import key_number, record_of, stored
from tests.support import folders
from tests.support.folders import files_under, pack, segment_path
from tests.support.waiting import wait_until

KEYS = [key_number(number) for number in range(10)]
RECORDS = {key: record_of(key) for key in KEYS}
# What happens to `records.sqlite`, and how many of its records are still found.
DAMAGE = {
    "DELETE FROM records WHERE size > 0": 0,
    "DROP TABLE records": 0,
    "PRAGMA application_id = 7": 0,
    "UPDATE records SET size = 'x'": 0,
    "UPDATE records SET key = substr(key, 2)": 0,
    "UPDATE records SET segment = 'x'": 0,
    "UPDATE records SET segment = 77": 0,
    "DROP TABLE segments": 10,
    "UPDATE segments SET end = 'x'": 10,
    "garbage": 0,
    "empty": 0,
    "cut": 0,
    "pipe": 0,
    "folder": 0,
    "segment is a pipe": 0,
    "segment is cut": 4,
    "UPDATE records SET size = 4294967296 WHERE segment = 1": 4,
    "UPDATE records SET offset = 1099511627776 WHERE segment = 1": 4,
    "UPDATE records SET offset = -64 WHERE segment = 1": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pack(tmp_path, dict(list(RECORDS.items())[:6]), 1)
    pack(tmp_path, dict(list(RECORDS.items())[6:]), 2)
    return tmp_path


def num_found(folder: Path) -> int:
    """Return how many records are found; each of them must be whole."""
    num_whole = 0
    with closing(FileStore(folder)) as store:
        for key in KEYS:
            try:
                found = stored(store, key)
            except RecordError:
                continue
            assert found in (None, record_of(key))
            num_whole += found is not None
    return num_whole


def test_they_are_unpacked_when_the_folder_is_opened(folder: Path) -> None:
    with closing(FileStore(folder)) as store:
        assert dict(store.sizes()) == dict.fromkeys(KEYS, 1000)
        for key in KEYS:
            assert stored(store, key) == record_of(key) == folders.peek(folder, key)
    assert files_under(folder) == sorted(f"{key.digest[:2]}/{key}.kv" for key in KEYS)
    assert not (folder / "segments").exists()


def test_a_record_that_was_put_since_stays(folder: Path) -> None:
    folders.plant(folder, KEYS[0], b"newer")
    with closing(FileStore(folder)) as store:
        assert stored(store, KEYS[0]) == b"newer"
        assert stored(store, KEYS[1]) == record_of(KEYS[1])


def test_a_full_disk_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot write: the disk is full")

    with monkeypatch.context() as patch, closing(FileStore(folder.parent / "other")) as _:
        patch.setattr(FileStore, "replace", refuse)
        with closing(FileStore(folder)) as store:
            assert stored(store, KEYS[0]) is None
    assert "the disk is full. Until then, records of kvrag 0.2" in caplog.text
    assert num_found(folder) == 10


def test_a_process_killed_while_it_unpacks_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"fsync": os.fsync, "unlink": Path.unlink}
    num_killed = 0
    while (folder / "records.sqlite").exists():
        left = num_killed

        def die_at(name: str, *arguments: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return steps[name](*arguments)

        copy = folder.parent / f"copy-{num_killed}"
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "fsync", partial(die_at, "fsync"))
            patch.setattr(Path, "unlink", lambda path, **_: die_at("unlink", path))
            FileStore(folder)
        num_killed += 1
        shutil.copytree(folder, copy)
        assert num_found(copy) == 10
        with closing(FileStore(copy)) as store:
            store.collect_garbage(0.0)
        assert len(files_under(copy)) == 10
    assert num_killed > 5


def test_bytes_that_no_row_names_are_removed(folder: Path) -> None:
    (folder / "segments" / "00000003.seg").write_bytes(b"of a writer that was killed")
    (folder / "segments" / "mine.seg").write_bytes(b"of a user")
    assert num_found(folder) == 10
    assert files_under(folder / "segments") == ["mine.seg"]


def test_processes_that_open_the_folder_wait_for_the_one_that_unpacks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They go on when it has finished, and do not take its last step for damage."""
    write = FileStore.replace
    others = [threading.Thread(target=FileStore, args=[folder]) for _ in range(3)]

    def start_others(self: FileStore, key: ChunkKey, record: bytes) -> None:
        if len(caplog.messages) == 1:
            for other in others:
                other.start()
            wait_until(lambda: len(caplog.messages) == 4)  # they have found segments, too
            monkeypatch.setattr("kvrag.store.file.connect", pytest.fail)
        write(self, key, record)

    monkeypatch.setattr(FileStore, "replace", start_others)
    FileStore(folder)
    for other in others:
        other.join(30)
    assert num_found(folder) == 10
    assert not [one for one in caplog.messages if "get a file each, once" not in one]


def test_a_writer_of_0_2_that_does_not_end_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def connect_briefly(*arguments: Any) -> Any:
        connection, stamp = connect(*arguments)
        connection.execute("PRAGMA busy_timeout = 10")
        return connection, stamp

    monkeypatch.setattr("kvrag.store.file.connect", connect_briefly)
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        FileStore(folder)
    assert "another process has been writing for 30 seconds; try again" in caplog.text
    assert num_found(folder) == 10


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_and_never_another_record(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    index = folder / "records.sqlite"
    if damage == "garbage":
        index.write_bytes(os.urandom(index.stat().st_size))
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "cut":
        os.truncate(index, 5000)
    elif damage in ("pipe", "folder"):
        index.unlink()
        (os.mkfifo if damage == "pipe" else Path.mkdir)(index)
    elif damage == "segment is a pipe":
        for number in (1, 2):
            segment_path(folder, number).unlink()
            os.mkfifo(segment_path(folder, number))
    elif damage == "segment is cut":
        os.truncate(segment_path(folder, 1), 64)
    else:
        with closing(sqlite3.connect(index)) as connection:
            connection.executescript(f"PRAGMA foreign_keys = OFF; {damage}")
    assert num_found(folder) == DAMAGE[damage]
    assert caplog.text.count("records.sqlite is damaged") <= 1
    with closing(FileStore(folder)) as store:
        for key in KEYS:
            store.replace(key, record_of(key))
        store.collect_garbage()
    assert num_found(folder) == 10
    assert not list(folder.glob("segments/*.seg")) or damage == "segment is a pipe"
    assert not (folder / "records.sqlite").exists()
    if damage == "garbage":
        assert (folder / "records.sqlite.damaged").exists()
