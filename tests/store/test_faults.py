"""Remote stores behind a line that is slow, silent, dead, cut, throttled or lying.

What a store promises then: never other bytes taken for right ones, an answer in bounded time, an
error of kvrag's own, and normal service once the line is good again, without a restart.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.codec.container import write_record
from kvrag.errors import RecordError, StoreError
from kvrag.recordformat import check_record
from kvrag.store.base import Store, read_whole
from kvrag.store.registry import open_store
from kvrag_testing.codec_contract import spec_of
from kvrag_testing.records import key_number
from tests.support.proxy import FaultyProxy
from tests.support.servers import RedisServer, S3Server
from tests.support.waiting import wait_until

KEY = key_number(0)
MODES = ("slow", "silent", "dead", "half-closed", "throttled", "wrong")


def record_of(key: ChunkKey, layer_bytes: int = 100_000) -> bytes:
    blocks = [[bytes([number + 1]) * layer_bytes] for number in range(8)]
    return write_record(key, codec="test", spec=spec_of(), num_tokens=5, blocks=blocks)


@pytest.fixture
def redis_proxy(redis_server: RedisServer, redis_password: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def s3_proxy(s3_server: S3Server, s3_credentials: None) -> Iterator[FaultyProxy]:
    with s3_server.bucket("faults"), FaultyProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture(params=["redis", "s3"])
def line(request: pytest.FixtureRequest) -> tuple[FaultyProxy, str]:
    proxy = request.getfixturevalue(f"{request.param}_proxy")
    if request.param == "redis":
        return proxy, f"redis://127.0.0.1:{proxy.port}/0?prefix=faults&timeout=0.5"
    endpoint = f"http://127.0.0.1:{proxy.port}"
    return proxy, f"s3://faults/x?endpoint={endpoint}&region=us-east-1&timeout=0.5"


def read(store: Store, key: ChunkKey) -> bytes | None:
    record = store.open(key)
    if record is None:
        return None
    try:
        return read_whole(record)
    finally:
        record.close()


def wait_until_read(store: Store, key: ChunkKey, expected: bytes) -> None:
    def is_read() -> bool:
        try:
            return read(store, key) == expected
        except (StoreError, RecordError):
            return False

    wait_until(is_read)


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_line(line: tuple[FaultyProxy, str], mode: str) -> None:
    proxy, url = line
    store = open_store(url)
    store.replace(KEY, record_of(KEY))
    proxy.mode = mode
    outcomes = []
    num_reads = 2 if mode == "throttled" else 5
    for _ in range(num_reads):
        try:
            content = read(store, KEY)
            check_record(KEY, content)
            assert content == record_of(KEY)
            outcomes.append("right")
        except (StoreError, RecordError) as error:
            outcomes.append(type(error).__name__)
    if mode == "throttled":
        assert outcomes == ["right"] * 2  # 1.6 MB at 1 MB/s: slow, and yet no reason to give up
    else:
        assert "right" not in outcomes
    proxy.mode = "good"
    proxy.cut()
    wait_until_read(store, KEY, record_of(KEY))
    store.close()


def test_an_upload_longer_than_the_timeout(line: tuple[FaultyProxy, str]) -> None:
    proxy, url = line
    store = open_store(url)
    proxy.mode = "narrow"
    record = record_of(KEY, 400_000)
    store.replace(KEY, record)  # 3.2 MB at 2 MB/s take three times as long
    proxy.mode = "good"
    assert read(store, KEY) == record
    store.close()


@pytest.mark.parametrize("mode", ["silent", "dead", "half-closed", "wrong"])
def test_tiers_over_a_bad_line(line: tuple[FaultyProxy, str], mode: str, tmp_path: Path) -> None:
    """What is near stays readable, what is written is kept, and nothing wrong is copied."""
    proxy, url = line
    near, far, new = (key_number(number) for number in range(1, 4))
    remote = open_store(url)
    for key in (near, far):
        remote.replace(key, record_of(key))
    remote.delete(new)
    store = open_store(f"tiered:memory:?limit=4MB|file:{tmp_path}?limit=9MB|{url}")
    assert read(store, near) == record_of(near)
    proxy.mode = mode
    assert read(store, near) == record_of(near)
    try:
        content = read(store, far)
        with pytest.raises(RecordError):
            check_record(far, content)
    except (StoreError, RecordError):
        pass
    store.put(new, record_of(new))
    assert read(store, new) == record_of(new)
    proxy.mode = "good"
    proxy.cut()
    wait_until_read(store, far, record_of(far))
    store.close()
    wait_until_read(remote, new, record_of(new))
    remote.close()
