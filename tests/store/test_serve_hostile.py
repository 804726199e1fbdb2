"""`kvrag serve-kv` among peers that send what they should not, or nothing."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError, StoreUnreachableError
from kvrag.store import server_admission, server_answers
from kvrag.store.base import StoredRecord
from kvrag.store.http import HttpStore
from kvrag.store.http_protocol import RECORDS, TOKEN_VARIABLE
from kvrag.store.memory import MemoryStore
from kvrag.store.registry import open_store
from kvrag.store.server import tls_context
from kvrag.store.server_admission import Admission, Connection, address_of
from kvrag.store.wrapper import StoreWrapper
from kvrag.testing.records import key_number, record_of, stored
from tests.support.kv_server import TOKEN, KVServer, make_certificate
from tests.support.waiting import wait_until

KEY = key_number(0)
PATH = f"{RECORDS}/{KEY}".encode()
HOST = b"Host: localhost\r\n"
NEXT = b"GET /v1 HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.fixture
def behind() -> MemoryStore:
    store = MemoryStore()
    store.put(KEY, record_of(KEY))
    return store


@pytest.fixture
def server(behind: MemoryStore) -> Iterator[KVServer]:
    with KVServer(behind, is_writable=True) as server:
        yield server


def connect(server: KVServer, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", server.port), timeout=60, source_address=(source, 0)
    )


def everything(line: socket.socket) -> bytes:
    """Return what comes until the server ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := line.recv(65536):
            found += piece
    return found


def sent(server: KVServer, content: bytes) -> bytes:
    with connect(server) as line:
        line.sendall(content)
        return everything(line)


# -- requests that can be read in two ways --------------------------------------------------------

GET = b"GET %s HTTP/1.1\r\n" + HOST
PUT = b"PUT %s HTTP/1.1\r\n" + HOST

MALFORMED = {
    "no length": (PUT + b"\r\n", b"411"),
    "negative length": (PUT + b"Content-Length: -1\r\n\r\n", b"400"),
    "signed length": (PUT + b"Content-Length: +3\r\n\r\nabc", b"400"),
    "length in hex": (PUT + b"Content-Length: 0x3\r\n\r\nabc", b"400"),
    "two lengths in one": (PUT + b"Content-Length: 3, 3\r\n\r\nabc", b"400"),
    "length too large": (PUT + b"Content-Length: 99999999999\r\n\r\n", b"413"),
    "length of many digits": (PUT + b"Content-Length: " + b"9" * 3000 + b"\r\n\r\n", b"400"),
    "chunks": (PUT + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
    "body of GET": (GET + b"Content-Length: 5\r\n\r\nhello", b"400"),
    "chunks of GET": (GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    "two lengths": (GET + b"Content-Length: 0\r\nContent-Length: 22\r\n\r\n" + NEXT, b"400"),
    "same length twice": (PUT + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", b"400"),
    "length and chunks": (
        PUT + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
        b"400",
    ),
    "chunks and length": (
        PUT + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + NEXT,
        b"400",
    ),
    "chunks misspelt": (PUT + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + NEXT, b"400"),
    "space before colon": (GET + b"Content-Length : 22\r\n\r\n" + NEXT, b"400"),
    "tab before colon": (GET + b"X\t: 22\r\n\r\n" + NEXT, b"400"),
    "space before name": (GET + b" Content-Length: 22\r\n\r\n" + NEXT, b"400"),
    "no colon": (GET + b"no header\r\nContent-Length: 22\r\n\r\n" + NEXT, b"400"),
    "empty name": (GET + b": 22\r\n\r\n" + NEXT, b"400"),
    "folded with space": (GET + b"X: a\r\n b\r\n\r\n" + NEXT, b"400"),
    "folded with tab": (GET + b"X: a\r\n\tContent-Length: 22\r\n\r\n" + NEXT, b"400"),
    "bare line feed in header": (GET + b"X: a\nY: b\r\n\r\n" + NEXT, b"400"),
    "bare line feed in request": (b"GET %s HTTP/1.1\n" + HOST + b"\r\n" + NEXT, b"400"),
    "bare line feed at the end": (GET + b"\n" + NEXT, b"400"),
    "bare carriage return": (GET + b"X: a\rY: b\r\n\r\n" + NEXT, b"400"),
    "NUL in value": (GET + b"X: a\0b\r\n\r\n" + NEXT, b"400"),
    "NUL in name": (GET + b"X\0: a\r\n\r\n" + NEXT, b"400"),
    "NUL in target": (b"GET %s\0 HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "long line": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "long value": (GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n" + NEXT, b"400"),
    "long name": (GET + b"a" * 20_000 + b": x\r\n\r\n" + NEXT, b"400"),
    "many headers": (GET + b"X: y\r\n" * 200 + b"\r\n" + NEXT, b"400"),
    "no host": (b"GET %s HTTP/1.1\r\n\r\n" + NEXT, b"400"),
    "two hosts": (GET + HOST + b"\r\n" + NEXT, b"400"),
    "two ranges": (GET + b"Range: bytes=0-1\r\nRange: bytes=0-5\r\n\r\n" + NEXT, b"400"),
    "two tags": (GET + b"If-Match: a\r\nIf-Match: b\r\n\r\n" + NEXT, b"400"),
    "two tokens": (GET + b"Authorization: a\r\nAuthorization: b\r\n\r\n" + NEXT, b"400"),
    "absolute form": (b"GET http://localhost%s HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "other host in target": (b"GET http://a%s HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "asterisk form": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "authority form": (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "upgrade": (GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n" + NEXT, b"400"),
    "websocket": (GET + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + NEXT, b"400"),
    "HTTP/0.9": (b"GET /v1\r\n\r\n", b"505"),
    "HTTP/0.9 with its version": (b"GET %s HTTP/0.9\r\n" + HOST + b"\r\n", b"505"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
    "GET of HTTP/2": (b"GET %s HTTP/2.0\r\n" + HOST + b"\r\n", b"505"),
    "HTTP/1.2": (b"GET %s HTTP/1.2\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "HTTP in small letters": (b"GET %s http/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "method in small letters": (b"get %s HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"400"),
    "unknown method": (b"MKCOL %s HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT, b"501"),
    "nonsense": (b"nonsense\r\n\r\n", b"400"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), b"400"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_ends_the_connection(
    server: KVServer, behind: MemoryStore, name: str
) -> None:
    request, status = MALFORMED[name]
    answer = sent(server, request.replace(b"%s", PATH))
    assert re.match(rb"HTTP/\d\.\d %s " % status, answer)
    # What was not read is not taken for a request.
    assert len(re.findall(rb"HTTP/\d\.\d \d\d\d ", answer)) == 1
    assert stored(behind, KEY) == record_of(KEY)


@pytest.mark.parametrize(
    "target",
    [
        f"{RECORDS}/../records/{KEY}",
        f"{RECORDS}/%2e%2e/records/{KEY}",
        f"{RECORDS}/{KEY}".replace("records", "%72ecords"),
        f"{RECORDS}/%{ord(str(KEY)[0]):02x}{str(KEY)[1:]}",
        f"{RECORDS}/{KEY}%00",
        f"{RECORDS}/{KEY}?x",
        f"{RECORDS}//{KEY}",
        f"/{RECORDS}/{KEY}",
        f"{RECORDS}/{KEY}/",
        f"{RECORDS};x/{KEY}",
        f"{RECORDS}/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/../v1",
        "/v1?",
    ],
)
def test_paths_are_taken_as_they_are_sent(server: KVServer, target: str) -> None:
    end = b" HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    assert sent(server, b"GET " + target.encode() + end).startswith(b"HTTP/1.1 404 ")


def test_pipelined_requests_are_answered_in_order(server: KVServer) -> None:
    """As few at a time as are read: ten thousand wait in the kernel."""
    asked = GET.replace(b"%s", PATH) + b"Range: bytes=%d-%d\r\n\r\n"
    last = GET.replace(b"%s", PATH) + b"Connection: close\r\n\r\n"
    content = b"".join(asked % (number, number) for number in range(500))
    answers = sent(server, content + last)
    found = [one[:30].split(b"-")[0] for one in answers.split(b"Content-Range: bytes ")[1:]]
    assert found == [b"%d" % number for number in range(500)]
    assert answers.endswith(record_of(KEY))


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("localhost", True),
        ("LocalHost:8650", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9", True),
        ("[::1]:8650", True),
        ("[::1]", True),
        ("evil.example", False),
        ("evil.example:8650", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("localhost:8650x", False),
        ("192.168.1.1", False),
        ("[::1", True),
        ("[::1]x", False),
        ("", False),
    ],
)
def test_without_a_token_a_server_answers_to_its_own_names(
    behind: MemoryStore, host: str, is_answered: bool
) -> None:
    """A page of another site may have its name lead to 127.0.0.1 (DNS rebinding)."""
    request = f"GET /v1 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    with KVServer(behind) as server:
        assert sent(server, request).startswith(
            b"HTTP/1.1 200 " if is_answered else b"HTTP/1.1 403 "
        )
    with KVServer(behind, token=TOKEN) as server:
        bearer = f"\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        assert sent(server, request.replace(b"\r\n\r\n", bearer)).startswith(b"HTTP/1.1 200 ")


# -- who takes too long ---------------------------------------------------------------------------


class Slow(StoreWrapper):
    """A store that opens nothing until it is let."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.may_go = threading.Event()
        self.num_waiting = 0

    def open(self, key: ChunkKey) -> StoredRecord | None:
        self.num_waiting += 1
        self.may_go.wait(120)
        return self.inner.open(key)


HEADS = {
    "silent": b"",
    "drips": b"GET /v1 HTTP/1.1\r\nHost: localhost\r\nX: ",
    "drips with the token": b"GET /v1 HTTP/1.1\r\nHost: localhost\r\n"
    b"Authorization: Bearer " + TOKEN.encode() + b"\r\nX: ",
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sources", [1, 8])
@pytest.mark.parametrize("token", ["", TOKEN])
def test_two_hundred_who_never_finish_keep_nobody_out(
    behind: MemoryStore, monkeypatch: pytest.MonkeyPatch, head: str, sources: int, token: str
) -> None:
    if token:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    with (
        KVServer(behind, token=token, max_connections=4) as server,
        contextlib.ExitStack() as open_,
    ):
        known = HttpStore(server.url)
        for number in range(200):
            line = open_.enter_context(connect(server, f"127.0.0.{1 + number % sources}"))
            line.sendall(HEADS[head])
        for _ in range(5):
            store = HttpStore(server.url, timeout_seconds=10)
            assert stored(store, KEY) == record_of(KEY)
            store.close()
        assert stored(known, KEY) == record_of(KEY)
        known.close()


@pytest.mark.parametrize("head", HEADS)
def test_a_header_has_a_deadline(
    behind: MemoryStore, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Whoever keeps sending as well as who does not."""
    monkeypatch.setattr(server_admission, "HEAD_SECONDS", 0.3)
    with KVServer(behind, token=TOKEN) as server, connect(server) as line:
        started = time.monotonic()
        line.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            line.sendall(HEADS[head])
            while time.monotonic() - started < 60:
                if head != "silent":
                    line.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not line.recv(100):
                        break
        assert 0.2 < time.monotonic() - started < 60


def test_the_next_header_has_a_deadline_too(
    behind: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_admission, "IDLE_SECONDS", 0.3)
    with KVServer(behind) as server, connect(server) as line:
        line.sendall(NEXT + b"GET /v1 HT")
        assert everything(line).count(b"HTTP/1.1 200") == 1


def test_a_handshake_has_a_deadline(
    behind: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_admission, "HEAD_SECONDS", 0.3)
    certificate, key = make_certificate(tmp_path)
    context = tls_context(str(certificate), str(key))
    with KVServer(behind, tls=context) as server, connect(server) as line:
        line.sendall(b"\x16\x03\x01")
        assert everything(line) == b""


def test_two_hundred_handshakes_that_never_end_keep_nobody_out(
    behind: MemoryStore, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = tls_context(str(certificate), str(key))
    with KVServer(behind, tls=context) as server, contextlib.ExitStack() as open_:
        for _ in range(200):
            open_.enter_context(connect(server)).sendall(b"\x16\x03\x01")
        store = open_store(f"{server.url}?ca={certificate}&timeout=10")
        assert stored(store, KEY) == record_of(KEY)
        store.close()


@pytest.mark.parametrize("keeps_sending", [False, True])
def test_a_body_has_a_deadline(
    behind: MemoryStore, monkeypatch: pytest.MonkeyPatch, keeps_sending: bool
) -> None:
    monkeypatch.setattr(server_answers, "SILENCE_SECONDS", 0.3)
    request = PUT.replace(b"%s", PATH) + b"Content-Length: 2000\r\n\r\n"
    with KVServer(behind, is_writable=True) as server, connect(server) as line:
        started = time.monotonic()
        line.sendall(request)
        line.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 60:
                if keeps_sending:
                    line.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not line.recv(100):
                        break
        assert 0.2 < time.monotonic() - started < 60
    assert stored(behind, KEY) == record_of(KEY)


def test_who_takes_nothing_is_let_go(behind: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answers, "SILENCE_SECONDS", 0.3)
    behind.replace(KEY, bytes(30_000_000))
    with KVServer(behind, max_connections=1) as server, connect(server) as line:
        line.sendall(GET.replace(b"%s", PATH) + b"\r\n")
        line.recv(1)

        def is_answered() -> bool:
            try:
                HttpStore(server.url).close()
            except StoreUnreachableError:
                return False
            return True

        wait_until(is_answered)
        assert len(everything(line)) < 30_000_000


# -- who may stay ---------------------------------------------------------------------------------


def test_too_many_at_work_are_told_to_come_again(behind: MemoryStore) -> None:
    slow = Slow(behind)
    with KVServer(slow, max_connections=2) as server:
        lines = [connect(server) for _ in range(2)]
        for line in lines:
            line.sendall(GET.replace(b"%s", PATH) + b"Connection: close\r\n\r\n")
        wait_until(lambda: slow.num_waiting == 2)
        with pytest.raises(StoreUnreachableError, match="503: too many connections"):
            HttpStore(server.url)
        slow.may_go.set()
        for line in lines:
            assert everything(line).startswith(b"HTTP/1.1 200 ")
            line.close()
        HttpStore(server.url).close()


def test_who_is_idle_makes_room(behind: MemoryStore) -> None:
    """He does not notice: his client opens another connection."""
    with KVServer(behind, max_connections=2) as server:
        stores = [HttpStore(server.url) for _ in range(5)]
        for store in [*stores, *stores]:
            assert stored(store, KEY) == record_of(KEY)
        for store in stores:
            store.close()


def test_a_wrong_token_makes_no_member(behind: MemoryStore) -> None:
    with KVServer(behind, token=TOKEN, max_connections=1) as server:
        bearer = b"Authorization: Bearer %s\r\n"
        with connect(server) as member, connect(server) as guest:
            member.sendall(NEXT[:-2] + bearer % TOKEN.encode() + b"\r\n")
            assert member.recv(4096).startswith(b"HTTP/1.1 200 ")
            guest.sendall(NEXT[:-2] + bearer % b"wrong" + b"\r\n")
            assert everything(guest).startswith(b"HTTP/1.1 401 ")
            member.sendall(NEXT[:-2] + bearer % TOKEN.encode() + b"\r\n")
            assert member.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_what_is_refused_comes_back_whole(behind: MemoryStore) -> None:
    """Though the body that came with it was not read."""
    with KVServer(behind) as server:
        store = HttpStore(server.url)
        for _ in range(3):
            with pytest.raises(StoreError, match="--writable"):
                store.put(KEY, bytes(3_000_000))
        store.close()


def test_nothing_is_left_of_connections_that_ended(
    behind: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once: some are driven away while their requests arrive."""
    monkeypatch.setattr(server_admission, "MAX_GUESTS", 6)
    monkeypatch.setattr(server_admission, "MAX_GUESTS_OF_ADDRESS", 4)
    monkeypatch.setattr(server_admission, "HEAD_SECONDS", 1.0)
    with KVServer(behind, max_connections=2) as server:

        def come_and_go(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(40):
                with contextlib.suppress(OSError), connect(server) as line:
                    line.sendall(NEXT * chance.randint(0, 3) + NEXT[: chance.randint(0, len(NEXT))])
                    if chance.random() < 0.5:
                        line.recv(100)

        threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connections = server.server._connections
        assert connections is not None
        wait_until(lambda: not connections._tasks)
        admission = connections._admission
        left = (admission._guests, admission._idle, admission._busy, admission._of_address)
        assert not any((*left, connections._known))


class Room:
    """Admission with connections that note who was dropped, and no clock."""

    def __init__(self, max_members: int) -> None:
        self.admission = Admission(max_members)
        self.dropped: list[str] = []

    def enter(self, name: str, address: str = "a") -> Connection:
        connection = Connection(address, lambda: self.dropped.append(name))
        self.admission.enter(connection)
        return connection


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_admission, "MAX_GUESTS", 4)
    monkeypatch.setattr(server_admission, "MAX_GUESTS_OF_ADDRESS", 2)
    monkeypatch.setattr(Connection, "drop_after", lambda self, seconds: None)


@pytest.mark.usefixtures("limits")
def test_the_guest_of_an_address_that_waited_longest_goes_first() -> None:
    room = Room(2)
    room.enter("a1")
    room.enter("b1", "b")
    room.enter("a2")
    room.enter("a3")
    assert room.dropped == ["a1"]
    room.enter("c1", "c")
    room.enter("d1", "d")
    assert room.dropped == ["a1", "b1"]


@pytest.mark.usefixtures("limits")
def test_members_never_make_room_for_guests() -> None:
    room = Room(2)
    members = [room.enter(f"m{number}") for number in range(2)]
    assert all(room.admission.begin(one) for one in members)
    for number in range(9):
        room.enter(f"g{number}", str(number % 3))
    assert not [name for name in room.dropped if name.startswith("m")]
    # The one that has been idle longest makes room for who has shown that he may be there.
    assert not room.admission.begin(room.enter("x"))
    for member in members:
        room.admission.end(member)
    assert room.admission.begin(members[0])
    room.admission.end(members[0])
    room.dropped.clear()
    assert room.admission.begin(room.enter("y", "z"))
    assert "m1" in room.dropped
    assert "m0" not in room.dropped


@pytest.mark.usefixtures("limits")
def test_who_has_left_is_forgotten() -> None:
    room = Room(1)
    for number in range(50):
        one = room.enter(str(number))
        if number % 2:
            assert room.admission.begin(one)
            room.admission.end(one)
        room.admission.leave(one)
    assert not room.dropped
    assert not room.admission._of_address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_an_address_is_one_subscribers(host: str, address: str) -> None:
    assert address_of(host) == address
