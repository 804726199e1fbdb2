"""Open WebUI's requests, as version 0.12.4 sends them, shortened."""

from typing import Any

import httpx
import pytest

from kvrag.server.app import ServerOptions
from tests.support.api_server import Served, serving
from tests.support.properties import in_turn
from tests.support.rag import PASSAGES, Rag

TITLE = """### Task:
Generate a concise title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: %s
ASSISTANT: %s
</chat_history>"""
TEMPLATE = """### Task:
Respond to the user query using the provided context, incorporating inline citations.

<context>
%s
</context>

"""
SOURCE = '<source id="1" name="ships.md" resource-type="file" resource-id="b962">%s</source>'
QUESTIONS = ("Who keeps the ledger?", "And the clock?", "Who keeps it now?")
# What its own search finds for each.
FOUND = (("ledger", "clock"), ("clock", "ledger"), ("ledger", "clock"))
_PATHS = {"openai": "/v1/chat/completions", "ollama": "/api/chat"}


def send(served: Served, api: str, messages: list[dict[str, str]], **more: Any) -> tuple[str, Any]:
    """Return an answer and kvrag's report."""
    body = {"model": "model", "messages": messages, "stream": False, "kvrag": {"report": True}}
    url = f"{served.server.url}{_PATHS[api]}"
    answer = httpx.post(url, json=body | more, timeout=60)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    message = told["message"] if api == "ollama" else told["choices"][0]["message"]
    return message["content"], told["kvrag"]["reports"][0]


@pytest.mark.parametrize(("api", "is_system"), in_turn(_PATHS))
def test_turns_whose_passages_move_and_the_calls_between_them(
    rag: Rag, api: str, is_system: bool
) -> None:
    """Passages are found wherever they are; a title's request takes nothing from the turns."""
    few = {"options": {"num_predict": 4}} if api == "ollama" else {"max_tokens": 4}
    with serving(rag.index, ServerOptions()) as served:
        tokenizer = served.engine.index.tokenizer
        least = len(tokenizer("".join(PASSAGES[one] for one in FOUND[0]))["input_ids"]) // 2
        said: list[dict[str, str]] = []
        for question, names in zip(QUESTIONS, FOUND, strict=True):
            context = TEMPLATE % "\n".join(SOURCE % PASSAGES[one] for one in names)
            if is_system:
                said = [one for one in said if one["role"] != "system"]
                turn = {"role": "user", "content": question}
                messages = [{"role": "system", "content": context}, *said, turn]
            else:
                messages = [*said, {"role": "user", "content": context + question}]
            answer, report = send(served, api, messages, **few)
            assert report["num_cached"] >= least
            again = send(served, api, messages, **few)[1]
            assert again["num_kept"] == again["num_tokens"]
            title = [{"role": "user", "content": TITLE % (question, answer)}]
            told = {"options": {"num_predict": 2}} if api == "ollama" else {"max_tokens": 2}
            send(served, api, title, **told)
            assert send(served, api, messages, **few)[1]["num_kept"] == again["num_kept"]
            turn = {"role": "user", "content": question}
            said += [turn, {"role": "assistant", "content": answer}]
