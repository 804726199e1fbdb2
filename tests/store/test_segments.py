"""Records that kvrag 0.2 packed into segments: read as before, and unpacked by the first `gc`."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag_testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support import folders
from tests.support.folders import file_path, files_under, pack, segment_path

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
}


class TestPackedRecords(StoreContract):
    """A folder whose first records 0.2 wrote."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "records")

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        store.delete(key)
        folder = Path(store.url.removeprefix("file:"))
        pack(folder, {key: record}, number=77)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        return folders.peek(Path(store.url.removeprefix("file:")), key)


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


def test_they_are_unpacked_when_garbage_is_collected(folder: Path) -> None:
    with closing(FileStore(folder)) as store:
        opened = store.open(KEYS[3])
        assert opened is not None
        store.delete(KEYS[0])
        store.replace(KEYS[1], b"another")
        assert dict(store.sizes()) == dict.fromkeys(KEYS[2:], 1000) | {KEYS[1]: 7}
        assert store.collect_garbage() == 0
        assert read_all(opened) == record_of(KEYS[3])
        assert store.collect_garbage() == 0
        assert stored(store, KEYS[1]) == b"another"
        for key in KEYS[2:]:
            assert stored(store, key) == record_of(key) == folders.peek(folder, key)
    assert files_under(folder) == sorted(f"{key.digest[:2]}/{key}.kv" for key in KEYS[1:])
    assert not (folder / "segments").exists()


def test_a_process_killed_while_it_unpacks_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"fsync": os.fsync, "unlink": Path.unlink}
    num_killed = 0
    while (folder / "records.sqlite").exists():
        left = num_killed % 5

        def die_at(name: str, *arguments: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return steps[name](*arguments)

        with monkeypatch.context() as patch, closing(FileStore(folder)) as store:
            patch.setattr(os, "fsync", partial(die_at, "fsync"))
            patch.setattr(Path, "unlink", lambda path, **_: die_at("unlink", path))
            with contextlib.suppress(KeyboardInterrupt):
                store.collect_garbage()
        num_killed += 1
        assert num_found(folder) == 10
    assert num_killed > 5
    with closing(FileStore(folder)) as store:
        store.collect_garbage(0.0)
    assert num_found(folder) == 10
    assert len(files_under(folder)) == 10


def test_an_old_record_does_not_come_over_its_replacement(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process unpacks while this one replaces."""
    write = FileStore._write
    with closing(FileStore(folder)) as store, closing(FileStore(folder)) as other:

        def write_late(self: FileStore, key: ChunkKey, record: bytes) -> None:
            write(self, key, record)
            if self is store and record == b"new":
                file_path(folder, key).unlink()  # it had looked before
                monkeypatch.setattr(FileStore, "_write", write)
                other.collect_garbage()

        monkeypatch.setattr(FileStore, "_write", write_late)
        store.replace(KEYS[0], b"new")
        assert stored(store, KEYS[0]) == b"new"


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
    assert num_found(folder) == 10
    with closing(FileStore(folder)) as store:
        store.collect_garbage()
        store.collect_garbage()
    assert num_found(folder) == 10
    if damage == "garbage":
        assert (folder / "records.sqlite.damaged").exists()


def test_places_beyond_the_file(folder: Path) -> None:
    for column, value in (("size", 1 << 32), ("offset", 1 << 40), ("offset", -64)):
        with closing(sqlite3.connect(folder / "records.sqlite")) as connection, connection:
            before = connection.execute(f"SELECT key, {column} FROM records").fetchall()
            connection.execute(f"UPDATE records SET {column} = ?", (value,))
        with closing(FileStore(folder)) as store:
            with pytest.raises(RecordError, match="the file was cut short"):
                store.open(KEYS[0])
            assert not store.contains(KEYS[0])
        with closing(sqlite3.connect(folder / "records.sqlite")) as connection, connection:
            for key, old in before:
                connection.execute(f"UPDATE records SET {column} = ? WHERE key = ?", (old, key))
    assert num_found(folder) == 10


def test_an_index_of_a_later_version(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreError, match=r"expected schema 1, found schema 2; use the kvrag"):
        FileStore(folder)
