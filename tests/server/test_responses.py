"""The Responses API, as OpenAI's own client sees it."""

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response

from kvrag.server.app import ServerOptions
from tests.models.test_tools import TOOL
from tests.server.test_openai_client import MESSAGES, PROMPT, QUESTION
from tests.server.test_tools import CALL, script
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag
from tests.support.scripted import follow

SEARCH: Any = {"type": "function", **TOOL["function"]}
ASKED: Any = {"model": "model", "input": PROMPT, "instructions": "Use the text."}


def whole(client: OpenAI, *, is_streamed: bool, **options: Any) -> Response:
    """Return a response; a streamed one is put together from its events, and checked."""
    if not is_streamed:
        return client.responses.create(**options)
    with client.responses.create(**options, stream=True) as stream:
        events: list[Any] = list(stream)
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    done = events[-1].response
    assert events[-1].type == f"response.{done.status}"
    assert events[0].response.id == done.id
    items = [one.item for one in events if one.type == "response.output_item.done"]
    assert [one.model_dump() for one in items] == [one.model_dump() for one in done.output]
    for number, item in enumerate(items):
        of_item = [one for one in events if getattr(one, "output_index", None) == number]
        assert of_item[0].type == "response.output_item.added"
        assert of_item[0].item.id == item.id
        kind, said = (
            ("response.output_text.delta", item.content[0].text)
            if item.type == "message"
            else ("response.function_call_arguments.delta", item.arguments)
        )
        assert "".join(one.delta for one in of_item if one.type == kind) == said
    return done


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_is_the_chat_answer(client: OpenAI, served: Served, is_streamed: bool) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12)
    found = whole(client, is_streamed=is_streamed, **ASKED, max_output_tokens=12)
    assert found.output_text == expected.text != ""
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    (message,) = found.output
    assert message.type == "message"
    assert message.status == "incomplete"
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.usage.output_tokens == expected.usage.completion_tokens
    assert found.usage.input_tokens_details.cached_tokens == expected.usage.cached_tokens > 0
    assert (found.instructions, found.model) == ("Use the text.", "model")
    parts = [{"type": "input_text", "text": PROMPT}]
    items: Any = [
        {"role": "developer", "content": "Use the text."},
        {"type": "message", "role": "user", "content": parts},
    ]
    same = client.responses.create(model="model", input=items, max_output_tokens=12)
    assert same.output_text == expected.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_and_their_results(
    rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    follow(monkeypatch, rag, script)
    asked: Any = {**ASKED, "tools": [SEARCH], "max_output_tokens": 120}
    found = whole(client, is_streamed=is_streamed, **asked)
    assert found.status == "completed"
    message, call = found.output
    assert (message.type, call.type) == ("message", "function_call")
    assert found.output_text == "I look."
    assert (call.name, json.loads(call.arguments)) == ("search", {"query": "Varn"})
    assert found.tools[0].name == "search"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": PASSAGES["clock"]}
    for output in (found.output, [one.model_dump() for one in found.output]):
        talk = [{"role": "user", "content": PROMPT}, *output, result]
        answer = whole(client, is_streamed=is_streamed, **{**asked, "input": talk})
        assert answer.output_text == "It is Ines."
        assert answer.usage.input_tokens_details.cached_tokens > 40


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_looks_the_same_whether_it_is_verified_or_not(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    follow(monkeypatch, rag, lambda prompt: CALL)
    with (
        serving(rag.index, ServerOptions(audit=1.0)) as served,
        OpenAI(base_url=served.url, api_key="none needed", max_retries=0) as client,
    ):
        options: Any = {"tools": [SEARCH], "max_output_tokens": 120}
        found = whole(client, is_streamed=is_streamed, **ASKED, **options)
        assert [one.type for one in found.output] == ["function_call"]
        likely: Any = {"include": ["message.output_text.logprobs"], "max_output_tokens": 3}
        (message,) = whole(client, is_streamed=is_streamed, **ASKED, **likely).output
    assert message.type == "message"
    assert message.content[0].logprobs  # type: ignore[union-attr]


def test_a_forced_call(rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, rag, lambda prompt: f"{CALL}\n{CALL}")
    asked: Any = {**ASKED, "tools": [SEARCH], "max_output_tokens": 120}
    assert [one.type for one in client.responses.create(**asked).output] == ["function_call"] * 2
    assert len(client.responses.create(**asked, parallel_tool_calls=False).output) == 1
    follow(monkeypatch, rag, lambda prompt: CALL)
    choice: Any = {"type": "function", "name": "search"}
    (call,) = client.responses.create(**asked, tool_choice=choice).output
    assert call.type == "function_call"
    assert "<tool_call>" in client.responses.create(**asked, tool_choice="none").output_text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_server_retrieves_and_cites(client: OpenAI, served: Served, is_streamed: bool) -> None:
    options: Any = {"kvrag": {"k": 2, "report": True}}
    found = whole(
        client,
        is_streamed=is_streamed,
        model=served.rag,
        input=QUESTION,
        max_output_tokens=8,
        extra_body=options,
    )
    (message,) = found.output
    cited = message.content[0].annotations  # type: ignore[union-attr]
    hits = served.engine.index.search(QUESTION, 2)
    assert {one.title for one in cited} == {hit.chunk.source for hit in hits}
    assert all(one.start_index < one.end_index <= len(found.output_text) for one in cited)
    assert (found.model_extra or {})["kvrag"]["reports"][0]["num_reused"] > 0


def test_a_stream_that_fails_says_so(
    client: OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_of = served.engine.astream

    async def failing(*args: Any, **options: Any) -> Any:
        async for delta in stream_of(*args, **options):
            yield delta
            raise OSError("disk gone")

    monkeypatch.setattr(served.engine, "astream", failing)
    with client.responses.create(**ASKED, stream=True) as stream:
        *_, error, failed = list(stream)
    assert error.type == "error"
    assert "the server failed" in error.message
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
