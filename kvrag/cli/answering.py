"""Answer one question, from retrieval to the report, for query, chat and demo."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrag.cli import console
from kvrag.engine.prompts import Messages, chat_messages, reading_order
from kvrag.errors import IndexFormatError
from kvrag.models.plain import few_shot_prompt, plain_prompt

if TYPE_CHECKING:
    from kvrag.engine.answer import Answer, Source
    from kvrag.engine.base import Engine
    from kvrag.engine.engine import KVEngine
    from kvrag.ingest.index import Index
    from kvrag.ingest.ranking import Reranker

_SNIPPET_CHARACTERS = 200  # more than a terminal's line, which cuts the rest
# Without a chat template, a model may continue with a next question that it invents. The examples
# of a few-shot prompt have answers of one line.
_PLAIN_STOP = ("\nQuestion:",)
_FEW_SHOT_STOP = ("\n",)


@dataclass(frozen=True)
class Settings:
    """Parameters of the answers; `None` means the engine's default."""

    top_k: int
    max_tokens: int
    policy: str
    ratio: float | None = None
    boundary_tokens: int | None = None
    eviction: str | None = None
    links: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    use_chat_template: bool = True
    ttft: float | None = None
    instruction: str = ""
    reranker: Reranker | None = None
    filter: dict[str, Any] | None = None


@dataclass(frozen=True)
class Retrieved:
    """A prompt built from a question and the chunks found for it.

    Attributes
    ----------
    question, prompt
        The question, and the text or messages built from it and the chunks.
    stop
        Strings that end the answer.
    chunk_ids
        The chunks in the prompt.
    seconds
        Time to embed the question and search the index.
    """

    question: str
    prompt: str | Messages
    stop: tuple[str, ...]
    chunk_ids: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """A question, its answer, and the time to find its chunks."""

    question: str
    answer: Answer
    retrieval_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the answer's text under ``answer``."""
        fields = self.answer.to_dict()
        text = fields.pop("text")
        return {
            "question": self.question,
            "answer": text,
            **fields,
            "retrieval_seconds": self.retrieval_seconds,
        }


def make_engine(index: Index, settings: Settings, *, max_batch: int = 1) -> KVEngine:
    """Return an engine with these settings; check them before any model is loaded.

    Parameters
    ----------
    max_batch
        Most answers that are written together.

    Raises
    ------
    ParameterError
        When a value is out of range, or the policy or one of its parameters is unknown.
    LinksError
        When the links file cannot be read.
    """
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.sampling import Sampling

    Sampling(temperature=settings.temperature, seed=settings.seed)
    return KVEngine(
        index,
        policy=settings.policy,
        ratio=settings.ratio,
        boundary_tokens=settings.boundary_tokens,
        eviction=settings.eviction,
        links=settings.links,
        max_tokens=settings.max_tokens,
        ttft=settings.ttft,
        max_batch=max_batch,
    )


def converses(index: Index, settings: Settings) -> bool:
    """Return whether prompts use the model's chat template; otherwise they are plain text."""
    return settings.use_chat_template and bool(getattr(index.tokenizer, "chat_template", None))


def retrieve(
    index: Index,
    question: str,
    settings: Settings,
    history: Sequence[tuple[str, str]] = (),
) -> Retrieved:
    """Search the index and build the prompt; only chat prompts include `history`."""
    started = time.perf_counter()
    hits = index.search(
        question, settings.top_k, filter=settings.filter, reranker=settings.reranker
    )
    seconds = time.perf_counter() - started
    if not hits:
        console.note(f"{_why_nothing(index)}: the model answers without documents")
    chunks = reading_order([hit.chunk for hit in hits])
    texts = [chunk.text for chunk in chunks]
    chunk_ids = tuple(chunk.chunk_id for chunk in chunks)
    if converses(index, settings):
        messages = chat_messages(question, texts, history, settings.instruction)
        return Retrieved(question, messages, (), chunk_ids, seconds)
    if settings.use_chat_template:
        prompt = few_shot_prompt(question, texts)
        return Retrieved(question, prompt, _FEW_SHOT_STOP, chunk_ids, seconds)
    return Retrieved(question, plain_prompt(question, texts), _PLAIN_STOP, chunk_ids, seconds)


def _why_nothing(index: Index) -> str:
    with contextlib.suppress(IndexFormatError):
        if not any(index.catalog.counts()):
            return "the index is empty"
    return (
        "everything in the index is damaged and left out (run 'kvrag verify --repair' or 'kvrag "
        "ingest' to repair it)"
    )


def answer(
    engine: Engine,
    retrieved: Retrieved,
    settings: Settings,
    on_text: Callable[[str], None] = lambda _text: None,
) -> Outcome:
    """Answer the prompt, and pass each piece of text to `on_text` as it is generated."""
    from kvrag.engine.request import Request

    request = Request(
        retrieved.prompt,
        policy=settings.policy,
        ratio=settings.ratio,
        boundary_tokens=settings.boundary_tokens,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        stop=retrieved.stop,
        seed=settings.seed,
        hints=retrieved.chunk_ids,
    )
    final: Answer | None = None
    for delta in engine.stream(request):
        if delta.text:
            on_text(delta.text)
        final = delta.answer or final
    if final is None:
        raise RuntimeError("the engine's stream ended without an answer")
    return Outcome(retrieved.question, final, retrieved.seconds)


def print_below(outcome: Outcome) -> None:
    """Print the sources and the one-line report below a streamed answer."""
    out = console.out()
    for number, source in enumerate(outcome.answer.sources, start=1):
        line = f"  [{number}] {_source_line(source)}"
        out.print(line, style="dim", markup=False, no_wrap=True, overflow="ellipsis")
    out.print(f"  {report_line(outcome.answer)}", style="dim", markup=False, soft_wrap=True)


def report_line(answer: Answer) -> str:
    """Return one line: the time to the first token, then the engine's report."""
    return f"first token {console.format_seconds(answer.ttft_seconds)} | {answer.report.one_line()}"


def _source_line(source: Source) -> str:
    text = console.harmless(" ".join(source.text.split()))
    place = f"{console.shown_name(source.source)}#{source.ordinal}"
    return f"{place}{_page(source.metadata)}: {text[:_SNIPPET_CHARACTERS]}"


def _page(metadata: Mapping[str, Any]) -> str:
    return f" p.{metadata['page']}" if "page" in metadata else ""
