"""The plug-in as any store: `pip install -e .`, then ``pytest`` in this folder."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvrag_mooncake
import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreUnreachableError
from kvrag.store.base import Store
from kvrag.store.registry import open_store
from kvrag.store.remote import RemoteStore
from kvrag_testing.store_contract import StoreContract, key_number, record_of, stored

SEGMENT = 64 << 20


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


class Master:
    def __init__(self, folder: Path) -> None:
        library = pytest.importorskip("mooncake", reason="Mooncake is not installed")
        pytest.importorskip("mooncake.store", reason="it lacks libibverbs", exc_type=ImportError)
        self.port, self.metrics_port = free_port(), free_port()
        binary = Path(library.__path__[0]) / "mooncake_master"
        binary.chmod(0o755)
        with (folder / "master.log").open("wb") as log:
            self.process = subprocess.Popen(
                [binary, f"-rpc_port={self.port}", f"-metrics_port={self.metrics_port}"],
                stdout=log,
                stderr=log,
            )

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def open(self, segment_bytes: int = SEGMENT) -> RemoteStore:
        for attempt in range(50):
            try:
                return kvrag_mooncake.MooncakeStore(
                    self.url, segment_bytes=segment_bytes, metrics_port=self.metrics_port
                )
            except StoreUnreachableError:
                if attempt == 49:
                    raise
                time.sleep(0.2)
        raise AssertionError

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    running = Master(tmp_path_factory.mktemp("mooncake"))
    yield running
    running.end()


@pytest.fixture(scope="module")
def pool(master: Master) -> Iterator[RemoteStore]:
    """The store whose process has added the memory."""
    store = master.open()
    yield store
    store.close()


class TestMooncakeStore(StoreContract):
    @pytest.fixture
    def store(self, pool: RemoteStore) -> RemoteStore:
        pool._client().remove_all(True)
        return pool

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        store._client().upsert(f"kvrag-{key}", b"k" + record)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        content: bytes = store._client().get(f"kvrag-{key}")
        return content[1:]


def test_another_process_adds_nothing_and_reads(master: Master, pool: RemoteStore) -> None:
    key = key_number(1)
    pool.replace(key, record_of(key))
    options = f"metrics_port={master.metrics_port}"
    other = open_store(f"tiered:memory:|{master.url}?{options}")
    assert stored(other, key) == record_of(key)
    assert [counts.hits for counts in other.counts()] == [0, 1]
    other.close()


def test_no_master(tmp_path: Path) -> None:
    Master(tmp_path).end()  # or a skip without Mooncake
    with pytest.raises(StoreUnreachableError, match="does not answer"):
        kvrag_mooncake.MooncakeStore(f"mooncake://127.0.0.1:{free_port()}")
    later = kvrag_mooncake.MooncakeStore(f"mooncake://127.0.0.1:{free_port()}", must_answer=False)
    with pytest.raises(StoreUnreachableError, match="does not answer"):
        later.open(key_number(0))
    later.close()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = dict.fromkeys(("mooncake", "mooncake.store"))
    for name, none in modules.items():
        monkeypatch.setitem(sys.modules, name, none)
    with pytest.raises(ParameterError, match="pip install"):
        open_store("mooncake://127.0.0.1:1")
