"""Values that JSON allows and nothing can compute with: each is the client's error, and named."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.api_server import Served
from tests.support.rag import Rag

HALF = "x\ud800"
JSON = {"Content-Type": "application/json"}
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "Which fox?"}],
    "max_tokens": 3,
}
TEXT: dict[str, Any] = {"model": "model", "prompt": "The fox", "max_tokens": 3}
RAG = CHAT | {"model": "rag:index"}


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    content = json.dumps(body).encode()
    return httpx.post(f"{served.url}/{path}", content=content, headers=JSON, timeout=60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"model": "hashing-2", "input": HALF}),
        ("embeddings", {"model": "hashing-2", "input": ["fox", HALF]}),
        ("embeddings", {"model": "hashing-2", "input": "fox", "user": HALF}),
        ("embeddings", {"model": HALF, "input": "fox"}),
        ("completions", TEXT | {"prompt": HALF}),
        ("completions", TEXT | {"prompt": ["fox", HALF]}),
        ("completions", TEXT | {"stop": HALF}),
        ("completions", TEXT | {"user": HALF}),
        ("completions", TEXT | {HALF: 1}),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": HALF}]}),
        ("chat/completions", CHAT | {"messages": [{"role": HALF, "content": "fox"}]}),
        ("chat/completions", CHAT | {"kvrag": {"policy": HALF}}),
        ("chat/completions", RAG | {"messages": [{"role": "user", "content": HALF}]}),
        ("chat/completions", RAG | {"kvrag": {"filter": {HALF: 1}}}),
        ("chat/completions", RAG | {"kvrag": {"filter": {"a": {"$in": [HALF]}}}}),
        ("chat/completions", RAG | {"kvrag": {"filter": {"a": {HALF: 1}}}}),
        ("chat/completions", RAG | {"kvrag": {"filter": {"a": {"b": {HALF: 1}}}}}),
    ],
)
def test_half_a_surrogate_pair(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = post(served, path, body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]


def test_a_template_that_loops_over_what_a_message_says(
    served: Served, rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = rag.index.tokenizer.chat_template
    template = f"{{% if 'again' in messages[-1].content %}}{loops}{{% endif %}}{template}"
    monkeypatch.setattr(rag.index.tokenizer, "chat_template", template)
    again = CHAT | {"messages": [{"role": "user", "content": "again"}]}
    for body, status in ((again, 400), (CHAT, 200), (again, 400)):
        answer = post(served, "chat/completions", body)
        assert answer.status_code == status, answer.text
    assert "chat template" in answer.json()["error"]["message"]
    assert "takes more than 1 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [5e-324, 1e-3, 1e300, -1.0])
@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "repetition_penalty", "top_k", "kvrag.ratio"),
        *("frequency_penalty", "presence_penalty", "min_p"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_extreme_numbers(served: Served, name: str, value: float, stream: bool) -> None:
    wrong = {"kvrag": {"ratio": value, "policy": "query"}} if "." in name else {name: value}
    answer = post(served, "completions", TEXT | {"temperature": 1, "stream": stream} | wrong)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert name.rpartition(".")[2] in answer.json()["error"]["message"]
    else:
        assert "error" not in answer.text
