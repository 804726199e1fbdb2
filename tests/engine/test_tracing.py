"""Spans of answers and searches, in OpenTelemetry's own exporter for tests."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrag.engine.engine import KVEngine
from kvrag.engine.tracing import trace
from kvrag.errors import ParameterError, PromptTooLongError
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag"]

PROMPT = f"{PASSAGES['ledger']}\n\nWho keeps the ledger?"


class Traced:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def traced() -> Iterator[Traced]:
    found = Traced()
    end = trace(content=True, tracer_provider=found.provider)
    yield found
    end()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_an_answer(rag: Rag, traced: Traced) -> None:
    engine = KVEngine(rag.index)
    answer = engine.generate(PROMPT, max_tokens=5, stop=["zzz"], seed=3)
    (span,) = traced.spans
    said, usage = attributes(span), answer.usage
    assert span.name == "chat model"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvrag",
        "gen_ai.request.model": "model",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "llm.token_count.total": usage.prompt_tokens + usage.completion_tokens,
        "openinference.span.kind": "LLM",
        "input.value": PROMPT,
        "output.value": answer.text,
    }
    assert {name: said[name] for name in expected} == expected
    assert usage.cached_tokens > 0
    assert json.loads(said["llm.invocation_parameters"])["max_tokens"] == 5


def test_answers_of_a_batch_and_of_an_event_loop(rag: Rag, traced: Traced) -> None:
    engine = KVEngine(rag.index)
    batch = engine.generate_batch([PROMPT, "Who?"], max_tokens=2)
    alone = asyncio.run(engine.agenerate("Where?", max_tokens=2))
    texts = sorted(str(attributes(span)["output.value"]) for span in traced.spans)
    assert texts == sorted(one.text for one in [*batch, alone])


def test_a_search(rag: Rag, traced: Traced) -> None:
    hits = rag.index.search("Who keeps the ledger?", k=2)
    (span,) = traced.spans
    said = attributes(span)
    assert span.name == "retrieval index"
    assert said["openinference.span.kind"] == "RETRIEVER"
    assert said["input.value"] == "Who keeps the ledger?"
    for number, hit in enumerate(hits):
        place = f"retrieval.documents.{number}.document"
        assert said[f"{place}.id"] == hit.chunk.chunk_id
        assert said[f"{place}.content"] == hit.chunk.text
        assert said[f"{place}.score"] == pytest.approx(hit.score)


def test_a_stream_that_is_left(rag: Rag, traced: Traced) -> None:
    stream = KVEngine(rag.index).stream(PROMPT, max_tokens=50)
    next(stream)
    assert traced.spans == []
    stream.close()  # type: ignore[attr-defined]
    (span,) = traced.spans
    assert "gen_ai.usage.output_tokens" not in attributes(span)


def test_an_error(rag: Rag, traced: Traced) -> None:
    engine = KVEngine(rag.index)
    with pytest.raises(PromptTooLongError):
        engine.generate("long " * 3000)
    with pytest.raises(ParameterError, match="empty"):
        KVEngine(rag.index).generate(
            [{"role": "user", "content": "x"}], policy="none", hints=["x"], stop=[""]
        )
    (span,) = traced.spans
    assert not span.status.is_ok
    assert attributes(span)["error.type"] == "PromptTooLongError"


def test_without_content_nothing_is_told(rag: Rag) -> None:
    found = Traced()
    end = trace(tracer_provider=found.provider)
    try:
        with pytest.raises(ParameterError, match="on already"):
            trace()
        KVEngine(rag.index).generate(PROMPT, max_tokens=2)
        rag.index.search("ledger")
    finally:
        end()
    KVEngine(rag.index).generate(PROMPT, max_tokens=2)
    assert len(found.spans) == 2
    told = json.dumps([attributes(span) for span in found.spans], default=str)
    assert "ledger" not in told
    assert not {"input.value", "output.value"} & {
        one for span in found.spans for one in attributes(span)
    }
