"""OpenTelemetry spans of answers and searches, by the conventions for generative AI.

The extra ``kvrag[otel]`` has the library; nothing else imports this module. Attributes named
``openinference`` and ``llm`` are OpenInference's, which Phoenix and others read.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from kvrag import arguments
from kvrag.engine.answer import Answer
from kvrag.engine.engine import KVEngine
from kvrag.engine.open_answer import OpenAnswer
from kvrag.engine.options import Sampling
from kvrag.engine.request import PlacedPrompt, Request
from kvrag.engine.scheduler import Start
from kvrag.errors import ParameterError
from kvrag.fusion.slices import Slices
from kvrag.ingest.index import Index
from kvrag.ingest.search import SearchHit
from kvrag.optiontable import options_of

_REQUEST = ("max_tokens", *(one.name for one, _ in options_of(Sampling)))


def trace(*, content: bool = False, tracer_provider: Any = None) -> Callable[[], None]:
    """Make a span of each answer of a `KVEngine` and each `Index.search` in this process.

    Adapters and the server answer with these classes, so their calls have spans too.

    Parameters
    ----------
    content
        Whether spans hold prompts, answers, questions and passages. They may be confidential.
    tracer_provider
        Where spans go; None means the process's own, as ``opentelemetry.trace`` has it.

    Returns
    -------
    Callable
        A function that ends the tracing.

    Raises
    ------
    ParameterError
        If the library is missing, or tracing is on already.
    """
    try:
        from opentelemetry import context
        from opentelemetry import trace as api
    except ImportError as error:
        raise ParameterError("tracing needs OpenTelemetry: pip install 'kvrag[otel]'") from error
    arguments.flag(content, "content")
    start_now, search = KVEngine._start_now, Index.search
    if hasattr(search, "__wrapped__"):
        raise ParameterError("tracing is on already: end it first, with what trace() returned")
    tracer = api.get_tracer("kvrag", tracer_provider=tracer_provider)

    @functools.wraps(start_now)
    def traced_start(self: KVEngine, prompt: Any, options: Any) -> Start:
        began, parent = time.time_ns(), context.get_current()
        request = Request.of(prompt, options)
        model = PurePath(self.index.config.model).name

        def begin() -> Any:
            span = tracer.start_span(f"chat {model}", parent, start_time=began)
            span.set_attributes(_asked(request.over(self.defaults), model, content))
            return span

        try:
            start = start_now(self, request, {})
        except Exception as error:
            _fail(begin(), error)
            raise
        return replace(start, fuse=lambda *given: _traced(begin(), start.fuse(*given), content))

    @functools.wraps(search)
    def traced_search(self: Index, query: str, k: int = 4, **options: Any) -> list[SearchHit]:
        with tracer.start_as_current_span(f"retrieval {self.name}") as span:
            hits = search(self, query, k, **options)
            span.set_attributes(_found(query, hits, self, content))
            return hits

    KVEngine._start_now = traced_start  # type: ignore[method-assign]
    Index.search = traced_search  # type: ignore[method-assign, assignment]

    def end() -> None:
        KVEngine._start_now = start_now  # type: ignore[method-assign]
        Index.search = search  # type: ignore[method-assign]

    return end


def _traced(span: Any, fusing: Slices[OpenAnswer], content: bool) -> Slices[OpenAnswer]:
    """Fuse a prompt; end the span with the answer, its error, or when nobody waits for it."""
    # The span is never current: the thread that fuses serves other requests too.
    try:
        answer = yield from fusing
    except Exception as error:
        _fail(span, error)
        raise
    except GeneratorExit:
        span.end()
        raise
    answer.on_close = functools.partial(_end, span, content)
    return answer


def _end(span: Any, content: bool, outcome: Answer | Exception | None) -> None:
    if isinstance(outcome, Exception):
        _fail(span, outcome)
        return
    if outcome is not None:
        span.set_attributes(_answered(outcome, content))
    span.end()


def _fail(span: Any, error: Exception) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.record_exception(error)
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()


def _asked(request: Request, model: str, content: bool) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in _REQUEST}
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvrag",
        "gen_ai.request.model": model,
        **{f"gen_ai.request.{name}": one for name, one in given.items() if one is not None},
        "gen_ai.request.stop_sequences": list(request.stop),
        "openinference.span.kind": "LLM",
        "llm.model_name": model,
        "llm.invocation_parameters": json.dumps(given),
        "kvrag.policy": str(request.policy),
    }
    if content and not isinstance(request.prompt, PlacedPrompt):
        is_text = isinstance(request.prompt, str)
        attributes["input.value"] = (
            request.prompt if is_text else json.dumps(request.prompt, ensure_ascii=False)
        )
        attributes["input.mime_type"] = "text/plain" if is_text else "application/json"
    return attributes


def _answered(answer: Answer, content: bool) -> dict[str, Any]:
    usage = answer.usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [answer.finish_reason],
        "gen_ai.response.time_to_first_chunk": answer.ttft_seconds,
        "llm.token_count.prompt": usage.prompt_tokens,
        "llm.token_count.completion": usage.completion_tokens,
        "llm.token_count.total": usage.prompt_tokens + usage.completion_tokens,
        "llm.token_count.prompt_details.cache_read": usage.cached_tokens,
        "kvrag.recomputed_tokens": answer.report.num_recomputed,
        "kvrag.outpriced_tokens": answer.report.num_outpriced,
        "kvrag.reused_tokens": answer.report.num_reused + answer.report.num_exact,
        "kvrag.fresh_tokens": answer.report.num_fresh,
        "kvrag.kept_tokens": answer.report.num_kept,
        **{f"kvrag.seconds.{stage}": spent for stage, spent in answer.report.seconds.items()},
        **({"output.value": answer.text, "output.mime_type": "text/plain"} if content else {}),
    }


def _found(query: str, hits: Sequence[SearchHit], index: Index, content: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": "kvrag",
        "gen_ai.data_source.id": index.name,
        "openinference.span.kind": "RETRIEVER",
    }
    if content:
        attributes |= {"gen_ai.retrieval.query.text": query, "input.value": query}
    for number, hit in enumerate(hits):
        place = f"retrieval.documents.{number}.document"
        attributes |= {f"{place}.id": hit.chunk.chunk_id, f"{place}.score": float(hit.score)}
        if content:
            attributes[f"{place}.content"] = hit.chunk.text
    return attributes
