"""OpenTelemetry spans of the server's requests; the spans of their answers are inside them."""

from __future__ import annotations

import os
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.server.gate import Record

_API = "/v1/"
_TRACES = "/v1/traces"


class Traced:
    """ASGI middleware that makes a span of each request to the API.

    A client's header ``traceparent`` makes the span part of the client's own trace. Spans hold no
    text, no address and no query of the request.

    Parameters
    ----------
    app
        The application, with its gate.
    tracer_provider
        Where spans go; None means the process's own.
    """

    def __init__(self, app: ASGIApp, tracer_provider: Any = None) -> None:
        self._app = app
        self._tracer = trace.get_tracer("kvrag", tracer_provider=tracer_provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, inside a span."""
        if scope["type"] != "http" or not scope["path"].startswith(_API):
            await self._app(scope, receive, send)
            return
        with self._tracer.start_as_current_span(
            scope["method"],
            propagate.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            # Errors may name what the client sent; the log has them.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = Headers(raw=message.get("headers", []))
                    span.set_attribute("kvrag.request_id", headers.get("x-request-id", ""))
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self._app(scope, receive, send_noted)
            finally:
                _describe(span, scope)


def _describe(span: Span, scope: Scope) -> None:
    """Say what is known at a request's end."""
    span.set_attribute("http.request.method", scope["method"])
    # Not the path, which may name documents; an unknown one has no route.
    if (route := getattr(scope.get("route"), "path", None)) is not None:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    record: Record | None = scope.get("state", {}).get("record")
    if record is not None:
        span.set_attributes(_told(record))
        if record.outcome >= 500:
            span.set_status(Status(StatusCode.ERROR))


def _told(record: Record) -> dict[str, Any]:
    told: dict[str, Any] = {"kvrag.tenant": record.account.tenant, "kvrag.status": record.outcome}
    generation = record.generation
    if generation is not None:
        told |= {
            "gen_ai.usage.input_tokens": generation.tokens["prompt"],
            "gen_ai.usage.cache_read.input_tokens": generation.tokens["cached"],
            "gen_ai.usage.output_tokens": generation.tokens["completion"],
        }
        if generation.ttft_seconds is not None:
            # With the wait for a turn, which the answer's own span leaves out.
            told["gen_ai.response.time_to_first_chunk"] = generation.ttft_seconds
    return told


def exporting_to(url: str) -> Any:
    """Return a tracer provider whose spans go to a collector: OTLP over HTTP.

    Parameters
    ----------
    url
        The collector's address, such as ``http://127.0.0.1:4318``, with or without the path of its
        traces. Environment variables of
        OpenTelemetry set the rest, such as ``OTEL_EXPORTER_OTLP_HEADERS``.

    Raises
    ------
    ParameterError
        If it is no address.
    """
    if not url.startswith(("http://", "https://")):
        raise ParameterError(
            f"--trace {shown(url)}: expected the address of a collector, such as "
            "http://127.0.0.1:4318"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "kvrag")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    address = url.rstrip("/").removesuffix(_TRACES)
    exporter = OTLPSpanExporter(endpoint=address + _TRACES)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
