"""What the server refuses, each with the parameter that is wrong: one table for each route."""

import json
from typing import Any

import httpx
import pytest

from tests.models.test_tools import TOOL
from tests.support.api_server import Served
from tests.support.rag import PASSAGES

HALF = "x\ud800"
ASK = [{"role": "user", "content": "Which fox?"}]
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "model", "messages": ASK, "max_tokens": 2},
    "completions": {"model": "model", "prompt": "The fox", "max_tokens": 2},
    "responses": {"model": "model", "input": "The fox", "max_output_tokens": 2},
    "embeddings": {"model": "hashing-2", "input": "fox"},
    "rerank": {"model": "hashing-2", "query": "fox", "documents": list(PASSAGES.values())},
}


def post(served: Served, route: str, changed: dict[str, Any]) -> httpx.Response:
    body = json.dumps(ROUTES[route] | changed)  # httpx itself refuses half of a surrogate pair
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{served.url}/{route}", content=body, headers=headers, timeout=60)


def parts(kind: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": kind, "text": "x"}] * 1400}


def said(*content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **({"content": content[0]} if content else {}), **more}]}


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": [found]} if depth % 2 else {"properties": {"a": found}}
    return found


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def schema(value: Any) -> dict[str, Any]:
    return form("json_schema", json_schema={"name": "a", "schema": value})


RAG = {"model": "rag:index"}
IMAGE = [{"type": "image_url", "image_url": {}}]
CHAT: list[tuple[Any, str | None, str]] = [
    ({"logit_bias": {"5": 1}}, "logit_bias", "does not support"),
    ({"web_search_options": {}}, "web_search_options", "unknown parameter"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
    ({"stream_options": {"include_usage": True}}, None, "set stream to true"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 items"),
    ({"stop": ["y", "x" * 201]}, "stop", "a stop string has over 200 characters"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [parts("text")] * 3}, "messages", "4,200 parts and calls in all"),
    (said("x", role="tool"), "messages.0", "tool_call_id"),
    (said(None), "messages.0", "content is missing"),
    (said(role="assistant"), "messages.0", "content is missing"),
    (said(IMAGE), "messages.0.content.0.type", "should be 'text'"),
    (said("x", annotations=[{}]), "messages.0", "annotations are an assistant's"),
    ({"tool_choice": function(name=3)}, "tool_choice.function.name", "valid string"),
    ({"tool_choice": "required"}, None, "without tools"),
    (
        {"tools": [TOOL, function(parameters={"type": "x"})], "tool_choice": "required"},
        None,
        "the parameters of the tool 'f': json_schema",
    ),
    ({"kvrag": {"policy": "magic"}}, None, "unknown policy"),
    ({"kvrag": {"k": 3}}, "kvrag.k", "retrieves only"),
    ({"kvrag": {"filter": {"a": 1}}}, "kvrag.filter", "retrieves only"),
    ({"kvrag": {"explain": True}}, "kvrag", "set report to true"),
    (RAG | {"kvrag": {"filter": {"a": {"$like": 1}}}}, None, "unknown operator"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": False, "top_logprobs": 2}, None, "set logprobs to true"),
    ({"logprobs": True, "tools": [TOOL]}, None, "leave out logprobs, or the tools"),
    (form("json_schema"), "response_format", "json_schema"),
    (form("regex", regex="(a"), None, "unclosed group"),
    (schema({"type": "objekt"}), None, "objekt"),
    # Objects that would exhaust the stack of what reads them later.
    *(
        ({"tools": [function(parameters=nested(depth))]}, "tools.0.function.parameters", "nested")
        for depth in (101, 200)
    ),
    (schema(nested(101)), "response_format.json_schema.schema", "nested over 100 deep"),
    (RAG | {"kvrag": {"filter": nested(101)}}, "kvrag.filter", "nested over 100 deep"),
    # Half of a surrogate pair.
    (said(HALF), None, "not valid Unicode"),
    ({"kvrag": {"policy": HALF}}, "kvrag.policy", "unable to parse"),
    (RAG | said(HALF), None, "not valid Unicode"),
    (RAG | {"kvrag": {"filter": {HALF: 1}}}, None, "surrogate"),
    (RAG | {"kvrag": {"filter": {"a": {"$in": [HALF]}}}}, None, "surrogate"),
]
TEXT: list[tuple[Any, str | None, str]] = [
    ({"logprobs": 100}, "logprobs", "less than or equal to 20"),
    ({"prompt": HALF}, None, "not valid Unicode"),
    ({"stop": HALF}, "stop", "surrogate"),
    ({"model": HALF}, "model", "unable to parse"),
]
ITEMS: list[tuple[Any, str | None, str]] = [
    ({"previous_response_id": "resp_1"}, None, "keeps no responses; send the earlier items"),
    ({"background": True}, None, "background: Input should be False"),
    ({"reasoning": {"effort": "high"}}, None, "reasoning.effort: Input should be 'none'"),
    ({"input": [parts("input_text")] * 3}, "input", "4,200 parts and calls in all"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, None, "input.0"),
    ({"input": [{"role": "user", "content": IMAGE}]}, None, "input.0.content.0"),
    ({"tool_choice": "required"}, None, "without tools"),
    ({"text": {"format": {"type": "json_schema"}}}, None, "Field required"),
    ({"tools": [{"type": "function", "name": "f", "parameters": nested(101)}]}, None, "nested"),
    ({"input": "fox " * 3000}, None, "2048"),
]
VECTORS: list[tuple[Any, str | None, str]] = [
    ({"input": HALF}, None, "surrogate"),
    ({"input": "a " * 50_001}, "input", "100,002 characters, and at most 100,000"),
    ({"dimensions": 3}, "dimensions", "leave the field out"),
]
RANKING: list[tuple[Any, str | None, str]] = [
    ({"query": ""}, "query", "empty"),
    ({"documents": ["x", " "]}, "documents", "empty"),
    ({"documents": [{"title": "x"}]}, "documents.0.text", "Field required"),
    ({"documents": ["x"] * 2049}, "documents", "at most 2048"),
    ({"top_n": 0}, "top_n", "greater than or equal to 1"),
    ({"max_chunks_per_doc": 3}, "max_chunks_per_doc", "unknown parameter"),
    ({"query": HALF}, None, "surrogate"),
]
CASES = [
    (route, *case)
    for route, cases in zip(ROUTES, (CHAT, TEXT, ITEMS, VECTORS, RANKING), strict=True)
    for case in cases
]


@pytest.mark.parametrize(
    ("route", "changed", "param", "why"),
    CASES,
    ids=[f"{route} {str(changed)[:40]!a}" for route, changed, *_ in CASES],
)
def test_what_is_refused(
    served: Served, route: str, changed: dict[str, Any], param: str | None, why: str
) -> None:
    answer = post(served, route, changed)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert why in error["message"]
    if param is not None:
        assert error["param"].startswith(param)


@pytest.mark.parametrize("route", list(ROUTES))
def test_other_models(served: Served, route: str) -> None:
    answer = post(served, route, {"model": "gpt-5"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
