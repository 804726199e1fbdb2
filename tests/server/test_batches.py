"""Many texts for one request: others are answered meanwhile; work ends when its client leaves."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvrag.engine import constraint
from kvrag.ingest.embedding import HashingEmbedding
from kvrag.server import queue
from kvrag.server.access import ApiKey
from kvrag.server.app import ServerOptions
from tests.server.test_faults import JSON, metric, raw, wait_until
from tests.support.api_server import Served, serving
from tests.support.rag import Rag

SLOW = "slow "


class Reading:
    """Which of the slow texts were read, each with permission."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_read = threading.Semaphore(0)

    def read(self, text: str) -> Any:
        if text.startswith(SLOW):
            self.begun.append(text)
            assert self.may_read.acquire(timeout=60)
        return text.split()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    made = Reading()
    monkeypatch.setattr(HashingEmbedding, "words", staticmethod(made.read))
    return made


@pytest.fixture
def apart(rag: Rag) -> Iterator[Served]:
    with serving(rag.index, ServerOptions(top_k=1)) as served:
        yield served


def body(number: int, num_texts: int = 3) -> bytes:
    texts = [f"{SLOW}{number} {one}" for one in range(num_texts)]
    return json.dumps({"model": "hashing-2", "input": texts}).encode()


def test_questions_are_answered_beside_texts(apart: Served, reading: Reading) -> None:
    clients = [raw(apart, body(number), path="/v1/embeddings") for number in range(8)]
    wait_until(lambda: len(reading.begun) == 2)
    asked = {
        "model": apart.rag,
        "messages": [{"role": "user", "content": "Who keeps the ledger?"}],
        "max_tokens": 2,
    }
    answer = httpx.post(f"{apart.url}/chat/completions", json=asked, timeout=60).json()
    assert answer["choices"][0]["message"]["annotations"]
    assert len(reading.begun) == 2
    reading.may_read.release(1000)
    for client in clients:
        assert client.recv(12) == b"HTTP/1.1 200"
        client.close()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_work_ends_when_its_client_leaves(
    apart: Served, reading: Reading, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    ready = f"{apart.server.url}/readyz"
    asked = json.loads(body(1, 50))
    if path == "/v1/rerank":
        asked = {"model": "hashing-2", "query": "a", "documents": asked["input"]}
    clients = [raw(apart, json.dumps(asked).encode(), path=path) for _ in range(4)]
    wait_until(lambda: len(reading.begun) == 2)
    for client in clients:
        client.close()
    gone = f'kvrag_server_requests_total{{route="{path}",status="499"'
    wait_until(lambda: metric(apart, gone) == 4)
    # Only now: the other two may have been on the way from one step to the next, and be refused.
    monkeypatch.setattr(queue, "MAX_BATCHES", 1)
    assert httpx.get(ready).status_code == 503  # two may still read
    reading.may_read.release(2)
    wait_until(lambda: httpx.get(ready).status_code == 200)
    assert len(reading.begun) == 2


def test_readiness_says_when_nothing_moves(
    apart: Served, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = f"{apart.server.url}/readyz"
    assert httpx.get(ready).status_code == 200
    monkeypatch.setattr(queue, "MAX_BATCHES", 2)
    first = raw(apart, body(1), path="/v1/embeddings")
    wait_until(lambda: len(reading.begun) == 1)
    assert httpx.get(ready).status_code == 200
    monkeypatch.setattr(queue, "STUCK_BATCHES_SECONDS", 0.0)
    assert httpx.get(ready).status_code == 503
    monkeypatch.setattr(queue, "STUCK_BATCHES_SECONDS", 60.0)
    second = raw(apart, body(2), path="/v1/embeddings")
    wait_until(lambda: len(reading.begun) == 2)
    assert httpx.get(ready).status_code == 503
    refused = httpx.post(f"{apart.url}/embeddings", content=body(3), headers=JSON)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    reading.may_read.release(1000)
    for client in (first, second):
        assert client.recv(12) == b"HTTP/1.1 200"
        client.close()
    assert httpx.get(ready).status_code == 200


# What takes long to answer, or with other words does not.
def embeds(word: str, number: int = 0) -> tuple[str, dict[str, Any]]:
    return "embeddings", {"model": "hashing-2", "input": [f"{word}{number}"]}


def searches(word: str, number: int = 0) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": f"{word}{number}"}]
    return "chat/completions", {"model": "rag:index", "messages": messages, "max_tokens": 2}


def writes_in_a_form(word: str, number: int = 0) -> tuple[str, dict[str, Any]]:
    _, asked = searches("a", number)
    form = {"type": "regex", "regex": f"{word}{number}"}
    return "chat/completions", {**asked, "model": "model", "response_format": form}


def writes(word: str, number: int = 0) -> tuple[str, dict[str, Any]]:
    path, asked = searches(word, number)
    return path, {**asked, "model": "model"}


@pytest.mark.parametrize(
    ("slow", "others", "num_begun", "is_own"),
    [
        (embeds, embeds, 2, False),
        (searches, searches, 4, False),
        (writes_in_a_form, writes_in_a_form, 1, False),
        (writes_in_a_form, writes, 1, True),
        (writes_in_a_form, searches, 1, True),
    ],
)
def test_nobody_waits_for_all_that_another_asks(
    rag: Rag,
    reading: Reading,
    monkeypatch: pytest.MonkeyPatch,
    slow: Any,
    others: Any,
    num_begun: int,
    is_own: bool,
) -> None:
    """A tenant leaves threads to the others; and what has no form waits for no form."""
    read = constraint.Constraint._grammar

    def grammar(form: constraint.Constraint) -> str:
        reading.read(form.text)
        return read(form)

    monkeypatch.setattr(constraint.Constraint, "_grammar", grammar)
    keys = [ApiKey(name=name, key=name * 16) for name in ("a", "b")]
    tokens = {one.name: {"Authorization": f"Bearer {one.key}"} for one in keys}

    with serving(rag.index, ServerOptions(keys=keys, top_k=1)) as served:

        def ask(name: str, asked: tuple[str, Any]) -> int:
            url = f"{served.url}/{asked[0]}"
            return httpx.post(url, json=asked[1], headers=tokens[name], timeout=60).status_code

        with ThreadPoolExecutor(10) as threads:
            try:
                asked = [threads.submit(ask, "a", slow(SLOW, number)) for number in range(10)]
                wait_until(lambda: len(reading.begun) == num_begun)
                assert ask("a" if is_own else "b", others("gate")) == 200
                assert len(reading.begun) == num_begun
            finally:
                reading.may_read.release(1000)
            assert {one.result() for one in asked} == {200}
