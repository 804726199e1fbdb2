"""Clients that go away, wrong and oversized bodies, hosts, origins, and what is counted."""

import errno
import json
import socket
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvrag.engine.engine import KVEngine
from kvrag.errors import IndexLockedError, StoreError, StoreUnreachableError
from kvrag.server import gate
from kvrag.server.app import ServerOptions
from kvrag.server.gate import MAX_PROMPT_BYTES
from kvrag.server.problems import as_problem, validation_problem
from kvrag.server.requests import MAX_FIELDS, ChatRequest
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag
from tests.support.waiting import wait_until

CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": PASSAGES["fox"]}],
    "max_tokens": 4,
}
JSON = {"Content-Type": "application/json"}
LONG = CHAT | {"max_tokens": 1500}


def metric(served: Served, name: str) -> float:
    """Return the sum of the metric's samples whose names and labels begin so."""
    text = httpx.get(f"{served.server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def raw(
    served: Served, content: bytes, *, length: int | None = None, path: str = "/v1/chat/completions"
) -> socket.socket:
    """Send a request over a socket of its own."""
    connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=20)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        f"\r\nContent-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_answer(served: Served, stream: bool) -> None:
    gone = 'kvrag_server_requests_total{route="/v1/chat/completions",status="499"'
    before = metric(served, gone)
    connection = raw(served, json.dumps(LONG | {"stream": stream}).encode())
    wait_until(lambda: metric(served, "kvrag_server_answers_open") == 1)
    if stream:
        assert connection.recv(100)
    connection.close()
    # The whole answer would take several times as long as this test may.
    wait_until(lambda: metric(served, "kvrag_server_answers_open") == 0)
    wait_until(lambda: metric(served, gone) == before + 1)


def test_a_client_that_leaves_the_queue_is_never_answered(rag: Rag) -> None:
    with serving(rag.index, ServerOptions(max_streams=1)) as served:
        prompts = metric(served, "kvrag_prompts_total")
        first = raw(served, json.dumps(LONG).encode())
        wait_until(lambda: metric(served, "kvrag_server_answers_open") == 1)
        # A prompt counts when it has been read.
        wait_until(lambda: metric(served, "kvrag_prompts_total") == prompts + 1)
        second = raw(served, json.dumps(LONG | {"n": 3}).encode())
        wait_until(lambda: metric(served, "kvrag_server_answers_waiting") == 3)
        second.close()
        wait_until(lambda: metric(served, "kvrag_server_answers_waiting") == 0)
        first.close()
        wait_until(lambda: metric(served, "kvrag_server_answers_open") == 0)
        assert metric(served, "kvrag_prompts_total") == prompts + 1


def test_a_full_queue_refuses(rag: Rag) -> None:
    with serving(rag.index, ServerOptions(max_streams=1, max_waiting=1)) as served:
        open_ = raw(served, json.dumps(LONG).encode())
        wait_until(lambda: metric(served, "kvrag_server_answers_open") == 1)
        waiting = raw(served, json.dumps(LONG).encode())
        wait_until(lambda: metric(served, "kvrag_server_answers_waiting") == 1)
        refused = httpx.post(f"{served.url}/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["Retry-After"]) > 0
        assert httpx.get(f"{served.server.url}/readyz").status_code == 503
        assert httpx.get(f"{served.server.url}/healthz").status_code == 200
        open_.close()
        waiting.close()
        wait_until(lambda: httpx.get(f"{served.server.url}/readyz").status_code == 200)


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"\xff\xfe", "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b'{"model": "\xe9"}', "application/json", 400, "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "invalid_json"),
        (b'{"model": "model", "messages": "x"}', "application/json", 400, "invalid_value"),
        (b'{"model": "\\ud800"}', "application/json", 400, "invalid_value"),
        (json.dumps(CHAT).encode(), "text/plain", 400, "invalid_json"),
        (json.dumps(CHAT).encode(), "application/x-www-form-urlencoded", 400, "invalid_json"),
        (b" " * (MAX_PROMPT_BYTES + 1), "application/json", 413, None),
    ],
)
def test_wrong_bodies(
    served: Served, content: bytes, kind: str, status: int, code: str | None
) -> None:
    headers = {"Content-Type": kind}
    answer = httpx.post(f"{served.url}/chat/completions", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert error["message"]
    chunked = httpx.post(f"{served.url}/chat/completions", content=iter([content]), headers=headers)
    assert chunked.status_code == status


@pytest.mark.parametrize(
    "wrong",
    [  # made when they are asked for: they are large
        lambda: {f"x{number}": 1 for number in range(300_000)},
        lambda: {"x" * 3_000_000: 1},
        lambda: {"messages": [{"role": "user", "content": [1] * 1_000_000}]},
        lambda: {"messages": [{f"x{number}": 1 for number in range(300_000)}]},
        lambda: {"stop": [1] * 1_000_000},
        lambda: {"logit_bias": {f"x{number}": "y" for number in range(200_000)}},
        lambda: {"kvrag": {"policy": "x" * 3_000_000}},
        lambda: {"messages": [{"role": "x" * 3_000_000, "content": ""}]},
    ],
)
def test_wrong_bodies_are_refused_briefly_and_soon(wrong: Callable[[], dict[str, Any]]) -> None:
    body = CHAT | wrong()
    started = time.process_time()
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    errors = caught.value.errors()
    assert time.process_time() - started < 0.5
    assert len(errors) <= MAX_FIELDS + 1
    answer = validation_problem(list(errors)).response("/v1/chat/completions")
    assert answer.status_code == 400
    assert len(answer.body) < 1000


def test_a_body_that_never_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    connection = raw(served, b'{"model": ', length=1000)
    assert b"408" in connection.recv(100)
    connection.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/api/chat"])
def test_a_client_that_leaves_within_its_body(served: Served, path: str) -> None:
    gone = f'kvrag_server_requests_total{{route="{path}",status="499"'
    before = metric(served, gone)
    raw(served, b'{"model": ', length=1000, path=path).close()
    wait_until(lambda: metric(served, gone) == before + 1)


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/x", "GET", 404), ("/v1/models", "POST", 405)]
)
def test_wrong_routes(served: Served, path: str, method: str, status: int) -> None:
    answer = httpx.request(method, served.server.url + path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"no route {method} '{path}'" in error["message"]


def test_endless_headers_are_refused(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000)
        assert b" 400 " in connection.recv(100)


def test_another_host_is_refused_without_keys(served: Served) -> None:
    for host, status in (
        ("evil.example", 403),
        ("[::1]:80", 200),
        ("localhost:80@evil.example", 400),
        ("localhost:", 200),
        ("localhost/evil.example", 400),
        ("user@localhost", 400),
        ("[::1]x", 400),
        ("", 403),
    ):
        answer = httpx.get(f"{served.url}/models", headers={"Host": host})
        assert answer.status_code == status, host
        if status != 200:
            assert answer.json()["error"]["code"] == "wrong_host"


SCHEMES = [b"http://evil.example", b"http://localhost@evil.example", b"//", b"http://["]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: local\0host", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \0", 400),
        (b"GET /page/%00 HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /page/..%2f..%2fgate.py HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /v1/kvrag/chunks/%ed%a0%80 HTTP/1.1\r\nHost: localhost", 404),
        (b"GET /v1/kvrag/chunks/" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost", 400),
        (b"GET /v1/kvrag/chunks/a?around=\xff HTTP/1.1\r\nHost: localhost", 400),
        (b"DELETE /v1/kvrag/documents?source=%00 HTTP/1.1\r\nHost: localhost", 403),
        (b"BREW /healthz HTTP/1.1\r\nHost: localhost", 405),
        *((b"GET " + one + b"/healthz HTTP/1.1\r\nHost: localhost", 404) for one in SCHEMES),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
            b"Content-Length: 4",
            400,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            b"\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n{",
            400,
        ),
    ],
)
def test_requests_that_no_client_makes(served: Served, head: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert int(connection.recv(100).split()[1]) == status


def test_no_second_request_hides_in_a_body(served: Served) -> None:
    """Both lengths are given: what one reader takes for the body, another takes for a request."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Length: 5\r\n\r\n0\r\n\r\n" + hidden
        )
        received = b""
        while piece := connection.recv(10_000):
            received += piece
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (OSError(errno.ENOSPC, "/secret/path"), 507, "the server's disk is full"),
        (sqlite3.OperationalError("database or disk is full"), 507, "the server's disk is full"),
        (OSError(errno.EMFILE, "/secret/path"), 503, "too many files open"),
        (IndexLockedError("/secret/path"), 503, "being written to"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_the_system_refuses(error: Exception, status: int, why: str, is_wrapped: bool) -> None:
    if is_wrapped and not isinstance(error, IndexLockedError):
        try:
            raise StoreError("cannot write /secret/path") from error
        except StoreError as outer:
            error = outer
    problem = as_problem(error)
    assert problem.status == status
    assert why in problem.message
    assert "secret" not in problem.message


def test_pages_of_other_origins(rag: Rag, served: Served) -> None:
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    where = f"{served.url}/chat/completions"
    assert "access-control-allow-origin" not in httpx.options(where, headers=asked).headers
    with serving(rag.index, ServerOptions(origins=["https://app.example"])) as open_:
        where = f"{open_.url}/chat/completions"
        allowed = httpx.options(where, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        asked["Access-Control-Request-Headers"] = "authorization, x-stainless-lang"
        assert httpx.options(where, headers=asked).status_code == 200
        asked["Origin"] = "https://evil.example"
        assert httpx.options(where, headers=asked).status_code == 400
        answer = httpx.post(where, json=CHAT, headers=asked)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (RuntimeError("/secret/path"), 500, "the server failed; its log says why"),
        (TimeoutError("/secret/path"), 500, "the server failed; its log says why"),
        (StoreUnreachableError("/secret/path"), 503, "the index cannot be read"),
    ],
)
def test_failures_name_nothing_of_the_server(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, why: str
) -> None:
    engine = KVEngine(rag.index)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(engine, "astream", fail)
    with serving(rag.index, engine=engine) as served:
        for stream in (False, True):
            answer = httpx.post(f"{served.url}/chat/completions", json=CHAT | {"stream": stream})
            assert answer.status_code == status
            assert why in answer.json()["error"]["message"]
            assert "secret" not in answer.text


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
def test_an_error_in_a_stream_is_an_event(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    engine = KVEngine(rag.index)
    whole = engine.astream

    async def breaking(*given: Any, **options: Any) -> Any:
        number = 0
        async for delta in whole(*given, **options):
            if number == 2:
                raise error("/secret/path")
            number += 1
            yield delta

    monkeypatch.setattr(engine, "astream", breaking)
    with serving(rag.index, engine=engine) as served:
        body = CHAT | {"stream": True, "max_tokens": 20}
        text = httpx.post(f"{served.url}/chat/completions", json=body).text
        events = [line for line in text.splitlines() if line]
        assert json.loads(events[-1][6:])["error"]["code"] == "internal_error"
        assert "secret" not in text
        assert "[DONE]" not in text
        assert (
            metric(served, 'kvrag_server_requests_total{route="/v1/chat/completions",status="500"')
            == 1
        )


def test_what_is_counted(rag: Rag) -> None:
    with serving(rag.index) as served:
        answer = httpx.post(f"{served.url}/chat/completions", json=CHAT).json()
        httpx.get(f"{served.url}/anything")
        usage = answer["usage"]
        wait_until(lambda: metric(served, "kvrag_server_ttft_seconds_count") == 1)
        for kind, count in (
            ("prompt", usage["prompt_tokens"]),
            ("completion", usage["completion_tokens"]),
            ("cached", usage["prompt_tokens_details"]["cached_tokens"]),
        ):
            assert metric(served, f'kvrag_server_tokens_total{{kind="{kind}"') == count > 0
        assert metric(served, 'kvrag_server_requests_total{route="other",status="404"') == 1
        assert metric(served, "kvrag_tokens_total") > 0
        assert metric(served, "kvrag_store_hits_total") > 0


@pytest.mark.slow
def test_a_template_that_loops_over_what_a_message_says(
    served: Served, rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = rag.index.tokenizer.chat_template
    template = f"{{% if 'again' in messages[-1].content %}}{loops}{{% endif %}}{template}"
    monkeypatch.setattr(rag.index.tokenizer, "chat_template", template)
    again = CHAT | {"messages": [{"role": "user", "content": "again"}]}
    for body, status in ((again, 400), (CHAT, 200), (again, 400)):
        answer = httpx.post(f"{served.url}/chat/completions", json=body)
        assert answer.status_code == status, answer.text
    assert "chat template" in answer.json()["error"]["message"]
    assert "takes more than 1 s" in answer.json()["error"]["message"]
