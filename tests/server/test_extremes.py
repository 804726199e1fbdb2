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


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    content = json.dumps(body).encode()
    return httpx.post(f"{served.url}/{path}", content=content, headers=JSON, timeout=60)


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
def test_extreme_numbers(served: Served, name: str, value: float) -> None:
    wrong = {"kvrag": {"ratio": value, "policy": "query"}} if "." in name else {name: value}
    answer = post(served, "completions", TEXT | {"temperature": 1} | wrong)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert name.rpartition(".")[2] in answer.json()["error"]["message"]
    else:
        assert "error" not in answer.text
