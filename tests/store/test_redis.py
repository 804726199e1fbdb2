"""`RedisStore` against a real server."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.container import RecordReader, write_record
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.kvcache import KVSpec
from kvrag.store.base import Store
from kvrag.store.redis import RedisStore
from kvrag_testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.support.servers import PASSWORD, RedisServer, free_port

KEY = key_number(0)
PREFIX = "te*st"  # a name that is a pattern as well


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_server.url, password=PASSWORD)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def store(client: Any, redis_server: RedisServer, redis_password: str) -> Iterator[RedisStore]:
    store = RedisStore(redis_server.url, prefix=PREFIX)
    yield store
    store.close()


class TestRedisStore(StoreContract):
    @pytest.fixture
    def store(self, store: RedisStore) -> RedisStore:
        return store

    @pytest.fixture(autouse=True)
    def _client(self, client: Any) -> None:
        self.client = client

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        """In two pieces, the head of one byte."""
        name = f"{PREFIX}:{{{key}}}"
        self.client.set(f"{name}:{'ab' * 8}:1", record[1:])
        listed = struct.pack("<4s16sQI2Q", b"kvr1", b"ab" * 8, len(record), 2, 1, len(record))
        self.client.set(name, listed + record[:1])

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        name = f"{PREFIX}:{{{key}}}"
        listed = self.client.get(name)
        magic, generation, size, num_pieces = struct.unpack_from("<4s16sQI", listed)
        assert magic == b"kvr1"
        pieces = [listed[32 + 8 * num_pieces :]]
        for number in range(1, num_pieces):
            assert self.client.ttl(f"{name}:{generation.decode()}:{number}") == -1
            pieces.append(self.client.get(f"{name}:{generation.decode()}:{number}"))
        ends = struct.unpack_from(f"<{num_pieces}Q", listed, 32)
        assert [sum(map(len, pieces[: n + 1])) for n in range(num_pieces)] == list(ends)
        assert size == ends[-1]
        return b"".join(pieces)


def test_layers_are_values_of_their_own(store: RedisStore, client: Any) -> None:
    blocks = [[bytes([number]) * 100_000] for number in range(4)]
    spec = KVSpec(4, 1, 8, torch.float32)
    record = write_record(KEY, codec="test", spec=spec, num_tokens=3, blocks=blocks)
    store.put(KEY, record)
    opened = store.open(KEY)
    client.config_resetstat()
    reader = RecordReader(opened, KEY)
    assert client.info("commandstats").get("cmdstat_getrange") is None  # the header came with it
    buffer = bytearray(reader.header.blocks[2].padded_bytes)
    reader.read_block(2, memoryview(buffer))
    assert client.info("commandstats")["cmdstat_getrange"]["calls"] == 1
    sizes = sorted(client.strlen(name) for name in client.keys("*:?"))
    assert sizes[1:] == [100_032] * 3
    assert 95_000 < sizes[0] < 100_000  # the first layer's beginning came with the header


def test_small_records_are_one_value(store: RedisStore, client: Any) -> None:
    store.put(KEY, record_of(KEY, 4000))
    assert len(client.keys("*")) == 1


def test_a_commit_whose_answer_got_lost(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has done it, the line broke before it said so, and the library asks again."""
    commit = store._commit

    def ask_twice(**given: Any) -> Any:
        commit(**given)
        return commit(**given)

    monkeypatch.setattr(store, "_commit", ask_twice)
    store.put(KEY, record_of(KEY, 300_000))
    store.replace(KEY, record_of(KEY, 500_000))
    assert stored(store, KEY) == record_of(KEY, 500_000)


def test_what_a_killed_writer_leaves_goes_by_itself(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_commit", die)
        with pytest.raises(KeyboardInterrupt):
            store.put(KEY, record_of(KEY, 500_000))
    assert store.open(KEY) is None
    assert list(store.keys()) == []
    left = client.keys("*")
    assert left
    assert all(0 < client.ttl(name) <= 3600 for name in left)


def test_pieces_of_a_deleted_record_go_by_themselves(store: RedisStore, client: Any) -> None:
    store.put(KEY, record_of(KEY, 500_000))
    store.replace(KEY, record_of(KEY, 300_000))
    store.delete(KEY)
    left = client.keys("*")
    assert left
    assert all(0 < client.ttl(name) <= 60 for name in left)


def test_a_piece_that_redis_removed_is_refused(store: RedisStore, client: Any) -> None:
    store.put(KEY, record_of(KEY, 500_000))
    record = store.open(KEY)
    client.delete(*client.keys("*:1"))
    with pytest.raises(StoreError, match="Redis has removed it: give it more memory"):
        read_all(record)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"foreign" * 20, b"kvr1" + bytes(28), b"kvr1" + b"a" * 40]
)
def test_a_foreign_value(store: RedisStore, client: Any, content: bytes) -> None:
    client.set(store.name_of(KEY), content)
    with pytest.raises(RecordError, match="expected a list of pieces"):
        store.open(KEY)
    store.replace(KEY, b"record")
    assert stored(store, KEY) == b"record"


def test_a_foreign_type(store: RedisStore, client: Any) -> None:
    client.lpush(store.name_of(KEY), "x")
    with pytest.raises(RecordError, match=r"another program keeps something .* another prefix"):
        store.open(KEY)


def test_prefixes_do_not_see_each_other(store: RedisStore, redis_server: RedisServer) -> None:
    other = RedisStore(redis_server.url, prefix="other")
    store.put(KEY, b"record")
    assert other.open(KEY) is None
    assert list(other.keys()) == []
    other.put(KEY, b"another")
    assert stored(store, KEY) == b"record"
    other.close()


def test_the_password_is_in_the_url_or_the_environment(
    store: RedisStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRAG_REDIS_PASSWORD")
    given = RedisStore(f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{redis_server.port}/0")
    given.put(KEY, b"record")
    assert PASSWORD not in given.url
    assert quote(PASSWORD, safe="") not in given.url
    assert given.url == redis_server.url
    given.close()
    with pytest.raises(StoreError, match=r"refuses the password.*KVRAG_REDIS_PASSWORD"):
        RedisStore(redis_server.url)
    monkeypatch.setenv("KVRAG_REDIS_PASSWORD", "hunter2")
    with pytest.raises(StoreError, match="refuses the password") as failure:
        RedisStore(redis_server.url)
    assert "hunter2" not in str(failure.value)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:port/0", "http://127.0.0.1/0"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ParameterError, match="not a URL of Redis"):
        RedisStore(url)


def test_a_database_it_does_not_have(redis_server: RedisServer, redis_password: str) -> None:
    with pytest.raises(StoreError, match="number of a database that it has"):
        RedisStore(redis_server.url[:-1] + "999")


def test_nobody_there() -> None:
    with pytest.raises(StoreUnreachableError, match=r"does not answer.*start it"):
        RedisStore(f"redis://127.0.0.1:{free_port()}/0")


def test_a_full_redis(store: RedisStore, client: Any) -> None:
    store.put(KEY, record_of(KEY))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="its memory is full"):
            store.put(key_number(1), record_of(key_number(1), 100_000))
        assert stored(store, KEY) == record_of(KEY)
        assert store.open(key_number(1)) is None
    finally:
        client.config_set("maxmemory", 0)
    store.put(key_number(1), record_of(key_number(1), 100_000))
    assert stored(store, key_number(1)) == record_of(key_number(1), 100_000)


def test_redis_killed_and_started_again(tmp_path: Path, redis_password: str) -> None:
    server = RedisServer(tmp_path)
    try:
        store = RedisStore(server.url, timeout_seconds=0.5)
        store.put(KEY, record_of(KEY, 500_000))
        record = store.open(KEY)
        server.kill()
        for refused in (lambda: read_all(record), lambda: store.open(KEY)):
            with pytest.raises(StoreUnreachableError):
                refused()
        server.start()
        assert read_all(record) == record_of(KEY, 500_000)
        server.pause()
        started = time.monotonic()
        with pytest.raises(StoreUnreachableError, match=r"[Tt]imeout"):
            store.open(KEY)
        assert time.monotonic() - started < 20
        server.resume()
        assert stored(store, KEY) == record_of(KEY, 500_000)
        assert store.counts()[0].misses == {"unreadable": 2}
        store.close()
    finally:
        server.kill()


@pytest.mark.parametrize("error", [ValueError("b'100\\x1032'"), TypeError("x"), IndexError("x")])
def test_what_the_parser_lets_through_is_a_store_error(error: Exception) -> None:
    """Replies damaged on their way: a typed error, whatever the client's parser makes of it."""
    store = RedisStore("redis://127.0.0.1:1/0", must_answer=False)
    with pytest.raises(StoreError, match="no reply of Redis"), store._errors("read"):
        raise error
    with pytest.raises(RecordError, match="damaged"), store._errors("read"):
        raise RecordError("damaged")
