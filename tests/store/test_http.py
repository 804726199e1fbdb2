"""`HttpStore` against the server of `kvrag serve-kv`, and against others."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.codec.container import write_record
from kvrag.errors import ParameterError, RecordError, StoreError, StoreUnreachableError
from kvrag.recordformat import check_record
from kvrag.store.base import Store, StoredRecord
from kvrag.store.capabilities import capability
from kvrag.store.file import FileStore
from kvrag.store.http import HttpStore
from kvrag.store.http_protocol import RECORDS, TOKEN_VARIABLE
from kvrag.store.memory import MemoryStore
from kvrag.store.registry import open_store
from kvrag.store.server import RecordServer, tls_context
from kvrag.store.wrapper import RecordWrapper, StoreWrapper, read_whole
from kvrag.testing.codec_contract import spec_of
from kvrag.testing.store_contract import StoreContract, key_number, read_all, record_of, stored
from tests.store.test_objects import serving
from tests.support.kv_server import TOKEN, KVServer, make_certificate
from tests.support.proxy import FaultyProxy
from tests.support.servers import free_port
from tests.support.waiting import wait_until

KEY = key_number(0)


@pytest.fixture
def behind() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def server(behind: MemoryStore) -> Iterator[KVServer]:
    with KVServer(behind, is_writable=True) as server:
        yield server


class TestHttpStore(StoreContract):
    keeps_old = False

    @pytest.fixture(params=["memory", "file"])
    def behind(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        self.inner = MemoryStore() if request.param == "memory" else FileStore(tmp_path)
        return self.inner

    @pytest.fixture
    def store(self, server: KVServer) -> Iterator[HttpStore]:
        store = HttpStore(server.url)
        yield store
        store.close()

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        self.inner.replace(key, record)

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        found = stored(self.inner, key)
        assert found is not None
        return found


def record_with_blocks(fill: int = 0, block_bytes: int = 100_000) -> bytes:
    blocks = [[bytes([number + fill]) * block_bytes] for number in range(1, 9)]
    return write_record(KEY, codec="test", spec=spec_of(), num_tokens=5, blocks=blocks)


# -- the protocol, as any client would speak it -------------------------------------------------


def ask(
    server: KVServer, method: str, path: str, headers: dict[str, str] | None = None, **more: object
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path, headers=headers or {}, **more)  # type: ignore[arg-type]
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("range_", "status", "first", "end"),
    [
        (None, 200, 0, 1000),
        ("bytes=0-0", 206, 0, 1),
        ("bytes=10-19", 206, 10, 20),
        ("bytes=990-", 206, 990, 1000),
        ("bytes=990-5000", 206, 990, 1000),
        ("bytes=-7", 206, 993, 1000),
        ("bytes=-7000", 206, 0, 1000),
        ("bytes=0-1,5-6", 200, 0, 1000),  # several ranges may be answered with everything
        ("lines=0-1", 200, 0, 1000),
    ],
)
def test_ranges(
    server: KVServer, behind: MemoryStore, range_: str | None, status: int, first: int, end: int
) -> None:
    behind.put(KEY, record_of(KEY))
    headers = {} if range_ is None else {"Range": range_}
    found, fields, body = ask(server, "GET", f"{RECORDS}/{KEY}", headers)
    assert (found, body) == (status, record_of(KEY)[first:end])
    if status == 206:
        assert fields["Content-Range"] == f"bytes {first}-{end - 1}/1000"
    found, fields, body = ask(server, "HEAD", f"{RECORDS}/{KEY}", headers)
    assert (found, fields["Content-Length"], body) == (status, str(end - first), b"")


@pytest.mark.parametrize("range_", ["bytes=1000-", "bytes=1000-1001", "bytes=-0", "bytes=5-4"])
def test_ranges_that_hold_nothing(server: KVServer, behind: MemoryStore, range_: str) -> None:
    behind.put(KEY, record_of(KEY))
    status, fields, _ = ask(server, "GET", f"{RECORDS}/{KEY}", {"Range": range_})
    assert (status, fields["Content-Range"]) == (416, "bytes */1000")


def test_a_tag_that_is_no_longer_the_records(server: KVServer, behind: MemoryStore) -> None:
    behind.put(KEY, record_of(KEY))
    _, fields, _ = ask(server, "GET", f"{RECORDS}/{KEY}")
    match = {"If-Match": fields["ETag"]}
    assert ask(server, "GET", f"{RECORDS}/{KEY}", match)[0] == 200
    assert ask(server, "GET", f"{RECORDS}/{KEY}", {"If-Match": '"x", ' + fields["ETag"]})[0] == 200
    behind.replace(KEY, bytes(1000))
    assert ask(server, "GET", f"{RECORDS}/{KEY}", match)[0] == 412
    assert ask(server, "GET", f"{RECORDS}/{KEY}", {"If-Match": "*"})[0] == 200


def test_tags_tell_records_apart(server: KVServer, behind: MemoryStore, tmp_path: Path) -> None:
    """Those with a header by it, encrypted ones by their salt, others by every byte."""
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    key_file.chmod(0o600)
    encrypted = open_store(f"memory:?key_file={key_file}")
    kept = capability(encrypted, MemoryStore)
    assert kept is not None
    contents = [record_with_blocks(), record_with_blocks(1), record_of(KEY), bytes(600_000)]
    contents.append(bytes(599_999) + b"x")
    for _ in range(2):
        encrypted.replace(KEY, record_with_blocks())
        contents.append(stored(kept, KEY) or b"")
    tags = []
    for content in [*contents, contents[0]]:
        behind.replace(KEY, content)
        tags.append(ask(server, "HEAD", f"{RECORDS}/{KEY}")[1]["ETag"])
    assert len(set(tags)) == len(contents)
    assert tags[0] == tags[-1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", f"{RECORDS}/{KEY}", 404),
        ("GET", f"{RECORDS}/../{KEY}", 404),
        ("GET", f"{RECORDS}/{KEY.digest.upper()}", 404),
        ("GET", f"{RECORDS}/{KEY}/x", 404),
        ("DELETE", f"{RECORDS}/{KEY}", 404),
        ("POST", f"{RECORDS}/{KEY}", 501),
    ],
)
def test_what_is_not_there(server: KVServer, method: str, path: str, status: int) -> None:
    assert ask(server, method, path)[0] == status


def test_a_server_that_only_reads(behind: MemoryStore) -> None:
    behind.put(KEY, b"record")
    with KVServer(behind) as server:
        assert ask(server, "PUT", f"{RECORDS}/{KEY}", body=b"other")[0] == 403
        assert ask(server, "DELETE", f"{RECORDS}/{KEY}")[0] == 403
        store = open_store(server.url)
        for write in (store.put, store.replace):
            with pytest.raises(StoreError, match="only reads: start it with --writable"):
                write(KEY, b"other")
        assert stored(store, KEY) == b"record"  # a refusal is no silence: nothing is spared
        store.close()


def test_a_body_is_asked_for_by_who_will_take_it(behind: MemoryStore) -> None:
    request = (
        f"PUT {RECORDS}/{KEY} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n"
        "Authorization: Bearer {}\r\n\r\n"
    )
    with KVServer(behind, token=TOKEN, is_writable=True) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as line:
            line.sendall(request.format("wrong").encode())
            assert line.recv(4096).startswith(b"HTTP/1.1 401 ")
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as line:
            line.sendall(request.format(TOKEN).encode())
            assert line.recv(4096).startswith(b"HTTP/1.1 100 ")
            line.sendall(b"abc")
            assert line.recv(4096).startswith(b"HTTP/1.1 204 ")
    assert stored(behind, KEY) == b"abc"


# -- tokens and TLS -----------------------------------------------------------------------------


def test_tokens(behind: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind.put(KEY, b"record")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    with KVServer(behind, token=TOKEN) as server:
        with pytest.raises(StoreError, match=rf"no token; put .* in {TOKEN_VARIABLE}"):
            open_store(server.url)
        with pytest.raises(StoreError, match="no token"):
            open_store(server.url, must_answer=False)
        store = open_store(f"{server.url}?token_file={token_file}")
        assert stored(store, KEY) == b"record"
        assert TOKEN not in store.url
        assert f"token_file={token_file}" in store.url
        for wrong in (TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "x"):
            monkeypatch.setenv(TOKEN_VARIABLE, wrong)
            with pytest.raises(StoreError, match="the token is not this server's") as caught:
                open_store(server.url)
            assert wrong not in str(caught.value).split()
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        again = open_store(server.url)
        assert stored(again, KEY) == b"record"
        for one in (store, again):
            one.close()
        status, fields, _ = ask(server, "GET", RECORDS, {"Authorization": f"Basic {TOKEN}"})
        assert (status, fields["WWW-Authenticate"]) == (401, "Bearer")
        assert ask(server, "GET", RECORDS, {"Authorization": f"bearer  {TOKEN}"})[0] == 200


def test_token_files(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    path = tmp_path / "token"
    with pytest.raises(ParameterError, match="No such file"):
        open_store(f"{url}?token_file={path}")
    path.write_text("two words")
    path.chmod(0o600)
    with pytest.raises(ParameterError, match="one line of visible ASCII"):
        open_store(f"{url}?token_file={path}")
    path.write_text("word")
    path.chmod(0o644)
    with pytest.raises(ParameterError, match="chmod 600"):
        open_store(f"{url}?token_file={path}")


def test_nobody_serves_a_network_without_a_token(behind: MemoryStore) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1"):
        with pytest.raises(ParameterError, match="without a token"):
            RecordServer(behind, host, 0)


def test_tls(behind: MemoryStore, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    behind.put(KEY, record_of(KEY, 300_000))
    with KVServer(behind, tls=tls_context(str(certificate), str(key))) as server:
        assert server.url.startswith("https://")
        store = open_store(f"{server.url}?ca={certificate}")
        assert stored(store, KEY) == record_of(KEY, 300_000)
        store.close()
        with pytest.raises(StoreError, match=r"certificate is not trusted .*\?ca=FILE"):
            open_store(server.url)
        with pytest.raises(StoreUnreachableError):
            HttpStore(server.url.replace("https", "http"), timeout_seconds=2)
    with pytest.raises(ParameterError, match="no certificate and key"):
        tls_context(str(tmp_path / "absent.pem"), None)
    with pytest.raises(ParameterError, match="no certificates in PEM"):
        HttpStore("https://127.0.0.1:1", ca=str(key))


def test_a_server_without_tls(server: KVServer) -> None:
    with pytest.raises(StoreUnreachableError, match="check that 'kvrag serve-kv' runs"):
        HttpStore(server.url.replace("http", "https"), timeout_seconds=2)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://", "a server is"),
        ("http://host:port", "no URL"),
        ("http://host:99999", "no URL"),
        ("http://kv..example", "no URL"),
        ("http://" + "a" * 70, "no URL"),
        ("http://host/a b", "no URL"),
        ("http://host/\u00e4", "no URL"),
        ("http://:secret@host", "a URL is seen by others"),
        ("http://host#x", "a server is"),
        ("http://host?tokenfile=x", "has no option"),
        ("http://host?ca=/x", "of https:// only"),
        ("http://host?timeout=0", "above 0"),
        ("http:host", "a store is"),
    ],
)
def test_bad_urls(url: str, why: str) -> None:
    with pytest.raises(ParameterError, match=why) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


# -- records that change, servers that fail -----------------------------------------------------


def test_a_replaced_record_is_never_mixed(server: KVServer, behind: MemoryStore) -> None:
    old, new = record_with_blocks(), record_with_blocks(1)
    behind.put(KEY, old)
    store = HttpStore(server.url)
    record = store.open(KEY)
    assert record is not None
    behind.replace(KEY, new)
    # The connection that opened it still has it open; another one finds that it is gone.
    assert read_all(record) == old
    store.close()
    with pytest.raises(StoreError, match="deleted or replaced since it was opened"):
        read_all(record)
    assert stored(store, KEY) == new
    store.close()


def test_a_server_that_ends_answers_what_it_has_begun(behind: MemoryStore) -> None:
    class Slow(StoreWrapper):
        def open(self, key: ChunkKey) -> StoredRecord | None:
            record = self.inner.open(key)
            return None if record is None else SlowRecord(record)

    class SlowRecord(RecordWrapper):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if buffer.nbytes > 100:
                begun.set()
                time.sleep(0.05)
            self.inner.read_into(offset, buffer)

    begun = threading.Event()
    behind.put(KEY, record_with_blocks(block_bytes=300_000))
    server = KVServer(Slow(behind))
    store = HttpStore(server.url)
    idle = HttpStore(server.url)
    found: list[bytes | None] = []

    def read() -> None:
        with contextlib.suppress(StoreError):
            found.append(stored(store, KEY))

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(120)
    server.stop(grace_seconds=10)
    reader.join()
    # What had begun is whole, or what came after it was refused.
    assert found in ([record_with_blocks(block_bytes=300_000)], [])
    with pytest.raises(StoreUnreachableError):
        idle.contains(KEY)


def test_reading_is_broken_off(behind: MemoryStore) -> None:
    behind.put(KEY, record_with_blocks(block_bytes=1_000_000))
    with KVServer(behind) as server, FaultyProxy(server.port) as proxy:
        store = open_store(f"http://127.0.0.1:{proxy.port}")
        record = store.open(KEY)
        assert record is not None
        proxy.mode = "throttled"  # 8 MB at 1 MB/s
        failures: list[Exception] = []

        def read() -> None:
            try:
                read_whole(record)
            except Exception as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.2)
        assert isinstance(record, RecordWrapper)
        record.cancel()
        reader.join()
        (failure,) = failures
        assert type(failure) is StoreError
        assert "broken off" in str(failure)
        proxy.mode = "good"
        assert stored(store, KEY) == record_with_blocks(block_bytes=1_000_000)  # no pause for it
        store.close()


def is_readable(store: Store, content: bytes) -> bool:
    try:
        return stored(store, KEY) == content
    except StoreError:
        return False


@pytest.mark.parametrize("mode", ["slow", "silent", "dead", "half-closed", "throttled", "wrong"])
def test_a_bad_line(behind: MemoryStore, mode: str) -> None:
    content = record_with_blocks(block_bytes=50_000)
    behind.put(KEY, content)
    with KVServer(behind) as server, FaultyProxy(server.port) as proxy:
        store = open_store(f"http://127.0.0.1:{proxy.port}?timeout=0.8")
        proxy.mode = mode
        outcomes = []
        for _ in range(3):
            try:
                found = stored(store, KEY)
                assert found is not None
                check_record(KEY, found)
                outcomes.append("right" if found == content else "wrong")
            except (StoreError, RecordError):
                outcomes.append("refused")
        assert outcomes == (["right"] * 3 if mode == "throttled" else ["refused"] * 3)
        proxy.mode = "good"
        proxy.cut()
        wait_until(lambda: is_readable(store, content))
        store.close()


class Listing(StoreWrapper):
    """A store that fails while it is listed."""

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        for number in range(3000):
            yield key_number(number), 5
        raise StoreUnreachableError("gone")


def test_a_list_that_breaks_off_is_no_shorter_list(behind: MemoryStore) -> None:
    with KVServer(Listing(behind)) as server:
        store = HttpStore(server.url)
        with pytest.raises(StoreUnreachableError):
            store.sizes()
        store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own(server: KVServer, behind: MemoryStore) -> None:
    """Of one that both read from each would get the other's answers."""
    behind.put(KEY, b"record")
    store = HttpStore(server.url)
    assert stored(store, KEY) == b"record"
    child = os.fork()
    if not child:
        os._exit(int(store._take()[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    connection, is_used = store._take()
    assert is_used
    connection.close()


@pytest.mark.parametrize(
    "kind", ["another", "html", "nested", "changes tags", "ignores ranges", "error"]
)
def test_another_server(kind: str) -> None:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        body = b"[" * 5000 if kind == "nested" else b"<html>welcome</html>"
        if kind not in ("html", "nested") and handler.path == "/v1":
            body = b'{"service": "kvrag", "protocol": %d}' % (2 if kind == "another" else 1)
            handler.send_response(200)
        elif kind == "error":
            handler.send_error(500)
            return
        elif kind == "ignores ranges" and "If-Match" in handler.headers:
            handler.send_response(200)
        elif "If-Match" in handler.headers or handler.path.startswith("/v1/"):
            first = 0 if "If-Match" not in handler.headers else 4096
            body = b"x" * (4096 if first == 0 else 100_000 - 4096)
            handler.send_response(206)
            handler.send_header("ETag", '"a"' if first == 0 else '"b"')
            handler.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/100000")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with serving(answer) as endpoint:
        if kind in ("another", "html", "nested"):
            with pytest.raises(StoreError, match="no server of this kvrag"):
                HttpStore(endpoint)
            return
        store = HttpStore(endpoint)
        with pytest.raises(StoreError):
            stored(store, KEY)
        store.close()


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnreachableError, match="check that 'kvrag serve-kv' runs there"):
        open_store(url)
    store = open_store(url, must_answer=False)
    with pytest.raises(StoreUnreachableError):
        store.open(KEY)


def test_connections_that_the_server_has_closed(behind: MemoryStore) -> None:
    behind.put(KEY, b"record")
    first = KVServer(behind)
    store = HttpStore(first.url)
    assert stored(store, KEY) == b"record"
    first.stop()
    with KVServer(behind, port=first.port):
        assert stored(store, KEY) == b"record"
    store.close()
