"""Connections that say nothing, little, or too much: they lock nobody out."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from kvrag.engine.engine import KVEngine
from kvrag.server import running
from kvrag.server.app import ServerOptions, make_app
from kvrag.server.running import Server
from tests.server.test_faults import CHAT, raw
from tests.support.api_server import Served, lasting, serving
from tests.support.rag import Rag

MOST = 12
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def small(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server that holds `MOST` running."""
    monkeypatch.setattr(running, "most_connections", lambda: MOST)
    with serving(rag.index) as served:
        yield served


@contextlib.contextmanager
def sockets(served: Served, number: int, *, of: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Yield connections of an address, on which nothing has been said."""
    with contextlib.ExitStack() as stack:
        where = ("127.0.0.1", served.server.port)
        yield [
            stack.enter_context(socket.create_connection(where, 20, source_address=(of, 0)))
            for _ in range(number)
        ]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def wait_until_closed(opened: list[socket.socket], number: int) -> list[socket.socket]:
    """Wait until so many connections have been closed; return those that are open."""
    deadline = time.monotonic() + 120
    while True:
        left = [one for one in opened if not is_closed(one)]
        if len(opened) - len(left) >= number:
            return left
        assert time.monotonic() < deadline


def test_the_oldest_silent_connections_make_room(small: Served) -> None:
    most = 3 * MOST // 4
    with sockets(small, 4 * MOST) as silent:
        left = wait_until_closed(silent, len(silent) - most)
        assert left == silent[-most:]
        for _ in range(3):
            assert httpx.get(f"{small.server.url}/healthz").status_code == 200


def test_one_address_cannot_have_all(small: Served) -> None:
    with sockets(small, MOST) as many, sockets(small, 3, of="127.0.0.2") as few:
        assert len(wait_until_closed(many, MOST // 4)) == 3 * MOST // 4
        # All are taken. Another address's newcomer has the place of the one that has most.
        with sockets(small, 2, of="127.0.0.3") as others:
            left = wait_until_closed(many, MOST // 4 + 2)
            assert left == many[-len(left) :]
            assert not any(map(is_closed, [*few, *others]))


def test_no_newcomer_ends_an_answer(small: Served) -> None:
    with lasting() as released:
        body = json.dumps(CHAT | {"stream": True}).encode()
        open_ = [raw(small, body) for _ in range(3 * MOST // 4)]
        for one in open_:
            assert one.recv(20).startswith(b"HTTP/1.1 200")
        with sockets(small, 1) as (refused,):
            assert refused.recv(1000).startswith(b"HTTP/1.1 503")
        with sockets(small, 2 * MOST, of="127.0.0.2") as silent:
            wait_until_closed(silent, 2 * MOST - MOST // 4)
            released.set()
            for one in open_:
                text = b""
                while piece := one.recv(10_000):
                    text += piece
                    if text.endswith(b"0\r\n\r\n"):
                        break
                assert b"data: [DONE]" in text
                one.close()


@pytest.mark.parametrize("said", [b"", HEAD, b"P", HEAD + b"\r\n" + HEAD])
def test_a_header_has_a_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(running, "HEAD_SECONDS", 0.3)
    with sockets(served, 1) as (slow,):
        slow.sendall(said)
        deadline = time.monotonic() + 120
        with contextlib.suppress(ConnectionError):
            # A byte now and then is no header.
            while not is_closed(slow):
                slow.sendall(b"x")
                assert time.monotonic() < deadline


def test_slow_bodies_make_room(small: Served) -> None:
    slow = [raw(small, b"{", length=1000) for _ in range(2 * MOST)]
    left = wait_until_closed(slow, 2 * MOST - 3 * MOST // 4)
    assert left == slow[-len(left) :]
    assert httpx.post(f"{small.url}/chat/completions", json=CHAT).status_code == 200
    for one in slow:
        one.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_ends_answers_in_their_own_form(rag: Rag, stream: bool) -> None:
    with lasting():
        engine = KVEngine(rag.index)
        server = Server(make_app(engine, ServerOptions()), port=0, grace_seconds=0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        open_ = raw(Served(server, engine), json.dumps(CHAT | {"stream": stream}).encode())
        received = open_.recv(20) if stream else b""
        while not stream and b"kvrag_server_answers_open 1.0" not in (
            httpx.get(f"{server.url}/metrics").content
        ):
            pass
        server.stop()
        thread.join()
        while piece := open_.recv(10_000):
            received += piece
        open_.close()
    head, _, body = received.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    if stream:
        assert body.endswith("0\r\n\r\n")
        last = [line for line in body.splitlines() if line.startswith("data: ")][-1]
        error = json.loads(last[6:])["error"]
    else:
        error = json.loads(body)["error"]
    assert (error["message"], error["code"]) == ("the server is stopping", "overloaded")
