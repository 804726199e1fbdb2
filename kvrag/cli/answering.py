"""Answer one question, from retrieval to the report, or by full prefill: query, chat, demo."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvrag.cli import console
from kvrag.engine.answer import Answer, Source, Verdict
from kvrag.errors import IndexFormatError

if TYPE_CHECKING:
    from kvrag.engine.asking import Asking
    from kvrag.engine.base import Engine
    from kvrag.engine.request import Message, PlacedPrompt, Request
    from kvrag.ingest.index import Index
    from kvrag.models.kv_model import KVModel

_SNIPPET_CHARACTERS = 200  # more than a terminal's line, which cuts the rest


Say: TypeAlias = Callable[[str, str], None]
"""Hears what happens while a question is answered: its kind and a text.

``text`` is a piece of the answer, ``note`` a remark, ``search`` what is searched for instead of the
question, ``working`` what takes a while.
"""


@dataclass(frozen=True)
class Outcome:
    """A question, its answer, the time to find its chunks, and what was searched for instead.

    `known` are the ids of chunks that the prompt had from earlier turns.
    """

    question: str
    answer: Answer
    retrieval_seconds: float
    search: str | None = None
    known: tuple[str, ...] = ()
    verdict: Verdict | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the answer's text under ``answer``."""
        fields = self.answer.to_dict()
        text = fields.pop("text")
        return {
            "question": self.question,
            **({} if self.search is None else {"search": self.search}),
            "answer": text,
            **fields,
            "retrieval_seconds": self.retrieval_seconds,
            **({} if self.verdict is None else {"verdict": self.verdict}),
        }


class Shown:
    """Shows on the terminal what happens; of an answer that is printed elsewhere, only remarks."""

    def __init__(self, *, quiet: bool) -> None:
        self.text = console.AnswerText(quiet=quiet)

    def __call__(self, kind: str, text: str) -> None:
        """Show it, as `Say` does."""
        if kind == "text":
            self.text(text)
        elif kind == "search" and not self.text.quiet:
            line = f"  searching for: {console.one_line(text)}"
            console.out().print(line, style="dim", markup=False)
        elif kind == "note" or (kind == "working" and sys.stderr.isatty()):
            console.note(text)


def retrieve(
    index: Index,
    turns: Sequence[Message],
    asking: Asking,
    say: Say = lambda _kind, text: console.note(text),
    **options: Any,
) -> tuple[Request, float]:
    """Return the request of a conversation's last question, and the seconds of the search.

    `options` are arguments of `Asking.request`.
    """
    started = time.perf_counter()
    request = asking.request(index, turns, **options)
    if not request.hints:
        say("note", f"{_why_nothing(index, asking)}: the model answers without documents")
    return request, time.perf_counter() - started


def as_turn(question: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": question}


def _why_nothing(index: Index, asking: Asking) -> str:
    with contextlib.suppress(IndexFormatError):
        if not any(index.catalog.documents.counts()):
            return "the index is empty"
    if asking.filter is not None:
        return "no document fits the filter"
    return (
        "everything in the index is damaged and left out (run 'kvrag verify --repair' or 'kvrag "
        "ingest' to repair it)"
    )


def answer(
    engine: Engine,
    request: Request | PlacedPrompt,
    on_text: Callable[[str], None] = lambda _text: None,
    **options: Any,
) -> Answer:
    """Answer a request, and pass each piece of text to `on_text` as it is generated."""
    final: Answer | None = None
    for delta in engine.stream(request, **options):
        if delta.text:
            on_text(delta.text)
        final = delta.answer or final
    if final is None:
        raise RuntimeError("the engine's stream ended without an answer")
    return final


def print_below(outcome: Outcome) -> None:
    """Print the sources, but those known, the one-line report and the verdict below an answer."""
    out = console.out()
    for number, source in enumerate(outcome.answer.sources, start=1):
        if source.chunk_id in outcome.known:
            continue
        line = f"  [{number}] {_best(number)}{_source_line(source)}"
        out.print(line, style="dim", markup=False, no_wrap=True, overflow="ellipsis")
    out.print(f"  {report_line(outcome.answer)}", style="dim", markup=False, soft_wrap=True)
    if (verdict := outcome.verdict) is not None:
        out.print(f"  {verdict.one_line()}", style="dim", markup=False)
        if verdict.instead is not None:
            console.write(f"full prefill says: {console.harmless(verdict.instead)}\n")


def _best(number: int) -> str:
    return "best match, " if number == 1 else ""


def print_sources(answer: Answer) -> None:
    """Print the passages that an answer's prompt had, each whole."""
    for number, source in enumerate(answer.sources, start=1):
        place = f"{console.shown_name(source.source)}#{source.ordinal}{_page(source.metadata)}"
        console.write(
            f"[{number}] {_best(number)}{place}\n{console.harmless(source.text.strip())}\n\n"
        )
    if not answer.sources:
        console.note("the last prompt had no passage of the index")


def print_why(outcome: Outcome) -> None:
    """Print how an answer's prompt came about: what was searched for, and each token's origin."""
    answer, report = outcome.answer, outcome.answer.report
    reasons = ", ".join(f"{number:,} {why}" for why, number in report.fresh_reasons.items())
    misses = ", ".join(f"{number:,} {why}" for why, number in report.misses.items())
    stages = ", ".join(f"{name} {console.format_seconds(s)}" for name, s in report.seconds.items())
    origins = {
        "kept from earlier turns": report.num_kept,
        "stored, exact": report.num_exact,
        "stored, reused": report.num_reused,
        "stored, recomputed": report.num_recomputed,
        "computed": report.num_fresh,
    }
    values = {
        "searched_for": console.one_line(outcome.search or outcome.question),
        "policy": report.policy,
        "prompt_tokens": report.num_tokens,
        **{origin: number for origin, number in origins.items() if number},
        **({"computed because": reasons} if reasons else {}),
        **({"misses": misses} if misses else {}),
        "first_token_after": f"{console.format_seconds(answer.ttft_seconds)} ({stages})",
        "answer_tokens": f"{answer.usage.completion_tokens}, ended by {answer.finish_reason}",
    }
    console.print_fields(values)


def report_line(answer: Answer) -> str:
    """Return one line: the time to the first token, then the engine's report."""
    return f"first token {console.format_seconds(answer.ttft_seconds)} | {answer.report.one_line()}"


def _source_line(source: Source) -> str:
    text = console.harmless(" ".join(source.text.split()))
    place = f"{console.shown_name(source.source)}#{source.ordinal}"
    return f"{place}{_page(source.metadata)}: {text[:_SNIPPET_CHARACTERS]}"


def _page(metadata: Mapping[str, Any]) -> str:
    return f" p.{metadata['page']}" if "page" in metadata else ""


@dataclass(frozen=True)
class PlainAnswer:
    """The text and the times of a greedy answer by full prefill."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    ttft_seconds: float
    total_seconds: float


def answer_plainly(
    model: KVModel,
    token_ids: Sequence[int],
    max_tokens: int,
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] = lambda _text: None,
) -> PlainAnswer:
    """Prefill `token_ids` with the model's own forward pass, and decode greedily.

    It does not use the engine with ``reuse=False``, because the baseline has to be Transformers
    over its own cache, not kvrag's rows.

    Parameters
    ----------
    model
        The model that also answers through kvrag.
    token_ids
        The ids of the fused prompt.
    max_tokens
        Maximum length of the answer.
    stop
        Strings that end the answer.
    on_text
        Called with each piece of text as it is generated.
    """
    import torch

    from kvrag.engine.text_stream import TextStream, end_ids
    from kvrag.models.writers import CACHE_ARGUMENT

    ends = end_ids(model.decoder.generation_config, model.tokenizer)
    stream = TextStream(model.tokenizer, stop, stop_loops=True)
    num_new = 0
    started = time.perf_counter()
    ttft_seconds = 0.0
    with torch.inference_mode():
        step = torch.tensor([list(token_ids)], device=model.device)
        cache = None
        while num_new < max_tokens and not (stream.stopped or stream.looped):
            with model.lock:
                output = model.hf(
                    input_ids=step, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1
                )
            cache = getattr(output, CACHE_ARGUMENT)
            token_id = int(output.logits[0, -1].argmax())
            ttft_seconds = ttft_seconds or time.perf_counter() - started
            if token_id in ends:
                break
            num_new += 1
            on_text(stream.push(token_id))
            step = torch.tensor([[token_id]], device=model.device)
    on_text(stream.finish())
    return PlainAnswer(
        text=stream.text,
        prompt_tokens=len(token_ids),
        completion_tokens=num_new,
        ttft_seconds=ttft_seconds,
        total_seconds=time.perf_counter() - started,
    )
