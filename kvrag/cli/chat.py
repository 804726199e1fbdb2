"""`kvrag chat`: a conversation, with retrieval for each question."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.arguments import shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE, fail
from kvrag.errors import KVRagError, ParameterError
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.similar import like

if TYPE_CHECKING:
    from kvrag.cli.answering import Outcome, Settings
    from kvrag.cli.conversation import Conversation
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.first_places import FirstPlaces

_PROMPT = "> "
_COMMANDS = {
    "/sources": "the passages of the last prompt, whole",
    "/why": "what was searched for, and where each token of the last prompt came from",
    "/new": "forget the conversation",
    "/ratio SHARE": "recompute this share of reused tokens from now on; 1.0 is plain prefill",
    "/help": "these commands",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}
_HELP = "\n".join(f"{name:<14}{what}" for name, what in _COMMANDS.items())
_GREETING = "Type a question. The conversation is remembered; /help lists commands."


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
    store_patience: o.StorePatienceOption = None,
    never_slower: o.NeverSlowerOption = True,
    max_tokens: o.MaxTokensOption = o.DEFAULT_MAX_TOKENS,
    temperature: o.TemperatureOption = 0.0,
    seed: o.SeedOption = None,
    session_bytes: o.SessionBytesOption = None,
    session_store_bytes: o.SessionStoreBytesOption = None,
    history: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Earlier turns to include in the prompt (needs a chat template); 0 for none. "
            "Default: all that fit.",
            rich_help_panel=o.TUNING,
            show_default=False,
        ),
    ] = None,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Ask several questions in a conversation, which is remembered; each one searches the index.

    The model rewrites follow-up questions, so that they find what they mean. /help lists commands.
    Questions are read from stdin, one per line. With --json, all turns are printed as one document
    at the end. When stdin is not a terminal and a question fails, the exit code is 1.
    """
    from kvrag.cli.answering import Settings, make_engine
    from kvrag.cli.conversation import Conversation
    from kvrag.cli.opening import load_reranker, open_index, warm_up
    from kvrag.engine.first_places import FirstPlaces

    settings = Settings(
        top_k=top_k,
        policy=policy,
        ratio=ratio,
        boundary_tokens=boundary_tokens,
        eviction=eviction,
        links=links,
        ttft=ttft,
        store_patience=store_patience,
        never_slower=never_slower,
        session_bytes=session_bytes,
        session_store_bytes=session_store_bytes,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        use_chat_template=not no_chat,
        reranker=load_reranker(rerank),
        filter=filter,
    )
    with open_index(index, model, device, store, embedding=embedding, compute=compute) as opened:
        engine = make_engine(opened, settings)
        remembers = settings.asking.converses(opened)
        if history and not remembers:
            raise ParameterError(
                f"--history {history}: {opened.config.model} gets a plain prompt here, "
                "which cannot include earlier turns; leave the option out"
            )
        warm_up(opened)
        conversation = Conversation(history) if remembers and history != 0 else None
        with FirstPlaces(opened) as places:
            turns = _Chat(engine, settings, conversation, places, quiet=as_json).run()
    if as_json:
        console.print_json({"turns": [turn.to_dict() for turn in turns]})
    # An interactive user has seen the error already.
    if not sys.stdin.isatty() and any(isinstance(turn, _Refused) for turn in turns):
        raise typer.Exit(EXIT_FAILURE)


class _Chat:
    """One conversation at a terminal or over a pipe.

    Parameters
    ----------
    engine
        What answers.
    settings
        How; `/ratio` changes them.
    conversation
        What prompts repeat; None asks each question alone.
    places
        What is prepared while nobody asks.
    quiet
        Print no answers.
    """

    def __init__(
        self,
        engine: KVEngine,
        settings: Settings,
        conversation: Conversation | None,
        places: FirstPlaces,
        *,
        quiet: bool,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._conversation = conversation
        self._places = places
        self._quiet = quiet
        self._last: Outcome | None = None

    def run(self) -> list[Outcome | _Refused]:
        """Answer questions until there are no more; return them."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A line that is not valid text fails as one question and does not end the conversation.
            sys.stdin.reconfigure(errors="surrogateescape")
        turns: list[Outcome | _Refused] = []
        if sys.stdin.isatty():
            console.note(_GREETING)
        while (line := _read_question()) is not None:
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                self._obey(*line.split(maxsplit=1))
            elif line and (turn := self._turn(line)) is not None:
                turns.append(turn)
        return turns

    # -- commands ----------------------------------------------------------------------------

    def _obey(self, command: str, argument: str = "") -> None:
        from kvrag.cli.answering import print_sources, print_why

        argument = argument.strip()
        if argument and command in ("/sources", "/why", "/new", "/help"):
            fail(f"{command} {shown(argument)}: expected nothing after {command}")
        elif command == "/help":
            console.note(_HELP)
        elif command == "/new":
            self._last = None
            if self._conversation is not None:
                self._conversation.clear()
            console.note("conversation cleared")
        elif command == "/ratio":
            self._set_ratio(argument)
        elif command not in ("/sources", "/why"):
            known = [name.split()[0] for name in _COMMANDS]
            fail(f"unknown command {shown(command)}{like(command, known)}; /help lists them")
        elif self._quiet:
            fail(f"{command} prints text, but --json prints one document; leave one out")
        elif self._last is None:
            fail(f"{command}: nothing has been answered yet; ask a question first")
        elif command == "/sources":
            print_sources(self._last.answer)
        else:
            print_why(self._last)

    def _set_ratio(self, given: str) -> None:
        from kvrag.fusion.controller import takes_ratio

        policy = self._settings.policy
        if not given:
            ratio = self._settings.ratio
            console.note(f"policy {policy}, ratio {'its own' if ratio is None else ratio}")
            return
        try:
            ratio = float(given)
        except ValueError:
            ratio = -1.0
        if not 0.0 <= ratio <= 1.0:
            fail(f"/ratio {shown(given)}: expected a share between 0 and 1, such as /ratio 0.3")
        elif not takes_ratio(policy):
            fail(f"/ratio {given}: policy {policy} takes none; start with another --policy")
        else:
            self._settings = replace(self._settings, ratio=ratio, boundary_tokens=None)
            console.note(f"ratio {ratio}; what was repaired otherwise is not taken")

    # -- questions ---------------------------------------------------------------------------

    def _turn(self, question: str) -> Outcome | _Refused | None:
        """Answer one question; return None if the user interrupts it."""
        from kvrag.cli.answering import print_below

        known = () if self._conversation is None else self._conversation.chunk_ids
        show = console.AnswerText(quiet=self._quiet)
        try:
            with self._places.paused():
                outcome = self._answer(question, show)
        except KVRagError as error:
            fail(str(error))
            return _Refused(_as_text(question), str(error))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.write("\n")
            console.note("stopped")
            return None
        show.end()
        self._last = outcome
        if not self._quiet:
            print_below(outcome, known)
        return outcome

    def _answer(self, question: str, show: Callable[[str], None]) -> Outcome:
        from kvrag.cli.answering import Outcome, answer, as_turn, retrieve
        from kvrag.cli.conversation import Turn, search_question

        index, settings, conversation = self._engine.index, self._settings, self._conversation
        if conversation is None:
            request, seconds = retrieve(index, [as_turn(question)], settings)
            return Outcome(question, answer(self._engine, request, show), seconds)
        search = search_question(self._engine, conversation.turns, question)
        if search != question and not self._quiet:
            console.out().print(
                f"  searching for: {console.one_line(search)}", style="dim", markup=False
            )
        while True:
            turns = [*conversation.history, as_turn(question)]
            request, seconds = retrieve(
                index, turns, settings, search=search, hints=conversation.chunk_ids
            )
            num_tokens = len(self._engine.prompt_ids(request.prompt, hints=request.hints))
            has_room = num_tokens + settings.max_tokens <= index.config.max_positions
            if has_room or not conversation.turns:
                break
            number = conversation.forget_half()
            console.note(f"the model's window is full: forgot {console.count(number, 'turn')}")
        answered = answer(self._engine, request, show)
        assert isinstance(request.prompt, list)  # only chat prompts remember
        said = request.prompt[-1]["content"]
        new = tuple(i for i in request.hints if i not in conversation.chunk_ids)
        conversation.add(Turn(question, said, answered.text, new))
        return Outcome(question, answered, seconds, None if search == question else search)


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
