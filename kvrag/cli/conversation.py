"""Questions to an engine, one or a whole conversation: query, chat, and the socket of a server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrag.cli.answering import Outcome, Say, answer, as_turn, retrieve
from kvrag.cli.console import count
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.engine.asking import Asking
    from kvrag.engine.base import Engine
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.idle import Idle
    from kvrag.engine.request import Request

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


class Asker:
    """Answers questions, one after another, over the chunks found for each.

    Parameters
    ----------
    engine, asking
        What answers, and how it is asked.
    history
        Earlier turns in each prompt; None for all that fit, 0 asks each question alone.
    idle
        Waits while a question is answered; None: nothing is done meanwhile.

    Raises
    ------
    ParameterError
        If there is to be a history, and prompts have no place for it.
    """

    def __init__(
        self, engine: KVEngine, asking: Asking, history: int | None = 0, idle: Idle | None = None
    ) -> None:
        index = engine.index
        remembers = asking.converses(index)
        if history and not remembers:
            raise ParameterError(
                f"--history {history}: {index.config.model} gets a plain prompt here, "
                "which cannot include earlier turns; leave the option out"
            )
        self._engine = engine
        self._asking = asking
        self._paused = nullcontext if idle is None else idle.paused
        self._conversation = Conversation(history if remembers else 0)

    def forget(self) -> None:
        """Begin a new conversation."""
        self._conversation.turns = []

    def ask(
        self, question: str, say: Say, options: Mapping[str, Any], *, verifies: bool = False
    ) -> Outcome:
        """Answer a question.

        Parameters
        ----------
        question
            The question.
        say
            Hears what happens.
        options
            Of the request.
        verifies
            Whether to hold the answer against full prefill, too.
        """
        with self._paused():
            return self._ask(question, say, options, verifies)

    def _ask(self, question: str, say: Say, options: Mapping[str, Any], verifies: bool) -> Outcome:
        engine, conversation = self._engine, self._conversation
        known = conversation.chunk_ids
        search = search_question(engine, conversation.turns, question)
        if search != question:
            say("search", search)
        request, seconds = self._fitting(question, search, say, options)
        if verifies:
            from kvrag.engine.verify import to_verify, verify

            request = to_verify(request.over(engine.defaults))
        answered = answer(engine, request, partial(say, "text"))
        if isinstance(request.prompt, list):  # others are not remembered
            said = request.prompt[-1]["content"]
            new = tuple(i for i in request.hints if i not in conversation.chunk_ids)
            conversation.add(Turn(question, said, answered.text, new))
        verdict = None
        if verifies:
            say("working", "computing the prompt in full")
            verdict = verify(engine, request, answered)
        found = None if search == question else search
        return Outcome(question, answered, seconds, found, known, verdict)

    def _fitting(
        self, question: str, search: str, say: Say, options: Mapping[str, Any]
    ) -> tuple[Request, float]:
        """Return a request for which the model's window has room, and the seconds of the search."""
        engine, index, conversation = self._engine, self._engine.index, self._conversation
        while True:
            request, seconds = retrieve(
                index,
                [*conversation.history, as_turn(question)],
                self._asking,
                say,
                search=search,
                hints=conversation.chunk_ids,
                **options,
            )
            if not conversation.turns:
                return request, seconds
            num_tokens = len(engine.prompt_ids(request.prompt, hints=request.hints))
            most = request.over(engine.defaults).max_tokens or 0
            if num_tokens + most <= index.config.max_positions:
                return request, seconds
            number = conversation.forget_half()
            say("note", f"the model's window is full: forgot {count(number, 'turn')}")


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
        [{"role": "user", "content": "\n".join(lines)}], max_tokens=_REWRITE_TOKENS, reuse=False
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
    from kvrag.ingest.words import long_words  # the end of a socket needs none

    wanted, found = long_words(question), long_words(written)
    is_about_it = 2 * len(wanted & found) >= len(wanted) and bool(found)
    return is_about_it and len(written) <= len(question) + _LONGEST
