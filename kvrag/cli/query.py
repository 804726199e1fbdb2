"""`kvrag query`: answer one question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, answer, as_turn, print_below, retrieve
from kvrag.cli.command import given
from kvrag.cli.opening import warm_up

if TYPE_CHECKING:
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.request import Request

# Full prefill reads them; all others say how reused KV is repaired and how tokens are sampled.
_OF_PLAIN = ("max_tokens", "session_bytes", "session_store_bytes")


def query(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="The question.")],
    opening: o.Opening,
    searching: o.Searching,
    answering: o.Answering,
    sampled: o.Sampled,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Answer by full prefill instead, greedily, for comparison."),
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Answer one question from the index, and show the sources and a report."""
    from kvrag.errors import ParameterError

    if not arguments.text(question, "the question").strip():
        raise ParameterError("the question is empty: give one in quotes")
    if plain and (useless := given(context, *_not_plain(answering, sampled))):
        raise ParameterError(
            "--plain answers by full prefill, greedily: it has no use for "
            f"{', '.join(useless)}; leave one or the other out"
        )
    with opening.open() as opened:
        asking = searching.asking()
        engine = answering.engine(opened)
        warm_up(opened)
        request, seconds = retrieve(opened, [as_turn(question)], asking, **sampled.values)
        on_text = console.AnswerText(quiet=as_json)
        if plain:
            _answer_plainly(engine, question, request, seconds, on_text)
            return
        outcome = Outcome(question, answer(engine, request, on_text), seconds)
        on_text.end()
        if as_json:
            console.print_json(outcome.to_dict())
        else:
            print_below(outcome)


def _not_plain(answering: o.Answering, sampled: o.Sampled) -> list[str]:
    return [name for name in (answering.values | sampled.values) if name not in _OF_PLAIN]


def _answer_plainly(
    engine: KVEngine,
    question: str,
    request: Request,
    seconds: float,
    on_text: console.AnswerText,
) -> None:
    from kvrag.cli.plain import answer_plainly

    token_ids = engine.prompt_ids(request.prompt, hints=request.hints)
    max_tokens = engine.defaults.max_tokens or 0
    answered = answer_plainly(engine.index.model, token_ids, max_tokens, request.stop, on_text)
    on_text.end()
    if on_text.quiet:
        fields = console.plain(answered)
        console.print_json(
            {
                "question": question,
                "answer": fields.pop("text"),
                "policy": "plain",
                **fields,
                "retrieval_seconds": seconds,
            }
        )
    else:
        ttft = console.format_seconds(answered.ttft_seconds)
        console.out().print(
            f"  first token {ttft} | {answered.prompt_tokens} prompt tokens, full prefill",
            style="dim",
        )
