"""Tools and response formats of the server, as OpenAI's own client sees them."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from kvrag.engine.engine import KVEngine
from tests.models.test_tools import TOOL
from tests.support.api_server import serving
from tests.support.rag import PASSAGES, Rag
from tests.support.scripted import follow

ASKED: Any = [{"role": "user", "content": f"{PASSAGES['ledger']}\n\nWho keeps it?"}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Varn"}}\n</tool_call>'
FREE: dict[str, Any] = {"model": "model", "messages": ASKED, "max_tokens": 120}


def script(prompt: str) -> str:
    return "It is Ines." if "<tool_response>\n" in prompt else f"I look.\n{CALL}"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_and_its_result(
    rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    follow(monkeypatch, rag, script)
    call: dict[str, Any]
    if is_streamed:
        events = list(client.chat.completions.create(**FREE, tools=[TOOL], stream=True))
        deltas = [one.choices[0].delta for one in events]
        said = "".join(one.content or "" for one in deltas)
        (found,) = [one for delta in deltas for one in delta.tool_calls or ()]
        assert found.index == 0
        finish = events[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**FREE, tools=[TOOL]).choices[0]
        said, finish = choice.message.content, choice.finish_reason
        (found,) = choice.message.tool_calls
    assert said == "I look."
    assert finish == "tool_calls"
    call = {
        "id": found.id,
        "type": "function",
        "function": {"name": found.function.name, "arguments": found.function.arguments},
    }
    assert json.loads(found.function.arguments) == {"query": "Varn"}
    talk = [
        *ASKED,
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": found.id, "content": PASSAGES["clock"]},
    ]
    answer = client.chat.completions.create(**{**FREE, "messages": talk}, tools=[TOOL])
    assert answer.choices[0].message.content == "It is Ines."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens > 40


def test_rounds_of_calls_over_retrieved_chunks(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round searches for the question, and its prompt begins as the round before."""

    def call(prompt: str) -> str:
        num_rounds = prompt.count("<tool_response>\n")
        return "It is Ines." if num_rounds == 2 else CALL.replace("Varn", f"Varn {num_rounds}")

    prompts = follow(monkeypatch, rag, call)
    question = "Who keeps the harbour ledger?"
    talk: list[Any] = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": question},
    ]
    asked: Any = {"model": "rag:index", "tools": [TOOL], "max_tokens": 60}
    options: Any = {"extra_body": {"kvrag": {"k": 2, "report": True}}}
    engine = KVEngine(rag.index, max_tokens=16)
    with serving(rag.index, engine=engine) as running:
        client = OpenAI(base_url=running.url, api_key="none needed", max_retries=0)
        for number in range(3):
            answer = client.chat.completions.create(messages=talk, **asked, **options)
            (choice,) = answer.choices
            (sources,) = (answer.model_extra or {})["kvrag"]["sources"]
            assert len(sources) == 2
            assert "ledger" in {one["source"] for one in sources}
            (report,) = (answer.model_extra or {})["kvrag"]["reports"]
            if number:
                # Up to the call, all is the earlier round's.
                assert report["num_kept"] > 100
            if number == 2:
                break
            assert choice.finish_reason == "tool_calls"
            (found,) = choice.message.tool_calls or []
            talk.append(choice.message)
            talk.append({"role": "tool", "tool_call_id": found.id, "content": f"Entry {number}."})
    assert choice.message.content == "It is Ines."
    assert choice.message.annotations
    for before, after in pairwise(prompts):
        assert after.startswith(before.removesuffix("<|assistant|>\n"))
        assert after.count(question) == 1


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "search"}}]
)
def test_a_forced_call(
    rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    follow(monkeypatch, rag, lambda prompt: CALL)
    found = client.chat.completions.create(**FREE, tools=[TOOL], tool_choice=choice).choices[0]
    assert found.message.content is None
    assert found.message.tool_calls[0].function.name == "search"
    hidden = client.chat.completions.create(**FREE, tools=[TOOL], tool_choice="none").choices[0]
    assert hidden.message.tool_calls is None
    assert "<tool_call>" in hidden.message.content


class Keeper(BaseModel):
    name: str
    year: int


def test_response_formats(rag: Rag, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, rag, lambda prompt: '{"name": "Ines", "year": 1987}')
    parsed = client.chat.completions.parse(**FREE, response_format=Keeper)
    assert parsed.choices[0].message.parsed == Keeper(name="Ines", year=1987)
    free = client.chat.completions.create(**FREE, response_format={"type": "json_object"})
    assert json.loads(free.choices[0].message.content)["name"] == "Ines"
    year: Any = {"type": "regex", "regex": "year [0-9]{4}"}
    matched = client.chat.completions.create(**FREE, response_format=year)
    assert re.fullmatch("year [0-9]{4}", matched.choices[0].message.content)


def test_a_grammar_that_would_end_the_process_is_refused(client: OpenAI) -> None:
    """A tool, a schema, rules and a regular expression; other requests are answered meanwhile."""
    objects: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(2000)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**objects, "d2000": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "deep", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(2700))
    asked: list[Any] = [
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": form},
        {"response_format": {"type": "lark", "lark": f'start: r0\n{rules}r2700: "b"\n'}},
        {"response_format": {"type": "regex", "regex": "(a{1000}){1000}"}},
    ]
    for one in asked:
        with pytest.raises(BadRequestError, match=r"too complex|too many expressions"):
            client.chat.completions.create(**FREE, **one)
    assert client.chat.completions.create(**FREE).choices[0].message.content
