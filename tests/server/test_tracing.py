"""Spans of the server's requests, in OpenTelemetry's own exporter for tests, and sent away."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from kvrag.engine.engine import KVEngine
from kvrag.engine.tracing import trace
from kvrag.server import app as apps
from kvrag.server.tracing import Traced as TracedApp
from kvrag.server.tracing import exporting_to
from tests.engine.test_tracing import Traced, attributes
from tests.server.test_faults import wait_until
from tests.support.api_server import Served, serving
from tests.support.rag import Rag

QUESTION = "Who keeps the harbour ledger?"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, Traced]]:
    found = Traced()
    make = apps.make_app
    monkeypatch.setattr(
        "tests.support.api_server.make_app", lambda *given: TracedApp(make(*given), found.provider)
    )
    end = trace(tracer_provider=found.provider)
    try:
        with serving(rag.index, engine=KVEngine(rag.index, session_bytes=0)) as served:
            yield served, found
    finally:
        end()


def asked(served: Served, **changed: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": served.rag, "messages": messages, "max_tokens": 4} | changed


def by_name(found: Traced, count: int) -> dict[str, ReadableSpan]:
    wait_until(lambda: len(found.spans) == count)
    return {span.name: span for span in found.spans}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_its_search_and_its_answer(
    traced: tuple[Served, Traced], stream: bool
) -> None:
    served, found = traced
    where = f"{served.url}/chat/completions"
    body = asked(served, stream=stream)
    answer = httpx.post(where, json=body, headers={"traceparent": PARENT}, timeout=60)
    assert answer.status_code == 200
    spans = by_name(found, 3)
    request = spans["POST /v1/chat/completions"]
    assert request.kind is SpanKind.SERVER
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    for name in ("retrieval index", "chat model"):
        inner = spans[name]
        assert inner.parent.span_id == request.context.span_id
        assert f"{inner.context.trace_id:032x}" == PARENT.split("-")[1]
    said, told = attributes(request), attributes(spans["chat model"])
    assert said["http.route"] == "/v1/chat/completions"
    assert said["http.response.status_code"] == said["kvrag.status"] == 200
    assert said["kvrag.request_id"] == answer.headers["x-request-id"]
    reused = "gen_ai.usage.cache_read.input_tokens"
    assert said[reused] == told[reused] > 0
    assert told["kvrag.reused_tokens"] > 0
    stages = {name.rpartition(".")[2] for name in told if name.startswith("kvrag.seconds.")}
    assert {"layout", "load", "compute"} <= stages
    key = "gen_ai.response.time_to_first_chunk"
    # The stages are parts of the time to the first token, which the request's wait extends.
    spent = sum(told[f"kvrag.seconds.{stage}"] for stage in stages)
    assert 0 < spent <= told[key] <= said[key] + 0.05
    assert QUESTION not in str([attributes(span) for span in spans.values()])


def test_requests_at_the_same_time_have_their_own_answers(traced: tuple[Served, Traced]) -> None:
    served, found = traced
    where, body = f"{served.url}/completions", {"model": "model", "max_tokens": 8}
    prompts = [f"Ines keeps {number} ledgers" for number in range(6)]
    threads = [
        threading.Thread(target=httpx.post, args=(where,), kwargs={"json": body | {"prompt": one}})
        for one in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(found.spans) == 12)
    requests = {one.context.span_id for one in found.spans if one.kind is SpanKind.SERVER}
    parents = {one.parent.span_id for one in found.spans if one.parent is not None}
    assert len(requests) == 6
    assert parents == requests


def test_what_is_refused_and_what_is_not_traced(traced: tuple[Served, Traced]) -> None:
    served, found = traced
    httpx.get(f"{served.server.url}/healthz")
    httpx.get(f"{served.server.url}/")
    httpx.get(f"{served.url}/kvrag/chunks/secret-name?around=1")
    httpx.post(f"{served.url}/chat/completions", json=asked(served, n=-1))
    httpx.get(f"{served.url}/secret-name")
    spans = by_name(found, 3)
    assert spans.keys() == {"GET /v1/kvrag/chunks/{chunk_id}", "POST /v1/chat/completions", "GET"}
    statuses = [attributes(one)["http.response.status_code"] for one in found.spans]
    assert statuses == [404, 400, 404]
    assert "secret-name" not in str([attributes(one) for one in found.spans])


def test_a_failure_is_an_error(
    traced: tuple[Served, Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, found = traced

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(served.engine, "astream", fail)
    httpx.post(f"{served.url}/completions", json={"model": "model", "prompt": "x"})
    request = by_name(found, 1)["POST /v1/completions"]
    assert not request.status.is_ok
    assert attributes(request)["kvrag.status"] == 500


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_are_sent_to_a_collector(path: str) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        provider = exporting_to(f"http://127.0.0.1:{server.server_port}{path}")
        with provider.get_tracer("kvrag").start_as_current_span("chat model"):
            pass
        provider.shutdown()
    server.server_close()
    ((where, body),) = received
    assert where == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "kvrag"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["chat model"]
