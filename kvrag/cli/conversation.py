"""What `kvrag chat` remembers, and what a follow-up question searches for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrag.ingest.folding import long_words

if TYPE_CHECKING:
    from kvrag.engine.base import Engine

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
