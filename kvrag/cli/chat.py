"""`kvrag chat`: a conversation, with retrieval for each question; shortens its history."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE, fail
from kvrag.errors import KVRagError, ParameterError, PromptTooLongError
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.cli.answering import Outcome, Settings
    from kvrag.engine.base import Engine
    from kvrag.ingest.index import Index

_PROMPT = "> "
_HELP = (
    "Type a question. /new clears the conversation, Ctrl-C stops an answer, /quit or Ctrl-D exits."
)


@dataclass(frozen=True)
class _Refused:
    """A question that could not be answered, and why."""

    question: str
    error: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def chat(
    index: o.IndexOption = o.DEFAULT_INDEX,
    model: o.ModelOption = None,
    device: o.DeviceOption = None,
    compute: o.ComputeOption = None,
    store: o.StoreOption = None,
    top_k: o.TopKOption = o.DEFAULT_TOP_K,
    filter: o.FilterOption = None,
    rerank: o.RerankOption = None,
    embedding: o.EmbeddingOption = None,
    policy: o.PolicyOption = DEFAULT_POLICY,
    ratio: o.RatioOption = None,
    boundary_tokens: o.BoundaryTokensOption = None,
    eviction: o.EvictionOption = None,
    links: o.LinksOption = None,
    ttft: o.TTFTOption = None,
    max_tokens: o.MaxTokensOption = o.DEFAULT_MAX_TOKENS,
    temperature: o.TemperatureOption = 0.0,
    seed: o.SeedOption = None,
    history: Annotated[
        int,
        typer.Option(
            min=0,
            help="Earlier turns to include in the prompt (needs a chat template); 0 for none.",
            rich_help_panel=o.TUNING,
        ),
    ] = 0,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Ask several questions in a conversation; each question searches the index again.

    Questions are read from stdin, one per line. With --json, all turns are printed as one document
    at the end. When stdin is not a terminal and a question fails, the exit code is 1.
    """
    from kvrag.cli.answering import Settings, converses, make_engine
    from kvrag.cli.opening import load_reranker, open_index, warm_up

    settings = Settings(
        top_k=top_k,
        policy=policy,
        ratio=ratio,
        boundary_tokens=boundary_tokens,
        eviction=eviction,
        links=links,
        ttft=ttft,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        use_chat_template=not no_chat,
        reranker=load_reranker(rerank),
        filter=filter,
    )
    with open_index(index, model, device, store, embedding=embedding, compute=compute) as opened:
        engine = make_engine(opened, settings)
        if history and not converses(opened, settings):
            raise ParameterError(
                f"--history {history}: {opened.config.model} gets a plain prompt here, "
                "which cannot include earlier turns; leave the option out"
            )
        warm_up(opened)
        turns = _converse(opened, engine, settings, history, quiet=as_json)
    if as_json:
        console.print_json({"turns": [turn.to_dict() for turn in turns]})
    # An interactive user has seen the error already.
    if not sys.stdin.isatty() and any(isinstance(turn, _Refused) for turn in turns):
        raise typer.Exit(EXIT_FAILURE)


def _converse(
    index: Index, engine: Engine, settings: Settings, num_history: int, *, quiet: bool
) -> list[Outcome | _Refused]:
    from kvrag.cli.answering import print_below

    if isinstance(sys.stdin, io.TextIOWrapper):
        # A line that is not valid text fails as one question and does not end the conversation.
        sys.stdin.reconfigure(errors="surrogateescape")
    turns: list[Outcome | _Refused] = []
    remembered: list[tuple[str, str]] = []
    if sys.stdin.isatty():
        console.note(_HELP)
    while (question := _read_question()) is not None:
        if question in ("/quit", "/exit"):
            break
        if question == "/new":
            remembered.clear()
            console.note("conversation cleared")
            continue
        if question.startswith("/"):
            console.note(_HELP)
            continue
        if not question:
            continue
        earlier = remembered[-num_history:] if num_history else []
        turn = _turn(index, engine, settings, question, earlier, quiet=quiet)
        if turn is None:
            continue
        turns.append(turn)
        if isinstance(turn, _Refused):
            continue
        remembered.append((question, turn.answer.text))
        if not quiet:
            print_below(turn)
    return turns


def _turn(
    index: Index,
    engine: Engine,
    settings: Settings,
    question: str,
    earlier: list[tuple[str, str]],
    *,
    quiet: bool,
) -> Outcome | _Refused | None:
    """Answer one question; return None if the user interrupts it."""
    from kvrag.cli.answering import answer, retrieve

    while True:
        show = console.AnswerText(quiet=quiet)
        try:
            outcome = answer(engine, retrieve(index, question, settings, earlier), settings, show)
        except KVRagError as error:
            if isinstance(error, PromptTooLongError) and earlier:
                earlier = earlier[1:]
                continue
            fail(str(error))
            return _Refused(_as_text(question), str(error))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.write("\n")
            console.note("stopped")
            return None
        else:
            show.end()
            return outcome


def _as_text(line: str) -> str:
    """Return a line with its undecodable bytes written in hexadecimal."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _read_question() -> str | None:
    """Return the next question, stripped, or None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and history)
    try:
        if sys.stdout.isatty():
            return input(_PROMPT).strip()
        print(_PROMPT, end="", file=sys.stderr, flush=True)  # stdout is for results only
        return input().strip()
    except EOFError:
        print(file=sys.stderr)
        return None
