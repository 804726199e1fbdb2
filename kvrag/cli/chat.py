"""`kvrag chat`: a conversation, with retrieval for each question."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.arguments import shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import (
    Outcome,
    answer,
    as_turn,
    print_below,
    print_sources,
    print_why,
    retrieve,
)
from kvrag.cli.failures import EXIT_FAILURE, fail
from kvrag.cli.opening import warm_up
from kvrag.errors import KVRagError, ParameterError
from kvrag.ingest.folding import long_words
from kvrag.similar import like

if TYPE_CHECKING:
    from kvrag.engine.asking import Asking
    from kvrag.engine.base import Engine
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.idle import Idle

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
_REWRITE = (
    "Rewrite the last question so that it can be understood without the conversation: replace "
    "words such as 'she' or 'there' by what they stand for. Write only the question."
)
_REWRITE_TURNS = 3
_REWRITE_TOKENS = 48
_ANSWER_CHARACTERS = 300  # of an earlier answer: what it is about is at its beginning
_LONGEST = 300  # characters of a search question beyond those of the user's own
_AROUND = " \t\"'*"
_MARKS = ("?", "\N{FULLWIDTH QUESTION MARK}", "\N{ARABIC QUESTION MARK}")


@dataclass(frozen=True)
class _Refused:
    """A question that could not be answered, and why."""

    question: str
    error: str


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
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Ask several questions in a conversation, which is remembered; each one searches the index.

    The model rewrites follow-up questions, so that they find what they mean. /help lists commands.
    Questions are read from stdin, one per line. With --json, all turns are printed as one document
    at the end. When stdin is not a terminal and a question fails, the exit code is 1.
    """
    with opening.open() as opened:
        from kvrag.engine.first_places import FirstPlaces
        from kvrag.engine.idle import Idle

        asking = searching.asking()
        engine = answering.engine(opened)
        remembers = asking.converses(opened)
        if history and not remembers:
            raise ParameterError(
                f"--history {history}: {opened.config.model} gets a plain prompt here, "
                "which cannot include earlier turns; leave the option out"
            )
        warm_up(opened)
        conversation = Conversation(history) if remembers and history != 0 else None
        with Idle(FirstPlaces(opened)) as idle:
            chat = _Chat(engine, asking, dict(sampled.values), idle, conversation, as_json)
            turns = chat.run()
    if as_json:
        console.print_json({"turns": turns})
    # An interactive user has seen the error already.
    if not sys.stdin.isatty() and any(isinstance(turn, _Refused) for turn in turns):
        raise typer.Exit(EXIT_FAILURE)


@dataclass
class _Chat:
    """One conversation at a terminal or over a pipe.

    Attributes
    ----------
    engine, asking, options
        What answers, how it is asked, and the options of requests, which `/ratio` changes.
    idle
        What is prepared meanwhile.
    conversation
        What prompts repeat; None asks each question alone.
    quiet
        Print no answers.
    """

    engine: KVEngine
    asking: Asking
    options: dict[str, Any]
    idle: Idle
    conversation: Conversation | None
    quiet: bool
    last: Outcome | None = None

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

        argument = argument.strip()
        if argument and command in ("/sources", "/why", "/new", "/help"):
            fail(f"{command} {shown(argument)}: expected nothing after {command}")
        elif command == "/help":
            console.note(_HELP)
        elif command == "/new":
            self.last = None
            if self.conversation is not None:
                self.conversation.clear()
            console.note("conversation cleared")
        elif command == "/ratio":
            self._set_ratio(argument)
        elif command not in ("/sources", "/why"):
            known = [name.split()[0] for name in _COMMANDS]
            fail(f"unknown command {shown(command)}{like(command, known)}; /help lists them")
        elif self.quiet:
            fail(f"{command} prints text, but --json prints one document; leave one out")
        elif self.last is None:
            fail(f"{command}: nothing has been answered yet; ask a question first")
        elif command == "/sources":
            print_sources(self.last.answer)
        else:
            print_why(self.last)

    def _set_ratio(self, given: str) -> None:
        from kvrag.fusion.controller import takes_ratio

        defaults, options = self.engine.defaults, self.options
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
        known = () if self.conversation is None else self.conversation.chunk_ids
        show = console.AnswerText(quiet=self.quiet)
        try:
            with self.idle.paused():
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
        self.last = outcome
        if not self.quiet:
            print_below(outcome, known)
        return outcome

    def _answer(self, question: str, show: Callable[[str], None]) -> Outcome:

        index, conversation = self.engine.index, self.conversation
        asking, options = self.asking, self.options
        if conversation is None:
            request, seconds = retrieve(index, [as_turn(question)], asking, **options)
            return Outcome(question, answer(self.engine, request, show), seconds)
        search = search_question(self.engine, conversation.turns, question)
        if search != question and not self.quiet:
            console.out().print(
                f"  searching for: {console.one_line(search)}", style="dim", markup=False
            )
        while True:
            turns = [*conversation.history, as_turn(question)]
            request, seconds = retrieve(
                index, turns, asking, search=search, hints=conversation.chunk_ids, **options
            )
            num_tokens = len(self.engine.prompt_ids(request.prompt, hints=request.hints))
            most = self.engine.defaults.max_tokens or 0
            has_room = num_tokens + most <= index.config.max_positions
            if has_room or not conversation.turns:
                break
            number = conversation.forget_half()
            console.note(f"the model's window is full: forgot {console.count(number, 'turn')}")
        answered = answer(self.engine, request, show)
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


# -- what it remembers, and what a follow-up searches for --------------------------------------


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes
    ----------
    question, answer
        What user and model have written.
    said
        The user's message as the model got it, with its passages.
    chunk_ids
        These passages.
    """

    question: str
    said: str
    answer: str
    chunk_ids: tuple[str, ...]


class Conversation:
    """The turns that the next prompt repeats.

    Parameters
    ----------
    most
        Turns to remember; None remembers all that fit into the model's window.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.turns: list[Turn] = []

    def add(self, turn: Turn) -> None:
        """Remember a turn."""
        self.turns = [*self.turns, turn]
        if self._most is not None:
            self.turns = self.turns[len(self.turns) - self._most :]

    def clear(self) -> None:
        """Forget everything."""
        self.turns = []

    def forget_half(self) -> int:
        """Forget the older half of the turns; return how many these were.

        A prompt without its first turn has to be fused from the beginning, which should not happen
        at each question.
        """
        number = (len(self.turns) + 1) // 2
        self.turns = self.turns[number:]
        return number

    @property
    def history(self) -> list[dict[str, str]]:
        """The user's messages and their answers, as they were."""
        return [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in (("user", turn.said), ("assistant", turn.answer))
        ]

    @property
    def chunk_ids(self) -> tuple[str, ...]:
        """The passages that the prompt has already."""
        return tuple(dict.fromkeys(one for turn in self.turns for one in turn.chunk_ids))


def search_question(engine: Engine, turns: list[Turn], question: str) -> str:
    """Return what to search for: a follow-up, rewritten by the model to stand alone.

    Where the model gives nothing usable, that is the question after the one before it.

    Parameters
    ----------
    engine
        Writes the question: greedily, and at most 48 tokens.
    turns
        The conversation so far.
    question
        The user's question.
    """
    from kvrag.engine.request import Request

    if not turns:
        return question
    lines = []
    for turn in turns[-_REWRITE_TURNS:]:
        lines += [f"Question: {turn.question}", f"Answer: {turn.answer[:_ANSWER_CHARACTERS]}"]
    lines += ["", f"Last question: {question}", "", _REWRITE]
    # Without reuse, it takes no memory from the conversation.
    request = Request(
        [{"role": "user", "content": "\n".join(lines)}],
        max_tokens=_REWRITE_TOKENS,
        reuse=False,
    )
    written = first_line(engine.generate(request).text)
    return written if is_usable(written, question) else f"{turns[-1].question} {question}"


def first_line(text: str) -> str:
    """Return the first line that says something, without quotes and a label before it."""
    for line in text.splitlines():
        said = line.strip(_AROUND)
        label, colon, rest = said.partition(":")
        if colon and "question" in label.casefold() and len(label) < len("Rewritten last question"):
            said = rest.strip(_AROUND)
        if said:
            return said
    return ""


def is_usable(written: str, question: str) -> bool:
    """Return whether a model's question may replace the user's.

    It has at least half of the question's longer words, is a question too, and is not much longer.
    A small model may answer instead, or write about something else.
    """
    if question.endswith(_MARKS) and not written.endswith(_MARKS):
        return False
    wanted, found = long_words(question), long_words(written)
    is_about_it = 2 * len(wanted & found) >= len(wanted) and bool(found)
    return is_about_it and len(written) <= len(question) + _LONGEST
