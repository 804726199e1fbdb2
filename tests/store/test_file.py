from __future__ import annotations

import contextlib
import errno
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support import folders
from tests.support.folders import files_under, loose_path, segment_path

KEY = key_number(0)


def folder_of(store: Store) -> Path:
    return Path(store.url.removeprefix("file:"))


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "records")

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        folders.plant(folder_of(store), key, record)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        return folders.peek(folder_of(store), key)


class TestLooseRecords(StoreContract):
    """Records as they were written before there were segments."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "records")

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        store.delete(key)
        path = loose_path(folder_of(store), key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        return folders.peek(folder_of(store), key)


def num_open_files(folder: Path) -> int:
    """Count open files of a folder: others come and go with other threads."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to count open files")
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += descriptor.readlink().is_relative_to(folder)
    return count


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


@pytest.fixture
def store(folder: Path) -> FileStore:
    return FileStore(folder)


def test_reading_makes_no_folder(store: FileStore, folder: Path) -> None:
    assert not store.contains(KEY)
    assert store.open(KEY) is None
    assert list(store.keys()) == []
    assert not folder.exists()


def test_another_store_on_the_folder_sees_the_records(store: FileStore, folder: Path) -> None:
    store.put(KEY, record_of(KEY))
    assert stored(FileStore(str(folder)), KEY) == record_of(KEY)


def test_foreign_files_are_left_alone(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    shard = loose_path(folder, KEY).parent
    name = KEY.digest
    foreign = [
        folder / "README",
        folder / f"{name}.kv",
        folder / "zz" / f"{name}.kv",
        folder / ("ff" if shard.name != "ff" else "fe") / f"{name}.kv",
        shard / "notes.txt",
        shard / f"{name[:-1]}.kv",
        shard / f"{name.upper()}X.kv",
        shard / f"{name}.kv.bak",
        shard / f".{name}.kv.swp",
        shard / f".{name}.tmp",
        folder / "segments" / "1.seg",
        folder / "segments" / "00000001.seg.bak",
        folder / "segments" / "notes.txt",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"foreign")
    (shard / f"{name[:2]}{'0' * 38}.kv").mkdir()
    (shard / f"{name[:2]}{'1' * 38}.kv").symlink_to(shard / "notes.txt")
    assert list(store.keys()) == [KEY]
    assert store.size_bytes() == 6
    assert store.collect_garbage(0.0) == 0
    assert all(path.read_bytes() == b"foreign" for path in foreign)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_name_that_is_no_record(store: FileStore, folder: Path, kind: str) -> None:
    path = loose_path(folder, KEY)
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (folder / "secret").write_bytes(b"secret")
        path.symlink_to(folder / "secret")
    else:
        os.mkfifo(path)
    assert store.open(KEY) is None  # and a pipe is not waited for
    assert not store.contains(KEY)
    assert not store.delete(KEY)
    store.put(KEY, b"record")
    assert stored(store, KEY) == b"record"
    if kind == "link":
        assert (folder / "secret").read_bytes() == b"secret"
    assert store.collect_garbage(0.0) == 0


def test_a_file_in_place_of_a_folder(store: FileStore, folder: Path) -> None:
    folder.mkdir()
    loose_path(folder, KEY).parent.write_bytes(b"")
    assert store.open(KEY) is None
    assert not store.contains(KEY)
    assert not store.delete(KEY)
    assert list(store.keys()) == []
    store.put(KEY, b"record")
    assert stored(store, KEY) == b"record"


def test_a_file_in_place_of_the_segments(store: FileStore, folder: Path) -> None:
    folder.mkdir()
    (folder / "segments").write_bytes(b"")
    assert store.open(KEY) is None
    with pytest.raises(StoreError, match="a file is where a folder should be"):
        store.put(KEY, b"record")
    assert store.open(KEY) is None


def test_a_record_cut_short_while_open(store: FileStore, folder: Path) -> None:
    store.put(KEY, record_of(KEY))
    record = store.open(KEY)
    assert record is not None
    os.truncate(segment_path(folder), 64 + 500)
    with pytest.raises(RecordError, match=f"record {KEY}: expected 500 bytes more .*end at 564"):
        read_all(record)
    record.close()


def test_short_reads_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, record_of(KEY))
    whole = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset)
    )
    assert stored(store, KEY) == record_of(KEY)


def test_short_writes_are_continued(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:7], offset))
    store.put(KEY, record_of(KEY))
    assert folders.peek(folder, KEY) == record_of(KEY)


def test_records_close_themselves(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    assert stored(store, KEY) == b"record"
    gc.collect()
    before = num_open_files(folder)
    held = store.open(KEY)
    assert held is not None
    for _ in range(50):
        assert store.open(KEY) is not None
    gc.collect()
    assert num_open_files(folder) == before + 1
    del held
    gc.collect()
    assert num_open_files(folder) == before


def test_reading_a_closed_record(store: FileStore) -> None:
    store.put(KEY, b"record")
    record = store.open(KEY)
    assert record is not None
    record.close()
    with pytest.raises(StoreError, match="was closed"):
        read_all(record)


def test_a_put_is_flushed_before_it_is_visible(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment and the names of new folders, before the index names the record."""
    synced: list[tuple[str, bool]] = []
    whole = os.fsync
    other = FileStore(folder)

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((target.name, other.contains(KEY)))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell what is flushed")
    store.put(KEY, b"record")
    assert synced == [
        (folder.parent.name, False),
        (folder.name, False),
        ("00000001.seg", False),
        ("segments", False),
    ]
    assert other.contains(KEY)


def test_folders_that_cannot_be_flushed(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "Invalid argument")
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put(KEY, b"record")
    assert stored(store, KEY) == b"record"


def test_leftovers_are_collected_once_they_are_old(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    shard = loose_path(folder, KEY).parent
    shard.mkdir()
    old, new = (shard / f".{KEY}.{n:016x}.tmp" for n in range(2))
    for path in (old, new):
        path.write_bytes(b"half a rec")
    an_hour_ago = time.time() - 3601
    os.utime(old, (an_hour_ago, an_hour_ago))
    assert list(store.keys()) == [KEY]
    assert store.size_bytes() == 6
    assert store.collect_garbage() == 1
    assert new.exists()
    assert store.collect_garbage(0.0) == 1
    assert files_under(folder) == ["records.sqlite", "segments/00000001.seg"]


def test_two_puts_of_one_key_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked, both write: the first one's record stays, whole."""
    both_have_looked = threading.Barrier(2)
    whole = FileStore._write

    def write(self: FileStore, *args: object, **kwargs: object) -> None:
        both_have_looked.wait(10)
        whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(FileStore, "_write", write)
    records = [bytes([number]) * 100_000 for number in range(2)]
    threads = [
        threading.Thread(target=FileStore(folder).put, args=(KEY, record)) for record in records
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored(FileStore(folder), KEY) in records
    assert segment_path(folder).stat().st_size == 64 + 100_032


def test_many_records_take_few_files(folder: Path) -> None:
    store = FileStore(folder, segment_bytes=10_000)
    keys = [key_number(number) for number in range(100)]
    for key in keys[:50]:
        store.put(key, record_of(key))
    store.put_many((key, record_of(key)) for key in keys[40:])
    assert len(files_under(folder)) < 10
    for key in keys:
        assert stored(store, key) == record_of(key) == folders.peek(folder, key)


def test_room_is_given_back(folder: Path) -> None:
    store = FileStore(folder, segment_bytes=10_000)
    keys = [key_number(number) for number in range(45)]  # nine and a bit to a segment
    for key in keys:
        store.put(key, record_of(key))
    assert len(files_under(folder)) == 1 + 5
    opened = store.open(keys[12])
    assert opened is not None
    for key in keys[:10]:  # one segment whole: it goes at once
        store.delete(key)
    assert len(files_under(folder)) == 1 + 4
    for key in keys[11:17]:  # most of the second
        store.delete(key)
    assert len(files_under(folder)) == 1 + 4
    assert store.collect_garbage(0.0) == 0
    assert not segment_path(folder, 2).exists()
    assert read_all(opened) == record_of(keys[12])
    left = [key for key in keys if key not in keys[:10] + keys[11:17]]
    assert sorted(store.keys()) == sorted(left)
    for key in left:
        assert stored(FileStore(folder), key) == record_of(key)
    for key in left:
        store.delete(key)
    store.collect_garbage(0.0)
    assert files_under(folder) == ["records.sqlite"]
    store.put(KEY, b"record")  # under a number that no reader can still have open
    assert int(files_under(folder)[-1][-12:-4]) > 5


def test_records_moved_into_the_segment_that_is_given_back_next(folder: Path) -> None:
    store = FileStore(folder, segment_bytes=10_000)
    keys = [key_number(number) for number in range(12)]  # ten to a segment
    for key in keys:
        store.put(key, record_of(key))
    for key in keys[2:]:  # most of the full segment, and all of the one being filled
        store.delete(key)
    store.collect_garbage(0.0)
    assert sorted(store.keys()) == sorted(keys[:2])
    for key in keys[:2]:
        assert stored(FileStore(folder), key) == record_of(key)


def test_what_cannot_be_read_is_not_moved(folder: Path) -> None:
    store = FileStore(folder, segment_bytes=5_000)
    keys = [key_number(number) for number in range(9)]
    for key in keys:
        store.put(key, record_of(key))
    store.delete(keys[0])
    store.delete(keys[1])
    store.delete(keys[2])
    os.truncate(segment_path(folder), 64 + 4 * 1024)
    store.collect_garbage(0.0)
    assert sorted(store.keys()) == sorted(keys[3:4] + keys[5:])
    assert stored(store, keys[3]) == record_of(keys[3])


def test_a_segment_that_is_gone_is_a_miss(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    segment_path(folder).unlink()
    assert store.open(KEY) is None
    assert store.counts()[0].misses == {"absent": 1}
    store.replace(KEY, b"record")
    assert stored(store, KEY) == b"record"


def test_a_segment_of_nobody_is_collected(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    segment_path(folder, 2).write_bytes(b"half a record")
    store.put(key_number(1), b"record")
    assert store.collect_garbage(0.0) == 1
    assert files_under(folder) == ["records.sqlite", "segments/00000001.seg"]


def test_loose_records_are_packed(store: FileStore, folder: Path) -> None:
    keys = [key_number(number) for number in range(5)]
    for key in keys:
        loose_path(folder, key).parent.mkdir(parents=True, exist_ok=True)
        loose_path(folder, key).write_bytes(record_of(key))
    opened = store.open(keys[0])
    assert opened is not None
    assert store.size_bytes() == 5000
    assert store.collect_garbage(0.0) == 0
    assert files_under(folder) == ["records.sqlite", "segments/00000001.seg"]
    assert read_all(opened) == record_of(keys[0])
    for key in keys:
        assert stored(store, key) == record_of(key) == folders.peek(folder, key)


def test_an_index_of_another_version(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    store.close()
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreError, match=r"expected schema 1, found schema 2; use the kvrag"):
        FileStore(folder)


def test_no_room_is_made_for_more_than_the_file_holds(store: FileStore, folder: Path) -> None:
    store.put(KEY, record_of(KEY, 1000))
    assert stored(store, KEY) == record_of(KEY, 1000)
    for column, value in (("size", 1 << 32), ("offset", 1 << 40), ("offset", -64)):
        with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
            before = connection.execute(f"SELECT {column} FROM records").fetchone()
            connection.execute(f"UPDATE records SET {column} = ?", (value,))
            connection.commit()
        with pytest.raises(RecordError, match="the file was cut short"):
            store.open(KEY)
        with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
            connection.execute(f"UPDATE records SET {column} = ?", before)
            connection.commit()
    assert stored(store, KEY) == record_of(KEY, 1000)


def test_another_process_may_have_just_begun(folder: Path) -> None:
    folder.mkdir()
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        store = FileStore(folder)
        assert store.open(KEY) is None
    store.put(KEY, b"record")
    assert stored(store, KEY) == b"record"


# Puts, reads and deletes records of a few keys, and gives room back.
SHARE = """
import random, sys
from kvrag.store.file import FileStore
from kvrag.testing.records import key_number, record_of, stored

store = FileStore(sys.argv[1], segment_bytes=200_000)
chance = random.Random(int(sys.argv[2]))
for _ in range(150):
    key = key_number(chance.randrange(12))
    choice = chance.random()
    if choice < 0.5:
        store.put(key, record_of(key, 30_000))
    elif choice < 0.7:
        store.delete(key)
    elif choice < 0.75:
        store.collect_garbage(0.0)
    assert stored(store, key) in (None, record_of(key, 30_000))
"""


def test_processes_share_a_folder(folder: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, str(folder), str(number)],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for child in children:
        _, said = child.communicate(timeout=120)
        assert child.returncode == 0, said
    store = FileStore(folder)
    for key in list(store.keys()):
        assert stored(store, key) == record_of(key, 30_000)
    store.collect_garbage(0.0)
    assert len(files_under(folder)) < 5


def test_a_segment_is_removed_only_behind_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may bring deleted records back; their bytes must then be there as well."""
    store = FileStore(tmp_path, segment_bytes=1000)
    for number in range(4):
        store.put(key_number(number), record_of(key_number(number)))
    flushes: list[bool] = []
    writing, remove = store._index.writing, store._segments.remove

    def note(action: str = "write", *, is_durable: bool = True) -> object:
        flushes.append(is_durable)
        return writing(action, is_durable=is_durable)

    def removed(segment: int) -> None:
        assert flushes[-1]
        remove(segment)

    monkeypatch.setattr(store._index, "writing", note)
    monkeypatch.setattr(store._segments, "remove", removed)
    num_before = len(list(tmp_path.rglob("*.seg")))
    for number in range(3):
        assert store.delete(key_number(number))
    assert len(list(tmp_path.rglob("*.seg"))) < num_before
    assert stored(store, key_number(3)) == record_of(key_number(3))
