"""The Responses API, as OpenAI's own client sees it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from tests.models.test_tools import TOOL
from tests.server.test_openai_client import MESSAGES, PROMPT, QUESTION
from tests.server.test_tools import CALL, script
from tests.support.api_server import Served
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
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    (message,) = found.output
    assert message.type == "message"
    assert message.status == "incomplete"
    assert found.usage is not None
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


def test_a_stream_comes_in_pieces_and_names_its_events(client: OpenAI, served: Served) -> None:
    with client.responses.stream(**ASKED, max_output_tokens=12) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        final = client.responses.create(**ASKED, max_output_tokens=12)
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text
    body = {**ASKED, "max_output_tokens": 2, "stream": True}
    lines = httpx.post(f"{served.url}/responses", json=body).text.split("\n\n")
    assert lines[0].startswith("event: response.created\ndata: {")
    assert lines[-2].startswith("event: response.incomplete\ndata: {")
    assert lines[-1] == ""


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
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens > 40
    chat = client.chat.completions.create(
        model="model",
        messages=[
            {"role": "system", "content": "Use the text."},
            {"role": "user", "content": PROMPT},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": "search", "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": PASSAGES["clock"]},
        ],
        tools=[TOOL],  # type: ignore[list-item]
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "search"}])
def test_a_forced_call(
    rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    follow(monkeypatch, rag, lambda prompt: CALL)
    asked: Any = {**ASKED, "tools": [SEARCH], "max_output_tokens": 120}
    (call,) = client.responses.create(**asked, tool_choice=choice).output
    assert call.type == "function_call"
    hidden = client.responses.create(**asked, tool_choice="none")
    assert "<tool_call>" in hidden.output_text
    follow(monkeypatch, rag, lambda prompt: f"{CALL}\n{CALL}")
    assert len(client.responses.create(**asked).output) == 2
    assert len(client.responses.create(**asked, parallel_tool_calls=False).output) == 1


class Keeper(BaseModel):
    name: str
    year: int


def test_forms_and_likelihoods(rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, rag, lambda prompt: '{"name": "Ines", "year": 1987}')
    parsed = client.responses.parse(**ASKED, max_output_tokens=80, text_format=Keeper)
    assert parsed.output_parsed == Keeper(name="Ines", year=1987)
    told = client.responses.create(
        **ASKED,
        max_output_tokens=8,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (message,) = told.output
    likely = message.content[0].logprobs  # type: ignore[union-attr]
    assert "".join(one.token for one in likely or ()) == told.output_text
    assert all(len(one.top_logprobs) == 2 for one in likely or ())


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
    assert all(one.end_index == len(found.output_text) for one in cited)
    assert (found.model_extra or {})["kvrag"]["reports"][0]["num_reused"] > 0


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"previous_response_id": "resp_1"}, 400, "keeps no responses; send the earlier items"),
        ({"background": True}, 400, "background: this server does not support it"),
        ({"reasoning": {"effort": "high"}}, 400, "reasoning: this server does not support it"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type: Input should be 'function'"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "oracle", "content": "x"}]}, 400, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            400,
            "input.0.content.0",
        ),
        ({"tool_choice": "required"}, 400, "without tools"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "Field required"),
        ({"model": "gpt-5"}, 404, "no model 'gpt-5'"),
        ({"input": "fox " * 3000}, 400, "2048"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_refused(
    client: OpenAI, changed: dict[str, Any], status: int, said: str, is_streamed: bool
) -> None:
    with pytest.raises(openai.APIStatusError, match=said) as caught:
        client.responses.create(**{**ASKED, **changed}, stream=is_streamed)
    assert caught.value.status_code == status


def test_what_changes_nothing_is_accepted(client: OpenAI) -> None:
    plain = client.responses.create(**ASKED, max_output_tokens=4)
    same = client.responses.create(
        **ASKED,
        max_output_tokens=4,
        store=True,
        metadata={"run": "7"},
        user="ada",
        service_tier="auto",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
    )
    assert same.output_text == plain.output_text
    assert same.metadata == {"run": "7"}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(same.id)


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
