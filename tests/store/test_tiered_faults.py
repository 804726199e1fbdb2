"""Tiers when something goes wrong or comes at a bad moment in one of them."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError
from kvrag.store.base import RecordWrapper, StoredRecord, StoreWrapper, content_of
from kvrag.store.encrypted import EncryptedStore
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore
from kvrag.store.memory import MemoryStore
from kvrag.store.tiered import TieredStore
from kvrag_testing.records import key_number, read_all, record_of, stored
from tests.store.test_tiered import Remote, check, num_pending

KEY, OTHER = key_number(0), key_number(1)
SECRET = bytes(range(32))


@pytest.fixture
def home() -> Remote:
    return Remote()


@pytest.fixture
def tiers(tmp_path: Path, home: Remote) -> Iterator[TieredStore]:
    store = TieredStore([FileStore(tmp_path), home], outbox_folder=tmp_path, check=check)
    yield store
    home.refusals.clear()
    store.close()


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_who_reads_on_is_not_stopped_by_another_who_has_done(tmp_path: Path, change: str) -> None:
    """Readers share one fetch, also of a record that is deleted or replaced meanwhile."""
    store = TieredStore([MemoryStore(), FileStore(tmp_path)], check=check)
    store.put(KEY, record_of(KEY, 600_000))
    first, second = store.open(KEY), store.open(KEY)
    if change == "delete":
        store.delete(KEY)
    else:
        store.replace(KEY, record_of(KEY, 500))
    first.close()
    assert read_all(second) == record_of(KEY, 600_000)
    second.close()
    store.close()


@pytest.mark.parametrize("error", [StoreError("too large"), RecordError("odd"), OSError("odd")])
def test_a_record_that_is_refused_holds_up_no_other(
    tiers: TieredStore, home: Remote, error: Exception
) -> None:
    home.refusals[KEY] = error
    for number in range(4):
        tiers.put(key_number(number), record_of(key_number(number)))
    assert not tiers.flush(20)
    assert sorted(home.keys()) == sorted(key_number(number) for number in range(1, 4))
    assert num_pending(tiers) == 1
    home.refusals.clear()
    assert tiers.flush(20)
    assert home.contains(KEY)


def test_what_is_damaged_on_the_disk_is_not_sent_home(
    tiers: TieredStore, home: Remote, tmp_path: Path
) -> None:
    home.refusals[KEY] = StoreError("not now")
    tiers.put(KEY, record_of(KEY))
    assert not tiers.flush(20)
    tiers.tiers[0].replace(KEY, b"x" * 1000)
    home.refusals.clear()
    assert tiers.flush(20)
    assert list(home.keys()) == []
    assert not tiers.contains(KEY)
    assert tiers.counts()[0].misses["damaged"] == 1


@pytest.mark.parametrize("way", ["read", "told"])
def test_a_copy_that_cannot_even_be_opened_is_given_up(home: Remote, way: str) -> None:
    inner = MemoryStore()
    inner.put(KEY, b"a record of another program")
    store = TieredStore([EncryptedStore(inner, SECRET), home], check=check)
    home.put(KEY, record_of(KEY))
    if way == "told":
        store.note_damage(KEY)
        assert not inner.contains(KEY)
    assert stored(store, KEY) == record_of(KEY)
    assert [counts.misses.get("damaged", 0) for counts in store.counts()] == [1, 0]
    assert stored(store.tiers[0], KEY) == record_of(KEY)  # the good one took its place
    store.close()


class _Boaster(RecordWrapper):
    @property
    def size_bytes(self) -> int:
        return 1 << 62


class _BoastingStore(StoreWrapper):
    def open(self, key: ChunkKey) -> StoredRecord | None:
        record = self.inner.open(key)
        return None if record is None else _Boaster(record)


@pytest.mark.parametrize("place", [0, 1])
def test_a_record_that_says_it_is_larger_than_memory(
    tmp_path: Path, home: Remote, place: int
) -> None:
    """What is stored is hostile until checked: no size is believed that has no bytes behind it."""
    inner: list[StoreWrapper | MemoryStore] = [MemoryStore(), MemoryStore()]
    inner[place].put(KEY, record_of(KEY))
    inner[place] = _BoastingStore(inner[place])
    with closing(TieredStore(inner, check=check)) as store:
        with pytest.raises((RecordError, StoreError)):
            content_of(store, KEY)
        store.note_damage(KEY)
    # The uploads of others go on behind it.
    disk = FileStore(tmp_path)
    disk.put(KEY, record_of(KEY))
    with closing(TieredStore([_BoastingStore(disk), home], outbox_folder=tmp_path)) as store:
        store.uploader._outbox.add(KEY, replaces=False)
        store.put(OTHER, record_of(OTHER))
        store.flush(20)
    assert store.uploader._thread.is_alive() is False


class _SlowDisk(StoreWrapper):
    """Whose copies wait until they are let through."""

    def __init__(self, inner: FileStore) -> None:
        super().__init__(inner)
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def put(self, key: ChunkKey, record: bytes) -> None:
        self.began.set()
        assert self.may_go_on.wait(20)
        self.inner.put(key, record)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_on_its_way_does_not_bring_back_what_was_deleted(
    tmp_path: Path, home: Remote, is_first: bool
) -> None:
    disk = _SlowDisk(FileStore(tmp_path))
    store = TieredStore([disk, home], check=check)
    blocked = OTHER if is_first else KEY
    for key in dict.fromkeys([blocked, KEY]):
        home.put(key, record_of(key))
        assert stored(store, key) == record_of(key)
        assert disk.began.wait(20)
    # The end of the process waits for none.
    assert all(one.daemon for one in threading.enumerate() if one.name.startswith("kvrag-copy"))
    deleting = threading.Thread(target=store.delete, args=(KEY,))
    deleting.start()
    if is_first:
        deleting.join(20)  # its copy has not begun
    disk.may_go_on.set()
    deleting.join(20)
    store.close()
    assert not FileStore(tmp_path).contains(KEY)


def test_a_replacement_that_the_disk_has_no_room_for_leaves_no_old_one_there(
    tmp_path: Path, home: Remote
) -> None:
    disk = LimitedStore(FileStore(tmp_path), 3000)
    store = TieredStore([disk, home], outbox_folder=tmp_path, check=check)
    store.put(KEY, record_of(KEY))
    assert store.flush(20)
    store.replace(KEY, record_of(KEY, 5000))
    assert stored(store, KEY) == record_of(KEY, 5000)
    store.close()


def test_a_clock_that_jumps_loses_no_upload(
    tmp_path: Path, home: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is listed and not yet written looks as if its writer had died hours ago."""
    disk = FileStore(tmp_path)
    store = TieredStore([disk, home], outbox_folder=tmp_path, check=check)
    put = disk.put

    def put_after_a_jump(key: ChunkKey, record: bytes) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: clock() + 86_400)
            store.flush(20)
        put(key, record)

    clock = time.time
    monkeypatch.setattr(disk, "put", put_after_a_jump)
    store.put(KEY, record_of(KEY))
    assert store.flush(20)
    assert home.contains(KEY)
    store.close()
