import contextlib
import errno
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store import file
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag_testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support import folders
from tests.support.folders import file_path, files_under

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


def test_foreign_files_are_left_alone(store: FileStore, folder: Path) -> None:
    store.put(KEY, b"record")
    shard = file_path(folder, KEY).parent
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
        folder / "segments" / "notes.txt",
        folder / "segments" / "speech.seg",
        folder / "records.sqlite.bak",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"foreign")
    (shard / f"{name[:2]}{'0' * 38}.kv").mkdir()
    (shard / f"{name[:2]}{'1' * 38}.kv").symlink_to(shard / "notes.txt")
    assert list(store.keys()) == [KEY]
    assert sum(dict(store.sizes()).values()) == 6
    assert store.collect_garbage(0.0) == 0
    assert all(path.read_bytes() == b"foreign" for path in foreign)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_name_that_is_no_record(store: FileStore, folder: Path, kind: str) -> None:
    path = file_path(folder, KEY)
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
    if kind == "folder":
        with pytest.raises(StoreError, match="a folder is where a file should be"):
            store.put(KEY, b"record")
    else:
        store.put(KEY, b"record")
        assert stored(store, KEY) == b"record"
    if kind == "link":
        assert (folder / "secret").read_bytes() == b"secret"
    assert store.collect_garbage(0.0) == 0


def test_a_file_in_place_of_a_folder(store: FileStore, folder: Path) -> None:
    folder.mkdir()
    file_path(folder, KEY).parent.write_bytes(b"")
    assert store.open(KEY) is None
    assert not store.contains(KEY)
    assert not store.delete(KEY)
    assert list(store.keys()) == []
    with pytest.raises(StoreError, match="a file is where a folder should be"):
        store.put(KEY, b"record")


def test_a_record_cut_short_while_open(store: FileStore, folder: Path) -> None:
    store.put(KEY, record_of(KEY))
    record = store.open(KEY)
    os.truncate(file_path(folder, KEY), 500)
    with pytest.raises(RecordError, match=f"record {KEY}: expected 500 bytes more .*end at 500"):
        read_all(record)
    record.close()


def test_short_reads_and_writes_are_continued(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: read(fd, [into[0][:7]], offset))
    store.put(KEY, record_of(KEY))
    assert stored(store, KEY) == record_of(KEY) == folders.peek(folder, KEY)


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
    record.close()
    with pytest.raises(StoreError, match="was closed"):
        read_all(record)


def test_a_put_is_flushed_before_it_is_visible(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of new folders and the record, before the record has its name."""
    synced: list[tuple[str, bool]] = []
    whole = os.fsync
    other = FileStore(folder)

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((target.suffix or target.name, other.contains(KEY)))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell what is flushed")
    store.put(KEY, b"record")
    assert synced == [
        (folder.parent.name, False),
        (folder.name, False),
        (".tmp", False),
        (KEY.digest[:2], True),
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
    shard = file_path(folder, KEY).parent
    old, new = (shard / f".{KEY}.{n:016x}.tmp" for n in range(2))
    for path in (old, new):
        path.write_bytes(b"half a rec")
    an_hour_ago = time.time() - 3601
    os.utime(old, (an_hour_ago, an_hour_ago))
    assert list(store.keys()) == [KEY]
    assert sum(dict(store.sizes()).values()) == 6
    assert store.collect_garbage() == 1
    assert new.exists()
    assert store.collect_garbage(0.0) == 1
    assert files_under(folder) == [f"{KEY.digest[:2]}/{KEY}.kv"]


# Puts, reads and deletes records of a few keys, and gives room back.
SHARE = """
import random, sys
from kvrag.store.file import FileStore
from kvrag_testing.records import key_number, record_of, stored

store = FileStore(sys.argv[1])
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
    assert store.collect_garbage(0.0) == 0
    assert len(files_under(folder)) == len(list(store.keys()))


def test_a_file_that_is_removed_before_it_is_locked_is_written_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = file._lock, list[int]()

    def late(descriptor: int) -> bool:
        if not removed:
            removed.append(0)
            removed[0] = store.collect_garbage(0.0)
        return lock(descriptor)

    monkeypatch.setattr(file, "_lock", late)
    store.put(KEY, record_of(KEY, 100))
    assert removed == [1]
    assert stored(store, KEY) == record_of(KEY, 100)


def test_more_open_records_than_the_soft_limit_of_files(store: FileStore) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store.put(KEY, record_of(KEY))
    descriptors = Path("/proc/self/fd")
    num_open = len(list(descriptors.iterdir())) if descriptors.exists() else 100
    few = min(num_open + 20, before[1] - 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        records = [store.open(KEY) for _ in range(60)]
        assert all(record is not None and read_all(record) == record_of(KEY) for record in records)
    finally:
        del records
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
