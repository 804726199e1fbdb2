"""Records in Mooncake Store: the memory of several machines as one pool, over TCP or RDMA.

It is a cache: the pool forgets the records that were used longest ago when it is full, and all of
them with its master. A record is read whole when it is opened, in one transfer, since a reader
could not tell a range of a record from that of the one that replaces it meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreError, StoreUnreachableError
from kvrag.store.memory import MemoryRecord
from kvrag.store.metrics import MISS_ABSENT, MISS_UNREADABLE, StoreMetrics
from kvrag.store.registry import parse_bytes
from kvrag.store.remote import Options, RemoteStore

_PREFIX = "kvrag-"
# Before each record: what comes back for a name without a value is empty, and so may a record be.
_MARK = b"k"
_BUFFER_BYTES = 64 << 20
_NO_SPACE, _ABSENT = -200, -704
_LIST_SECONDS = 10.0
_PAUSES = (0.01, 0.05, 0.2, 0.5, 0.0)


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError(f"expected tcp or rdma, found {shown(text)}")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"expected a port, found {shown(text)}")
    return int(text)


class MooncakeStore(RemoteStore):
    """Records in the pool of one Mooncake master.

    Parameters
    ----------
    url
        ``mooncake://HOST:PORT`` of the master's RPC service.
    segment_bytes
        Memory that this process adds to the pool, as long as the store is open. Without any, other
        processes must have added some.
    host
        Name or address under which other machines reach this one.
    protocol
        ``"tcp"`` or ``"rdma"``.
    metrics_port
        The master's HTTP port, which lists the records.
    must_answer
        Raise if the master is unreachable now; otherwise it may become reachable later.

    Raises
    ------
    ParameterError
        When the URL is invalid, or the library is not installed or lacks one of the system's.
    StoreUnreachableError
        When the master does not answer.
    """

    options: ClassVar[Options] = {
        "segment": ("segment_bytes", parse_bytes),
        "host": ("host", str),
        "protocol": ("protocol", _protocol),
        "metrics_port": ("metrics_port", _port),
    }

    def __init__(
        self,
        url: str,
        *,
        segment_bytes: int = 0,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        metrics_port: int = 9003,
        must_answer: bool = True,
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or not parts.port or parts.path.strip("/"):
            raise ParameterError(f"store {shown(url)}: expected mooncake://HOST:PORT")
        self.url = f"mooncake://{parts.netloc}"
        self.metrics = StoreMetrics("mooncake")
        self._master = parts.netloc
        self._list_url = f"http://{parts.hostname}:{metrics_port}/get_all_keys"
        self._setup = {
            "local_hostname": host,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": str(segment_bytes),
            "local_buffer_size": str(_BUFFER_BYTES),
            "protocol": protocol,
            "rdma_devices": "",
            "master_server_addr": self._master,
        }
        self._kind = _library().MooncakeDistributedStore
        self._lock = threading.Lock()
        self._connected: Any = None
        if must_answer:
            self._client()

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Write a record; an existing record stays. Raises StoreError if the pool is full."""
        self._check(self._client().put_parts(_name(key), _MARK, record), "write to")
        self.metrics.wrote(len(record))

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Write a record in place of the existing one; those who opened that one keep it."""
        self._check(self._client().upsert_parts(_name(key), _MARK, record), "write to")
        self.metrics.wrote(len(record))

    def open(self, key: ChunkKey) -> MemoryRecord | None:
        """Read a record, or return None if there is none.

        Raises
        ------
        StoreError
            When the pool does not deliver it.
        """
        with self.metrics.timing():
            try:
                content = self._read(key)
            except StoreError:
                self.metrics.miss(MISS_UNREADABLE)
                raise
        if content is None:
            self.metrics.miss(MISS_ABSENT)
            return None
        self.metrics.hit()
        return MemoryRecord(key, content[len(_MARK) :], self.metrics)

    def contains(self, key: ChunkKey) -> bool:
        """Return whether there is a record for `key`."""
        return self._check(self._client().is_exist(_name(key)), "ask") == 1

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one."""
        code = self._client().remove(_name(key), True)
        return code != _ABSENT and self._check(code, "delete from") == 0

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, in no particular order."""
        try:
            with urlopen(self._list_url, timeout=_LIST_SECONDS) as response:
                names = response.read().decode(errors="replace").split("\n")
        except (URLError, OSError) as error:
            raise StoreUnreachableError(
                f"cannot list {self.url}: {self._list_url} does not answer ({error}); start the "
                "master, or give its -metrics_port as metrics_port="
            ) from error
        for name in names:
            with contextlib.suppress(ValueError):
                key = ChunkKey(name.removeprefix(_PREFIX))
                size = self._client().get_size(name) if name == _name(key) else _ABSENT
                if size > 0:  # not forgotten meanwhile
                    yield key, size - len(_MARK)

    def close(self) -> None:
        """Leave the pool; what this process has added to it is gone."""
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            client.close()

    # -- private -----------------------------------------------------------------------------

    def _read(self, key: ChunkKey) -> bytes | None:
        for pause in _PAUSES:
            content: bytes = self._client().get(_name(key))
            if content:
                return content
            if not self.contains(key):
                return None
            time.sleep(pause)  # another process is still writing it
        raise StoreError(
            f"cannot read record {key} from {self.url}: the machine that holds it does not "
            "answer; start it, or wait until the master forgets it"
        )

    def _client(self) -> Any:
        with self._lock:
            if self._connected is None:
                client = self._kind()
                if client.setup(self._setup):
                    raise StoreUnreachableError(
                        f"cannot open {self.url}: the master does not answer; start it with "
                        f"'mooncake_master -rpc_port PORT', or check host and port"
                    )
                self._connected = client
            return self._connected

    def _check(self, code: int, action: str) -> int:
        """Return a call's result, or raise StoreError if it is the number of an error."""
        if code >= 0:
            return code
        if code == _NO_SPACE:
            raise StoreError(
                f"cannot {action} {self.url}: the pool has no room; add memory to it "
                "(?segment=SIZE), or store smaller records (a codec)"
            )
        raise StoreUnreachableError(
            f"cannot {action} {self.url}: Mooncake's error {code}; see the log of the master"
        )


def _name(key: ChunkKey) -> str:
    return f"{_PREFIX}{key}"


def _library() -> Any:
    try:
        import mooncake.store
    except ImportError as error:
        raise ParameterError(
            f"this store needs Mooncake's library, which cannot be loaded ({error}): "
            "pip install mooncake-transfer-engine-non-cuda, and the system's libibverbs1"
        ) from error
    return mooncake.store
