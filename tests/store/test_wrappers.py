"""Stores around stores keep the contract, and do what they are for."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.store.base import Store, StoreWrapper
from kvrag.store.encrypted import FRAME_BYTES, EncryptedStore, read_key
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore
from kvrag.store.memory import MemoryStore
from kvrag.store.metrics import StoreMetrics
from kvrag.store.registry import open_store
from kvrag.store.remote import Breaker
from kvrag_testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support import folders
from tests.support.threads import together

KEY = key_number(0)
SECRET = bytes(range(32))


class TestLimitedMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return LimitedStore(MemoryStore(), 10_000_000)

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        store.inner._records[key] = record  # type: ignore[attr-defined]

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        return bytes(store.inner._records[key])  # type: ignore[attr-defined]


class TestEncrypted(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return EncryptedStore(FileStore(tmp_path), SECRET)

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        """As a second program with the same key would."""
        folder = Path(store.url.removeprefix("file:"))
        memory = MemoryStore()
        EncryptedStore(memory, SECRET).put(key, record)
        folders.plant(folder, key, memory._records[key])

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        kept = folders.peek(Path(store.url.removeprefix("file:")), key)
        memory = MemoryStore()
        memory.put(key, kept)
        return stored(EncryptedStore(memory, SECRET), key) or b""


# -- limits -----------------------------------------------------------------------------------


def limited(limit_bytes: int) -> LimitedStore:
    return LimitedStore(MemoryStore(), limit_bytes)


def test_what_was_used_least_recently_goes() -> None:
    store = limited(5000)
    keys = [key_number(number) for number in range(8)]
    for key in keys[:5]:
        store.put(key, record_of(key))
    assert stored(store, keys[0]) == record_of(keys[0])
    for key in keys[5:]:
        store.put(key, record_of(key))
    assert set(store.keys()) == {keys[0], keys[4], *keys[5:]}
    assert sum(dict(store.sizes()).values()) == 5000
    counts = store.counts()[0]
    assert (counts.evictions, counts.bytes_evicted) == (3, 3000)


def test_what_is_pinned_or_open_stays() -> None:
    store = limited(3000)
    keys = [key_number(number) for number in range(9)]
    for key in keys[:3]:
        store.put(key, record_of(key))
    store.pin([keys[0]])
    opened = store.open(keys[1])
    for key in keys[3:6]:
        store.put(key, record_of(key))
    assert set(store.keys()) == {keys[0], keys[1], keys[5]}
    with pytest.raises(StoreError, match="all are pinned, open or not yet uploaded; raise"):
        store.put(keys[6], record_of(keys[6], 2500))
    opened.close()
    store.put(keys[6], record_of(keys[6], 2000))
    assert set(store.keys()) == {keys[0], keys[6]}
    store.unpin([keys[0]])
    store.put(keys[7], record_of(keys[7], 3000))
    assert set(store.keys()) == {keys[7]}


def test_a_record_larger_than_the_limit() -> None:
    store = limited(1000)
    store.put(KEY, record_of(KEY))
    with pytest.raises(StoreError, match=r"has 1001 bytes, and memory:.limit=1000 is limited"):
        store.put(key_number(1), record_of(key_number(1), 1001))
    assert stored(store, KEY) == record_of(KEY)
    assert not store.admits(key_number(1), 1001)


def test_a_limit_is_kept_for_what_was_there_before(tmp_path: Path) -> None:
    before = FileStore(tmp_path)
    for number in range(10):
        before.put(key_number(number), record_of(key_number(number)))
    before.close()
    store = open_store(f"file:{tmp_path}?limit=4000")
    store.put(key_number(10), record_of(key_number(10)))
    assert sum(dict(store.sizes()).values()) == 4000
    assert store.contains(key_number(10))


class _Writing(StoreWrapper):
    """Does something else while it writes a record."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.meanwhile: Callable[[], object] = lambda: None

    def put(self, key: ChunkKey, record: bytes) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.inner.put(key, record)


@pytest.mark.parametrize("meanwhile", ["others come", "it is asked for"])
def test_a_record_counts_while_it_is_written(meanwhile: str) -> None:
    inner = _Writing()
    store = LimitedStore(inner, 3000)
    keys = [key_number(number) for number in range(8)]

    def others_come() -> None:
        for key in keys[1:4]:
            with contextlib.suppress(StoreError):
                store.put(key, record_of(key))

    inner.meanwhile = others_come if meanwhile == "others come" else lambda: store.open(keys[0])
    store.put(keys[0], record_of(keys[0]))
    assert store.contains(keys[0])
    for key in keys[4:]:
        store.put(key, record_of(key))
    assert sum(dict(store.sizes()).values()) <= 3000


def test_a_failed_write_takes_no_room_and_leaves_the_old_one_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = limited(3000)

    def refuse(*_: object) -> None:
        raise StoreError("full")

    store.put(KEY, record_of(KEY))
    with monkeypatch.context() as patch:
        patch.setattr(store.inner, "put", refuse)
        patch.setattr(store.inner, "replace", refuse)
        for number in range(1, 9):
            with pytest.raises(StoreError, match="full"):
                store.put(key_number(number), record_of(KEY))
        with pytest.raises(StoreError, match="full"):
            store.replace(KEY, record_of(KEY, 2000))
    assert store.contains(KEY)
    store.put(key_number(9), record_of(key_number(9), 2000))
    store.replace(KEY, record_of(KEY))  # it takes the room of the old one
    assert store.contains(key_number(9))
    assert store.counts()[0].evictions == 0
    for number in range(1, 4):
        store.put(key_number(number), record_of(key_number(number)))
    assert sum(dict(store.sizes()).values()) <= 3000


def test_reading_much_once_pushes_nothing_out() -> None:
    store = limited(3000)
    used = [key_number(number) for number in range(3)]
    for key in used:
        store.put(key, record_of(key))
    for _ in range(3):
        for key in used:
            assert stored(store, key) == record_of(key)
    for number in range(3, 500):
        assert store.open(key_number(number)) is None
        assert not store.admits(key_number(number), 1000)
    for _ in range(9):
        store.open(key_number(3))
    assert store.admits(key_number(3), 1000)


def test_many_threads_keep_within_the_limit() -> None:
    store = limited(20_000)

    def work(first: int) -> None:
        for number in range(first, 300, 6):
            key = key_number(number % 60)
            store.put(key, record_of(key))
            found = store.open(key)
            if found is not None:
                assert read_all(found) == record_of(key)
                found.close()
            assert sum(dict(store.sizes()).values()) <= 20_000

    together(*(partial(work, first) for first in range(6)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4000", 4000), ("20GB", 20 * 10**9), ("1.5 MiB", 3 << 19), ("1e9", 10**9), ("8kB", 8000)],
)
def test_limits_as_text(tmp_path: Path, text: str, expected: int) -> None:
    store = open_store(f"file:{tmp_path}?limit={text}")
    assert isinstance(store, LimitedStore)
    assert store.limit_bytes == expected
    assert isinstance(open_store(store.url), LimitedStore)


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1.2.3", "9XB", "nan", "inf"])
def test_bad_limits(text: str) -> None:
    with pytest.raises(ParameterError, match="expected bytes as in 20GB"):
        open_store(f"memory:?limit={text}")


# -- encryption -------------------------------------------------------------------------------


def kept(store: EncryptedStore, key: ChunkKey = KEY) -> bytes:
    return bytes(store.inner._records[key])  # type: ignore[attr-defined]


def test_nothing_of_a_record_is_kept_in_the_clear() -> None:
    store = EncryptedStore(MemoryStore(), SECRET)
    record = b"the KV of a secret text " * 9000
    store.put(KEY, record)
    store.put(key_number(1), record)
    assert b"secret" not in kept(store)
    assert kept(store)[64:200] != kept(store, key_number(1))[64:200]  # not even that they are alike
    assert stored(store, KEY) == record


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 200_000])
def test_frames(size: int) -> None:
    store = EncryptedStore(MemoryStore(), SECRET)
    store.put(KEY, record_of(KEY, size))
    assert stored(store, KEY) == record_of(KEY, size)
    assert dict(store.sizes()) == {KEY: size}
    record = store.open(KEY)
    for offset in range(0, size, 30_011):
        buffer = bytearray(min(70_000, size - offset))
        record.read_into(offset, memoryview(buffer))
        assert buffer == record_of(KEY, size)[offset : offset + len(buffer)]


def test_a_range_reads_its_frames_alone() -> None:
    store = EncryptedStore(MemoryStore(), SECRET)
    store.put(KEY, record_of(KEY, 1_000_000))
    before = store.counts()[0].bytes_read
    record = store.open(KEY)
    record.read_into(500_000, memoryview(bytearray(1000)))
    assert store.counts()[0].bytes_read - before < 2 * FRAME_BYTES


def test_neither_another_key_nor_another_record_is_read() -> None:
    store = EncryptedStore(MemoryStore(), SECRET)
    store.put(KEY, record_of(KEY))
    with pytest.raises(RecordError, match="other bytes, or another key's; use the key"):
        stored(EncryptedStore(store.inner, bytes(32)), KEY)
    store.inner.put(key_number(1), kept(store))
    with pytest.raises(RecordError):
        stored(store, key_number(1))


def test_any_change_is_noticed() -> None:
    store = EncryptedStore(MemoryStore(), SECRET)
    store.put(KEY, record_of(KEY, 100))
    good = kept(store)
    for offset in range(len(good)):
        damaged = bytearray(good)
        damaged[offset] ^= 1
        store.inner.replace(KEY, bytes(damaged))
        with pytest.raises(RecordError):
            stored(store, KEY)


def frames_of(content: bytes) -> tuple[bytes, bytes, bytes]:
    step = FRAME_BYTES + 16
    return content[:64], content[64 : 64 + step], content[64 + step :]


@pytest.mark.parametrize(
    "change",
    [
        lambda head, first, second: head + second[: len(first)] + first,  # swapped
        lambda head, first, second: head + first,  # cut off
        lambda head, first, second: head + first + first,  # repeated
        lambda head, first, second: b"",
        lambda head, first, second: b"x" * 63,
        lambda head, first, second: bytes(64) + first + second,
    ],
)
def test_frames_cannot_be_rearranged(change: Callable[[bytes, bytes, bytes], bytes]) -> None:
    store = EncryptedStore(MemoryStore(), SECRET)
    store.put(KEY, record_of(KEY, 2 * FRAME_BYTES))
    store.inner.replace(KEY, change(*frames_of(kept(store))))
    with pytest.raises(RecordError):
        stored(store, KEY)


def test_keys_in_files(tmp_path: Path) -> None:
    path = tmp_path / "tenant.key"
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o600)
    assert read_key(path) == SECRET
    store = open_store(f"file:{tmp_path / 'kv'}?key_file={path}&limit=1MB")
    store.put(KEY, record_of(KEY))
    assert stored(open_store(f"file:{tmp_path / 'kv'}?key_file={path}"), KEY) == record_of(KEY)
    path.chmod(0o644)
    with pytest.raises(ParameterError, match=r"other users may read this key.*chmod 600"):
        read_key(path)


@pytest.mark.parametrize("text", ["", "abc", "00" * 31, "zz" * 32, "\x00" * 64])
def test_bad_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenant.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ParameterError, match="openssl rand -hex 32"):
        read_key(path)
    with pytest.raises(ParameterError, match="openssl rand -hex 32"):
        read_key(tmp_path / "absent")
    with pytest.raises(ParameterError, match="a key is 32 bytes"):
        EncryptedStore(MemoryStore(), b"short")


# -- the breaker ------------------------------------------------------------------------------


class Clocked(Breaker):
    """A breaker with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = StoreMetrics("redis")
        super().__init__("redis://there", self.metrics, lambda: self.now)

    def call(self, error: Exception | None = None) -> None:
        with self.guarding():
            if error is not None:
                raise error


DOWN = StoreUnreachableError("down")


def test_a_store_that_failed_is_left_alone_for_a_while() -> None:
    breaker = Clocked()
    breaker.call()
    with pytest.raises(StoreUnreachableError, match="down"):
        breaker.call(DOWN)
    for _ in range(50):
        with pytest.raises(StoreUnreachableError, match="did not answer a moment ago"):
            breaker.call()
    assert breaker.metrics.counts().misses == {"unreadable": 50}
    breaker.now += 0.3
    with pytest.raises(StoreUnreachableError, match="down"):
        breaker.call(DOWN)
    breaker.now += 0.3  # the pause has doubled
    with pytest.raises(StoreUnreachableError, match="a moment ago"):
        breaker.call()
    breaker.now += 0.3
    breaker.call()
    breaker.call()


def test_only_one_call_tries_again() -> None:
    breaker = Clocked()
    with pytest.raises(StoreUnreachableError):
        breaker.call(DOWN)
    breaker.now += 1.0
    with breaker.guarding():
        with pytest.raises(StoreUnreachableError, match="a moment ago"):
            breaker.call()
        with breaker.guarding(is_read=False):  # who writes is always let through
            pass
    breaker.call()


def test_failures_at_the_same_time_are_one() -> None:
    """Thirty-two questions meet the same dead server: the pause is that of one failure."""
    breaker = Clocked()
    calls = [breaker.guarding() for _ in range(32)]
    for call in calls:
        call.__enter__()
    for call in calls:
        assert not call.__exit__(type(DOWN), DOWN, None)
    breaker.now += 0.3
    breaker.call()


def test_a_refusal_is_an_answer_too() -> None:
    breaker = Clocked()
    with pytest.raises(StoreUnreachableError):
        breaker.call(DOWN)
    breaker.now += 0.3
    with pytest.raises(RecordError):
        breaker.call(RecordError("damaged"))
    breaker.call()  # who answers, answers the next one as well
