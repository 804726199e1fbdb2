"""Requests made from the server's own OpenAPI document, right and wrong ones (schemathesis)."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from kvrag.engine.engine import KVEngine
from tests.support.api_server import Served, serving
from tests.support.properties import IS_EXHAUSTIVE, trials
from tests.support.rag import Rag


def wrong_data_is_refused(context: Any, response: Any, case: Any) -> bool | None:
    """Check what schemathesis does, and take 413 for a refusal: a list was too long by far."""
    too_large: bool = response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
    return None if too_large else negative_data_rejection(context, response, case)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    wrong_data_is_refused,
]
# The routes with a body: its schema, and the models that there are for it.
_ROUTES = {
    "/v1/chat/completions": ("ChatRequest", ["model", "rag:index"]),
    "/v1/responses": ("ItemsRequest", ["model", "rag:index"]),
    "/v1/completions": ("CompletionRequest", ["model"]),
    "/v1/embeddings": ("EmbeddingRequest", ["hashing-2"]),
    "/v1/rerank": ("RerankRequest", ["hashing-2"]),
    "/api/chat": ("OllamaChat", ["model", "rag:index"]),
    "/api/generate": ("OllamaGenerate", ["model", "rag:index"]),
    "/api/embed": ("OllamaEmbed", ["hashing-2"]),
}


@pytest.fixture(scope="module")
def fuzzed(rag: Rag) -> Iterator[Served]:
    with serving(rag.index, engine=KVEngine(rag.index, max_tokens=2)) as running:
        yield running


def operations(served: Served) -> dict[str, Any]:
    """Return what the document describes by method and path, with models that exist."""
    document = httpx.get(f"{served.server.url}/openapi.json").json()
    for name, models in _ROUTES.values():
        document["components"]["schemas"][name]["properties"]["model"]["enum"] = models
    schema = schemathesis.openapi.from_dict(document)
    found = (one.ok() for one in schema.get_all_operations())
    return {f"{one.method.upper()} {one.path}": one for one in found}


def keep_to_what_no_schema_says(body: dict[str, Any]) -> None:
    """Mend what the document's schema lets through: random grammars, and calls of anybody.

    The requests of the other mode keep them.
    """
    for field in ("response_format", "tool_choice", "text", "previous_response_id"):
        body.pop(field, None)
    # Texts to rank must not be empty.
    if isinstance(body.get("query"), str):
        body["query"] += "x"
    if isinstance(documents := body.get("documents"), list):
        body["documents"] = [
            f"{one}x" if isinstance(one, str) else {"text": "x"} for one in documents
        ]
    # Nor how many tokens there are, or dimensions.
    body.pop("dimensions", None)
    for field in ("prompt", "input"):
        if isinstance(given := body.get(field), list):
            body[field] = [_known(one) for one in given]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        for field in ("tool_calls", "tool_call_id"):
            message.pop(field, None)
        if message.get("role") == "tool":
            message["role"] = "user"
        if message.get("content") is None:
            message["content"] = "x"


def _known(one: Any) -> Any:
    if isinstance(one, list):
        return [_known(token) for token in one]
    return 67 + one % 26 if isinstance(one, int) else one  # letters


def fuzz(served: Served, name: str, mode: GenerationMode, num_requests: int) -> Counter[int]:
    """Send requests to an operation; return the statuses of their answers."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operations(served)[name].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            if isinstance(prompts := case.body.get("prompt"), list):
                del prompts[2:]
            keep_to_what_no_schema_says(case.body)
            for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
                if isinstance(case.body.get(field), int):
                    case.body[field] = min(case.body[field], 2)
        response = case.call_and_validate(
            base_url=served.server.url, checks=CHECKS, session=session
        )
        statuses[response.status_code] += 1

    with requests.Session() as session:
        send()
    assert httpx.get(f"{served.server.url}/readyz").json() == {"status": "ok"}
    return statuses


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("route", list(_ROUTES))
def test_routes(fuzzed: Served, route: str, mode: GenerationMode) -> None:
    """Send requests made from the document: 10 to each route, or 10,000 in all."""
    is_right = mode is GenerationMode.POSITIVE
    generates = is_right and route.endswith(("completions", "responses"))
    number = trials(700 if generates else 1129, 10)
    statuses = fuzz(fuzzed, f"POST {route}", mode, number)
    assert statuses.total() > 0.95 * number or not IS_EXHAUSTIVE
    assert statuses[200 if is_right else 400] > 2
    assert statuses.keys() <= {200, 400, 404, 413}


def test_routes_without_a_body(fuzzed: Served) -> None:
    number = trials(100, 3)
    for name in operations(fuzzed):
        if name.startswith("GET"):
            assert fuzz(fuzzed, name, GenerationMode.POSITIVE, number).keys() <= {200, 404}
