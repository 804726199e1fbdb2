"""`kvrag chat`: a conversation, with retrieval for each question."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvrag.arguments import like, shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, Shown, print_below, print_sources, print_why
from kvrag.cli.console import EXIT_FAILURE, fail
from kvrag.cli.conversation import Asker
from kvrag.cli.opening import warm_up
from kvrag.cli.through import NoServerOption, Remote, ServerGoneError, connected
from kvrag.errors import KVRagError

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


def chat(
    opening: o.Opening,
    searching: o.Searching,
    answering: o.Answering,
    sampled: o.Sampled,
    history: Annotated[int | None, typer.Option(min=0)] = None,
    no_server: NoServerOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Ask several questions in a conversation, which is remembered; each one searches the index.

    The model rewrites follow-up questions, so that they find what they mean. /help lists commands.
    Questions are read from stdin, one per line. With --json, all turns are printed as one document
    at the end. When stdin is not a terminal and a question fails, the exit code is 1.

    Parameters
    ----------
    history
        Earlier turns to include in the prompt (needs a chat template); 0 for none. Default: all
        that fit.
    """
    options = dict(sampled.values)
    with ExitStack() as held:
        asker: Asker | Remote | None = None
        if not no_server:
            asker = connected(held, opening, searching, answering, history)
        if asker is None:
            asker = held.enter_context(_here(opening, searching, answering, history))
        turns = _Chat(asker, answering, options, as_json).run()
    if as_json:
        console.print_json({"turns": turns})
    # An interactive user has seen the error already.
    if not sys.stdin.isatty() and any(isinstance(turn, _Refused) for turn in turns):
        raise typer.Exit(EXIT_FAILURE)


@contextmanager
def _here(
    opening: o.Opening, searching: o.Searching, answering: o.Answering, history: int | None
) -> Iterator[Asker]:
    """Yield what answers in this process, and prepares for other questions meanwhile."""
    with opening.open() as opened:
        from kvrag.engine.idle import FirstPlaces, Idle

        asking = searching.asking()
        engine = answering.engine(opened)
        with Idle(FirstPlaces(opened)) as idle:
            asker = Asker(engine, asking, history, idle)
            warm_up(opened)
            yield asker


@dataclass
class _Chat:
    """One conversation at a terminal or over a pipe.

    Attributes
    ----------
    asker
        What answers.
    defaults, options
        Options of all answers, and those of requests, which `/ratio` changes.
    quiet
        Print no answers.
    """

    asker: Asker | Remote
    defaults: o.Answering
    options: dict[str, Any]
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
            self.asker.forget()
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

        defaults, options = self.defaults, self.options
        policy = defaults.policy
        if not given:
            ratio = options.get("ratio", defaults.ratio)
            console.note(f"policy {policy}, ratio {'its own' if ratio is None else ratio}")
            return
        with suppress(ValueError):
            if 0.0 <= (ratio := float(given)) <= 1.0:
                if not takes_ratio(policy):
                    fail(f"/ratio {given}: policy {policy} takes none; start with another --policy")
                    return
                options["ratio"] = ratio
                console.note(f"ratio {ratio}; what was repaired otherwise is not taken")
                return
        fail(f"/ratio {shown(given)}: expected a share between 0 and 1, such as /ratio 0.3")

    # -- questions ---------------------------------------------------------------------------

    def _turn(self, question: str) -> Outcome | _Refused | None:
        """Answer one question; return None if the user interrupts it."""
        show = Shown(quiet=self.quiet)
        try:
            outcome = self.asker.ask(question, show, self.options)
        except ServerGoneError:  # and the conversation with it
            raise
        except KVRagError as error:
            fail(str(error))
            return _Refused(_as_text(question), str(error))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.write("\n")
            console.note("stopped")
            return None
        show.text.end()
        self.last = outcome
        if not self.quiet:
            print_below(outcome)
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
