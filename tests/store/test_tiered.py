"""Tiers: what is read moves up, what is written moves down, and nothing gets lost between."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.codec.container import write_record
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.store.base import RecordWrapper, Store, StoredRecord, StoreWrapper
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore, limits_of
from kvrag.store.memory import MemoryStore
from kvrag.store.registry import open_store
from kvrag.store.tiered import TieredStore, _Outbox
from kvrag_testing.codec_contract import spec_of
from kvrag_testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support.killing import lines_until_killed
from tests.support.threads import together
from tests.support.waiting import wait_until

KEY = key_number(0)


def check(key: ChunkKey, record: bytes) -> None:
    if record != record_of(key, len(record)):
        raise RecordError(f"record {key} is not what was written")


def anything(key: ChunkKey, record: bytes) -> None:
    pass


class Remote(StoreWrapper):
    """A store that counts what it is asked for, and that can be made slow, deaf or a liar."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.num_opened = 0
        self.num_reads = 0
        self.is_down = False
        self.seconds = 0.0
        self.mask = 0
        self.refusals: dict[ChunkKey, Exception] = {}

    def answer(self, key: ChunkKey | None = None) -> None:
        time.sleep(self.seconds)
        if self.is_down:
            raise StoreUnreachableError("the remote store does not answer")
        if key in self.refusals:
            raise self.refusals[key]

    def open(self, key: ChunkKey) -> StoredRecord | None:
        self.num_opened += 1
        self.answer()
        record = self.inner.open(key)
        return None if record is None else _RemoteRecord(record, self)

    def contains(self, key: ChunkKey) -> bool:
        self.answer()
        return self.inner.contains(key)

    def put(self, key: ChunkKey, record: bytes) -> None:
        self.answer(key)
        self.inner.put(key, record)

    def replace(self, key: ChunkKey, record: bytes) -> None:
        self.answer()
        self.inner.replace(key, record)


class _RemoteRecord(RecordWrapper):
    def __init__(self, inner: StoredRecord, remote: Remote) -> None:
        super().__init__(inner)
        self._remote = remote

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._remote.num_reads += 1
        self._remote.answer()
        self.inner.read_into(offset, buffer)
        for place in range(0, len(buffer), 100):
            buffer[place] ^= self._remote.mask


class TestThreeTiers(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        tiers = [LimitedStore(MemoryStore(), 1_000_000), FileStore(tmp_path), MemoryStore()]
        store = TieredStore(tiers, outbox_folder=tmp_path, check=anything)
        yield store
        store.close()

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        """In the remote tier; the disk has none, as on another machine."""
        store.flush()
        store.tiers[1].delete(key)
        store.tiers[2].replace(key, record)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        assert store.flush(10)
        return stored(store.tiers[2], key) or b""


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def tiers(tmp_path: Path, remote: Remote) -> Iterator[TieredStore]:
    memory = LimitedStore(MemoryStore(), 10_000_000)
    disk = LimitedStore(FileStore(tmp_path / "disk"), 20_000_000)
    store = TieredStore([memory, disk, remote], outbox_folder=tmp_path / "disk", check=check)
    yield store
    remote.is_down = False
    store.close()


def num_pending(store: TieredStore) -> int:
    return len(store.uploader._outbox.keys())


def read_by_layers(store: Store, key: ChunkKey, num_layers: int = 6) -> bytes:
    record = store.open(key)
    size = -(-record.size_bytes // num_layers)
    parts = []
    for start in range(0, record.size_bytes, size):
        part = bytearray(min(size, record.size_bytes - start))
        record.read_into(start, memoryview(part))
        parts.append(bytes(part))
    record.close()
    return b"".join(parts)


def test_what_is_read_moves_up(tiers: TieredStore, remote: Remote) -> None:
    memory, disk, _ = tiers.tiers
    remote.inner.put(KEY, record_of(KEY, 1_000_000))
    assert read_by_layers(tiers, KEY) == record_of(KEY, 1_000_000)
    assert memory.contains(KEY)
    wait_until(lambda: disk.contains(KEY))
    num_opened = remote.num_opened
    assert read_by_layers(tiers, KEY) == record_of(KEY, 1_000_000)
    memory.delete(KEY)
    assert read_by_layers(tiers, KEY) == record_of(KEY, 1_000_000)
    assert remote.num_opened == num_opened
    assert memory.contains(KEY)


def test_what_is_read_in_part_stays_below(tiers: TieredStore, remote: Remote) -> None:
    remote.inner.put(KEY, record_of(KEY, 1_000_000))
    record = tiers.open(KEY)
    record.read_into(0, memoryview(bytearray(1000)))
    record.close()
    assert not any(tier.contains(KEY) for tier in tiers.tiers[:2])
    assert tiers._fetches == {}


def test_one_fetch_for_all_who_want_a_record(tiers: TieredStore, remote: Remote) -> None:
    remote.inner.put(KEY, record_of(KEY, 3_000_000))
    remote.seconds = 0.02
    start = threading.Barrier(16)

    def work() -> bytes:
        start.wait(10)
        return read_by_layers(tiers, KEY)

    found = together(*[work] * 16)
    assert set(found) == {record_of(KEY, 3_000_000)}
    # Each of the 12 granules at most once: layers that overlap share one.
    assert 6 <= remote.num_reads <= 12
    assert remote.inner.counts()[0].bytes_read == 3_000_000


def test_a_fetch_that_fails_is_tried_by_the_next(tiers: TieredStore, remote: Remote) -> None:
    remote.inner.put(KEY, record_of(KEY, 600_000))
    first, second = tiers.open(KEY), tiers.open(KEY)
    remote.is_down = True
    with pytest.raises(StoreUnreachableError):
        read_all(first)
    remote.is_down = False
    assert read_all(second) == record_of(KEY, 600_000)
    assert read_all(first) == record_of(KEY, 600_000)


def test_wrong_bytes_are_not_kept(tiers: TieredStore, remote: Remote) -> None:
    remote.inner.put(KEY, record_of(KEY, 1_000_000))
    remote.mask = 1
    assert read_by_layers(tiers, KEY) != record_of(KEY, 1_000_000)
    assert not any(tier.contains(KEY) for tier in tiers.tiers[:2])
    remote.mask = 0
    assert read_by_layers(tiers, KEY) == record_of(KEY, 1_000_000)
    assert tiers.tiers[0].contains(KEY)


def test_a_damaged_copy_is_given_up_for_a_good_one(tiers: TieredStore, remote: Remote) -> None:
    remote.inner.put(KEY, record_of(KEY))
    tiers.tiers[0].put(KEY, b"x" * 1000)
    tiers.tiers[1].put(KEY, record_of(KEY))
    assert stored(tiers, KEY) == b"x" * 1000
    tiers.note_damage(KEY)
    assert stored(tiers, KEY) == record_of(KEY)
    damaged = [counts.misses.get("damaged", 0) for counts in tiers.counts()]
    assert damaged == [1, 0, 0]
    tiers.note_damage(KEY)  # all copies are good: what was read came from home
    assert [counts.misses.get("damaged", 0) for counts in tiers.counts()] == [1, 0, 1]


def test_writing_waits_for_the_disk_alone(
    tiers: TieredStore, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(remote, "answer", lambda *_: may_answer.wait(30))
    tiers._write(KEY, record_of(KEY), is_replacing=False)
    assert tiers.tiers[1].contains(KEY)
    assert not remote.inner.contains(KEY)
    may_answer.set()
    assert tiers.flush(10)
    assert stored(remote.inner, KEY) == record_of(KEY)
    assert num_pending(tiers) == 0


def test_what_the_remote_refuses_is_kept_and_sent_later(
    tiers: TieredStore, remote: Remote, tmp_path: Path
) -> None:
    remote.is_down = True
    keys = [key_number(number) for number in range(5)]
    for key in keys:
        tiers.put(key, record_of(key))
    assert not tiers.flush(10)
    assert num_pending(tiers) == 5
    for key in keys:
        assert stored(tiers, key) == record_of(key)
    remote.is_down = False
    assert tiers.flush(10)
    assert sorted(remote.keys()) == sorted(keys)


def test_what_is_not_uploaded_is_not_evicted(tmp_path: Path, remote: Remote) -> None:
    disk = LimitedStore(FileStore(tmp_path), 3000)
    store = TieredStore([disk, remote], outbox_folder=tmp_path, check=check)
    remote.is_down = True
    keys = [key_number(number) for number in range(9)]
    for key in keys[:3]:
        store.put(key, record_of(key))
    with pytest.raises(StoreError, match="does not answer"):
        store.put(keys[3], record_of(keys[3]))  # no room on disk, and nobody below
    assert num_pending(store) == 3
    remote.is_down = False
    assert store.flush(10)
    for key in keys[3:]:
        store.put(key, record_of(key))
        assert store.flush(10)
    assert sorted(remote.keys()) == sorted(keys)
    assert sum(dict(disk.sizes()).values()) <= 3000
    for key in keys:
        assert stored(store, key) == record_of(key)
    store.close()


def test_a_record_too_large_for_the_disk_goes_past_it(tmp_path: Path, remote: Remote) -> None:
    disk = LimitedStore(FileStore(tmp_path), 3000)
    store = TieredStore([disk, remote], outbox_folder=tmp_path, check=check)
    store.put(KEY, record_of(KEY, 5000))
    assert num_pending(store) == 0
    assert stored(store, KEY) == record_of(KEY, 5000)
    assert not disk.contains(KEY)
    store.close()


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_record_that_changes_while_it_is_uploaded(
    tiers: TieredStore, remote: Remote, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    begun, goes_on, put = threading.Event(), threading.Event(), remote.put

    def held(key: ChunkKey, record: bytes) -> None:
        begun.set()
        assert goes_on.wait(30)
        put(key, record)

    monkeypatch.setattr(remote, "put", held)
    tiers.put(KEY, record_of(KEY))
    assert begun.wait(30)
    if change == "delete":
        tiers.delete(KEY)
    else:
        tiers.replace(KEY, record_of(KEY, 500))
    goes_on.set()
    assert tiers.flush(30)
    expected = None if change == "delete" else record_of(KEY, 500)
    assert stored(remote.inner, KEY) == stored(tiers, KEY) == expected


def test_what_is_replaced_while_it_is_fetched_is_not_kept(
    tiers: TieredStore, remote: Remote
) -> None:
    remote.inner.put(KEY, record_of(KEY))
    record = tiers.open(KEY)
    tiers.replace(KEY, record_of(KEY, 500))
    assert read_all(record) == record_of(KEY)
    record.close()
    assert stored(tiers, KEY) == record_of(KEY, 500)
    tiers.delete(KEY)
    assert tiers.open(KEY) is None
    assert not remote.contains(KEY)


def test_a_dead_remote_or_a_sick_disk_hides_nothing_elsewhere(
    tiers: TieredStore, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = key_number(1)
    for key in (KEY, other):
        remote.inner.put(key, record_of(key))
    assert stored(tiers, KEY) == record_of(KEY)
    remote.is_down = True
    assert stored(tiers, KEY) == record_of(KEY)
    with pytest.raises(StoreUnreachableError):
        tiers.open(other)
    assert not tiers.contains(other)
    remote.is_down = False

    def refuse(*_: object) -> None:
        raise StoreError("the disk reports a defect")

    monkeypatch.setattr(tiers.tiers[1], "open", refuse)
    assert stored(tiers, other) == record_of(other)
    with pytest.raises(StoreError, match="defect"):
        tiers.open(key_number(2))


def test_pins(tiers: TieredStore, remote: Remote) -> None:
    memory = tiers.tiers[0]
    pinned, *others = map(key_number, range(13))
    (pins, _) = limits_of(tiers)
    pins.pin([pinned])
    for key in (pinned, *others):
        remote.inner.put(key, record_of(key, 1_000_000))
        assert len(read_by_layers(tiers, key)) == 1_000_000
    assert memory.contains(pinned)
    assert sum(dict(memory.sizes()).values()) <= 10_000_000
    pins.unpin([pinned])
    for key in others * 2:
        assert len(read_by_layers(tiers, key)) == 1_000_000
    assert not memory.contains(pinned)


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from kvrag.store.file import FileStore
from kvrag.store.tiered import TieredStore
from kvrag_testing.records import key_number, record_of

folder, first = Path(sys.argv[1]), int(sys.argv[2])
tiers = [FileStore(folder / "disk"), FileStore(folder / "remote")]
store = TieredStore(tiers, outbox_folder=folder / "disk", check=lambda key, record: None)
number = first
while True:
    store.put(key_number(number), record_of(key_number(number), 20_000))
    print(number, flush=True)
    number += 1
"""


def test_what_was_put_before_a_kill_is_uploaded_after_it(tmp_path: Path) -> None:
    told: list[int] = []
    for round_number in range(5):
        seconds = 0.03 * round_number
        lines = lines_until_killed(WRITE_AND_DIE, tmp_path, 1000 * round_number, seconds=seconds)
        told += map(int, lines)
    home = FileStore(tmp_path / "remote")
    disk = FileStore(tmp_path / "disk")
    store = TieredStore([disk, home], outbox_folder=tmp_path / "disk", check=anything)
    assert store.flush(60)
    for number in told:
        assert stored(home, key_number(number)) == record_of(key_number(number), 20_000)
    store.close()


def test_tiers_by_url(tmp_path: Path) -> None:
    url = f"tiered:memory:?limit=1MB|file:{tmp_path / 'disk'}?limit=2MB|file:{tmp_path / 'home'}"
    store = open_store(url)
    record = write_record(KEY, codec="test", spec=spec_of(), num_tokens=5, blocks=[[b"x" * 1000]])
    store.put(KEY, record)
    store.close()
    assert stored(FileStore(tmp_path / "home"), KEY) == record
    assert stored(FileStore(tmp_path / "disk"), KEY) == record
    again = open_store(store.url)
    assert stored(again, KEY) == record
    again.close()


@pytest.mark.parametrize("url", ["tiered:", "tiered:memory:", "tiered:tiered:memory:|memory:"])
def test_bad_tiers(url: str) -> None:
    with pytest.raises(ParameterError, match="two stores or more"):
        open_store(url)


def test_a_foreign_list_of_uploads(tmp_path: Path) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"cannot use .*outbox.sqlite.*delete the file"):
        open_store(f"tiered:file:{tmp_path}|memory:")


def test_one_look_at_a_long_list_reads_one_entry(tmp_path: Path) -> None:
    outbox = _Outbox(tmp_path)
    with outbox._using() as connection:
        rows = ((key_number(number).digest, 0, 0.0) for number in range(20_000))
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO pending (key, replaces, listed) VALUES (?, ?, ?)", rows)
        connection.execute("COMMIT")
    begun = time.thread_time()
    keys = outbox.keys()
    middle = time.thread_time()
    first = outbox.after(0)
    assert 20 * (time.thread_time() - middle) < middle - begun
    assert first is not None
    second = outbox.after(first.number)
    assert second is not None
    assert [first.key, second.key, len(keys)] == [key_number(0), key_number(1), 20_000]
    outbox.close()
