"""`kvrag chat`: a conversation, with retrieval for each question."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.arguments import shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE, fail
from kvrag.errors import KVRagError, ParameterError
from kvrag.similar import like

if TYPE_CHECKING:
    from kvrag.cli.answering import Outcome
    from kvrag.cli.conversation import Conversation
    from kvrag.engine.asking import Asking
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.first_places import FirstPlaces

_PROMPT = "> "
_COMMANDS = {
    "/sources": "the passages of the last prompt, whole",
    "/why": "what was searched for, and where each token of the last prompt came from",
    "/new": "forget the conversation",
    "/ratio SHARE": "recompute this share of reused tokens from now on; 1.0 is full prefill",
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
    opening: o.Opening,
    searching: o.Searching,
    answering: o.Answering,
    sampled: o.Sampled,
    history: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Earlier turns to include in the prompt (needs a chat template); 0 for none. "
            "Default: all that fit.",
            show_default=False,
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Ask several questions in a conversation, which is remembered; each one searches the index.

    The model rewrites follow-up questions, so that they find what they mean. /help lists commands.
    Questions are read from stdin, one per line. With --json, all turns are printed as one document
    at the end. When stdin is not a terminal and a question fails, the exit code is 1.
    """
    from kvrag.cli.conversation import Conversation
    from kvrag.cli.opening import warm_up
    from kvrag.engine.first_places import FirstPlaces

    asking = searching.asking()
    with opening.open() as opened:
        engine = answering.engine(opened)
        remembers = asking.converses(opened)
        if history and not remembers:
            raise ParameterError(
                f"--history {history}: {opened.config.model} gets a plain prompt here, "
                "which cannot include earlier turns; leave the option out"
            )
        warm_up(opened)
        conversation = Conversation(history) if remembers and history != 0 else None
        with FirstPlaces(opened) as places:
            how = _How(engine, asking, dict(sampled.values), places)
            turns = _Chat(how, conversation, quiet=as_json).run()
    if as_json:
        console.print_json({"turns": [turn.to_dict() for turn in turns]})
    # An interactive user has seen the error already.
    if not sys.stdin.isatty() and any(isinstance(turn, _Refused) for turn in turns):
        raise typer.Exit(EXIT_FAILURE)


@dataclass(frozen=True)
class _How:
    """What answers, how it is asked, the options of requests, and what is prepared meanwhile."""

    engine: KVEngine
    asking: Asking
    options: dict[str, Any]
    places: FirstPlaces


class _Chat:
    """One conversation at a terminal or over a pipe.

    Parameters
    ----------
    how
        How questions are answered; `/ratio` changes its options.
    conversation
        What prompts repeat; None asks each question alone.
    quiet
        Print no answers.
    """

    def __init__(self, how: _How, conversation: Conversation | None, *, quiet: bool) -> None:
        self._how = how
        self._engine = how.engine
        self._conversation = conversation
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

        defaults, options = self._engine.defaults, self._how.options
        policy = str(defaults.policy)
        if not given:
            ratio = options.get("ratio", defaults.ratio)
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
            options["ratio"] = ratio
            console.note(f"ratio {ratio}; what was repaired otherwise is not taken")

    # -- questions ---------------------------------------------------------------------------

    def _turn(self, question: str) -> Outcome | _Refused | None:
        """Answer one question; return None if the user interrupts it."""
        from kvrag.cli.answering import print_below

        known = () if self._conversation is None else self._conversation.chunk_ids
        show = console.AnswerText(quiet=self._quiet)
        try:
            with self._how.places.paused():
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

        index, conversation = self._engine.index, self._conversation
        asking, options = self._how.asking, self._how.options
        if conversation is None:
            request, seconds = retrieve(index, [as_turn(question)], asking, **options)
            return Outcome(question, answer(self._engine, request, show), seconds)
        search = search_question(self._engine, conversation.turns, question)
        if search != question and not self._quiet:
            console.out().print(
                f"  searching for: {console.one_line(search)}", style="dim", markup=False
            )
        while True:
            turns = [*conversation.history, as_turn(question)]
            request, seconds = retrieve(
                index, turns, asking, search=search, hints=conversation.chunk_ids, **options
            )
            num_tokens = len(self._engine.prompt_ids(request.prompt, hints=request.hints))
            most = self._engine.defaults.max_tokens or 0
            has_room = num_tokens + most <= index.config.max_positions
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
