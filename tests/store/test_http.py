"""`HttpStore` against a web server that hands out the files of a folder, and against others."""

import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.codec.container import write_record
from kvrag.errors import ParameterError, StoreError, StoreUnreachableError
from kvrag.store.base import Store, StoreWrapper, read_whole
from kvrag.store.file import FileStore
from kvrag.store.objects import TOKEN_VARIABLE, HttpStore
from kvrag.store.registry import open_store
from kvrag_testing.codec_contract import spec_of
from kvrag_testing.store_contract import StoreContract, key_number, record_of, stored
from tests.support import folders
from tests.support.proxy import FaultyProxy
from tests.support.servers import answering, free_port, reply
from tests.support.web_server import TOKEN, WebServer, make_certificate

KEY = key_number(0)
DATE = "Fri, 27 Nov 2026 10:00:00 GMT"


@pytest.fixture
def behind(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "kv")


@pytest.fixture
def server(behind: FileStore) -> Iterator[WebServer]:
    with WebServer(behind.path) as server:
        yield server


class Served(StoreWrapper):
    """Reads through the web server; all else is done in the folder that it serves."""

    def __init__(self, inner: HttpStore, folder: FileStore) -> None:
        super().__init__(inner)
        self.put, self.replace, self.delete = folder.put, folder.replace, folder.delete
        self.sizes, self.keys = folder.sizes, folder.keys
        self.folder = folder

    def counts(self):
        return (*self.inner.counts(), *self.folder.counts())


class TestHttpStore(StoreContract):
    keeps_old = False

    @pytest.fixture
    def store(self, server: WebServer, behind: FileStore) -> Served:
        return Served(HttpStore(server.url), behind)

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        folders.plant(store.folder.path, key, record)  # type: ignore[attr-defined]

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        return folders.peek(store.folder.path, key)  # type: ignore[attr-defined]


def record_with_blocks(fill: int = 0, block_bytes: int = 100_000) -> bytes:
    blocks = [[bytes([number + fill]) * block_bytes] for number in range(1, 9)]
    return write_record(KEY, codec="test", spec=spec_of(), num_tokens=5, blocks=blocks)


def test_it_is_only_read(server: WebServer, behind: FileStore) -> None:
    behind.put(KEY, b"record")
    store = open_store(server.url)
    store.put(KEY, b"another")  # an existing record stays
    calls = {
        "write": [lambda: store.put(key_number(1), b""), lambda: store.replace(KEY, b"another")],
        "delete": [lambda: store.delete(KEY)],
        "list": [lambda: list(store.sizes()), lambda: list(store.keys())],
    }
    for action, all_of in calls.items():
        for call in all_of:
            with pytest.raises(StoreError, match=f"cannot {action} .* a web server is only read"):
                call()
    assert not store.delete(key_number(1))
    assert stored(store, KEY) == b"record"  # a refusal is no silence: nothing is spared
    store.close()


def test_a_server_of_version_0_2() -> None:
    body = b'{"service": "kvrag", "protocol": 1, "is_writable": false}'
    answer = partial(reply, status=200, body=body, Last_Modified=DATE)
    with answering(answer) as endpoint, pytest.raises(StoreError, match="let any web server serve"):
        open_store(endpoint)


# -- tokens and TLS -----------------------------------------------------------------------------


def test_tokens(behind: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind.put(KEY, b"record")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    with WebServer(behind.path, token=TOKEN) as server:
        for must_answer in (True, False):
            with pytest.raises(StoreError, match=f"access is refused .* set {TOKEN_VARIABLE}"):
                open_store(server.url, must_answer=must_answer)
        store = open_store(f"{server.url}?token_file={token_file}")
        assert stored(store, KEY) == b"record"
        assert TOKEN not in store.url
        assert f"token_file={token_file}" in store.url
        monkeypatch.setenv(TOKEN_VARIABLE, "wrong-word")
        with pytest.raises(StoreError, match="access is refused") as caught:
            open_store(server.url)
        assert "wrong-word" not in str(caught.value)
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        assert stored(open_store(server.url), KEY) == b"record"


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0, "No such file"),
        ("two words", 0o600, "one line of visible ASCII"),
        ("word", 0o644, "chmod 600"),
    ],
)
def test_token_files(tmp_path: Path, text: str | None, mode: int, message: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ParameterError, match=message):
        open_store(f"http://127.0.0.1:1?token_file={path}")


def test_tls(behind: FileStore, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    behind.put(KEY, record_of(KEY, 300_000))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with WebServer(behind.path, tls=context) as server:
        store = open_store(f"{server.url}?ca={certificate}")
        assert stored(store, KEY) == record_of(KEY, 300_000)
        with pytest.raises(StoreError, match=r"certificate is not trusted.*\?ca=FILE"):
            open_store(server.url)
        with pytest.raises(StoreUnreachableError):
            HttpStore(server.url.replace("https", "http"), timeout_seconds=2)
    for path, why in ((key, "no certificates in PEM"), (tmp_path / "absent.pem", "No such file")):
        with pytest.raises(ParameterError, match=why):
            HttpStore("https://127.0.0.1:1", ca=str(path))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://", "a server is"),
        ("http://host:port", "a server is"),
        ("http://host:99999", "a server is"),
        ("http://kv..example", "a server is"),
        ("http://" + "a" * 70, "a server is"),
        ("http://host/a b", "a server is"),
        ("http://host/\u00e4", "a server is"),
        ("http://:secret@host", "a URL is seen by others"),
        ("http://user:secret w@host", r"a server is .*found 'http://\*{3}@host'"),
        ("http://user:secret\u00e4@host", "a server is"),
        ("http://user:secret/w@host", "a server is"),
        ("http://user:w@secret:1:2@host", "a server is"),
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


def test_reading_is_broken_off(server: WebServer, behind: FileStore) -> None:
    behind.put(KEY, record_with_blocks(block_bytes=1_000_000))
    with FaultyProxy(server.port) as proxy:
        store = open_store(f"http://127.0.0.1:{proxy.port}/kv")
        record = store.open(KEY)
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
        record.cancel()
        reader.join()
        (failure,) = failures
        assert type(failure) is StoreError
        assert "broken off" in str(failure)
        proxy.mode = "good"
        assert stored(store, KEY) == record_with_blocks(block_bytes=1_000_000)  # no pause for it


@pytest.mark.parametrize("kind", ["html", "changes tags", "ignores ranges", "no tags", "error"])
def test_another_server(kind: str) -> None:
    """Never other bytes than those of one record, whatever answers."""
    whole = bytes(range(250)) * 400

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range", "")
        if kind == "error" or handler.path == "/v1":
            handler.send_error(500 if kind == "error" else 404)
            return
        status, first, last, headers = 200, 0, len(whole) - 1, {"Last_Modified": DATE}
        if asked and kind not in ("html", "ignores ranges"):
            status = 206
            first, last = (int(one) for one in asked.removeprefix("bytes=").split("-"))
            headers["Content_Range"] = f"bytes {first}-{last}/{len(whole)}"
        body = b"<html>welcome</html>" if kind == "html" else whole[first : last + 1]
        if kind == "changes tags" and first and "If-Match" in handler.headers:
            body = bytes(len(body))
        if kind != "no tags":
            headers["ETag"] = '"b"' if first else '"a"'
        reply(handler, status, body, **headers)

    with answering(answer) as endpoint:
        if kind == "error":
            with pytest.raises(StoreUnreachableError):
                HttpStore(endpoint)
            return
        store = HttpStore(endpoint)
        if kind == "no tags":
            assert stored(store, KEY) == whole
            return
        with pytest.raises(StoreError):
            stored(store, KEY)


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnreachableError, match="check the endpoint and the network"):
        open_store(url)
    store = open_store(url, must_answer=False)
    with pytest.raises(StoreUnreachableError):
        store.open(KEY)
