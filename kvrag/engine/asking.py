"""Questions over an index: search, reading order, prompt and stop strings, in one `Request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrag import arguments
from kvrag.chunk import Chunk
from kvrag.engine.request import Message, Request
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.ingest.search import Reranker

# Prompts for models without a chat template: text that the model completes.


# Text, question, answer. They show that answers are found in a text, short, and on one line.
# With questions of general knowledge instead, Gemma-3-270M got 4 of 10 look-ups right, not 8.
_EXAMPLES = (
    (
        "The bakery in Mill Lane opens at seven and closes at noon.",
        "When does the bakery open?",
        "At seven",
    ),
    (
        "Anna bought the house from Peter Lund in 1931.",
        "From whom did Anna buy the house?",
        "Peter Lund",
    ),
)


def plain_prompt(question: str, texts: Sequence[str]) -> str:
    """Return the chunks with blank lines between them, then the question to complete."""
    return "\n\n".join([*texts, f"Question: {question}\nAnswer:"])


def few_shot_prompt(question: str, texts: Sequence[str]) -> str:
    """Return the same with solved examples before the question.

    A base model then answers the question in one line. The examples follow the chunks, so that
    chunks stay at the beginning, where they may be exact.
    """
    solved = [f"{plain_prompt(asked, [text])} {answer}" for text, asked, answer in _EXAMPLES]
    return plain_prompt(question, [*texts, *solved])


# The examples of a few-shot prompt have answers of one line.
_FEW_SHOT_STOP = ("\n",)


@dataclass(frozen=True)
class Asking:
    """How questions are asked: `kvrag.KVEngine.ask`, the commands and the server ask by it.

    Attributes
    ----------
    k, filter, reranker
        What `kvrag.Index.search` finds for a question.
    instruction
        What the model is to do with the chunks; stands between them and the question.
    use_chat_template
        False: a bare prompt, without chat template and solved examples.
    """

    k: int = 4
    filter: Mapping[str, Any] | None = None
    reranker: Reranker | None = None
    instruction: str = ""
    use_chat_template: bool = True

    def converses(self, index: Index) -> bool:
        """Return whether prompts use the model's chat template; otherwise they are plain text."""
        return self.use_chat_template and bool(getattr(index.tokenizer, "chat_template", None))

    def request(
        self,
        index: Index,
        turns: Sequence[Message],
        *,
        search: str | None = None,
        hints: Sequence[str] = (),
        stop: Sequence[str] = (),
        **options: Any,
    ) -> Request:
        """Return a conversation's last question as a request, over the chunks found for it.

        A chunk that an earlier message of the user has already is not put in again. What follows
        the question, such as calls of tools and their results, stays after it: each round of calls
        finds the same chunks, and begins as the round before.

        Parameters
        ----------
        index
            The index to search.
        turns
            The conversation, as messages; the user's last message is the question.
        search
            What to search for; None means the question.
        hints, stop, options
            Fields of the request. Hints and stop strings are added to those of the question.

        Raises
        ------
        ParameterError
            When there is no question or it is answered, the filter is wrong, or other turns have no
            place in the prompt.
        """
        # One text would be taken for its characters.
        hints, stop = arguments.texts(hints, "hints"), arguments.texts(stop, "stop")
        asked = [number for number, one in enumerate(turns) if one["role"] == "user"]
        if not asked or turns[-1]["role"] == "assistant":
            last = f"{turns[-1]['role']!r}" if turns else "missing"
            raise ParameterError(
                f"the last message is {last}: kvrag searches for what the user asks last; end with "
                "a message of the user, or with a tool's result"
            )
        at = asked[-1]
        question = turns[at]["content"]
        hits = index.search(search or question, self.k, filter=self.filter, reranker=self.reranker)
        said = "\n\n".join(turns[number]["content"] for number in asked[:-1])
        chunks = reading_order([hit.chunk for hit in hits if hit.chunk.text not in said])
        prompt, ends = self._prompt(index, turns, at, [chunk.text for chunk in chunks])
        found = (hit.chunk.chunk_id for hit in hits)
        own: dict[str, Any] = {
            "hints": tuple(dict.fromkeys([*found, *hints])),
            # A form says itself where an answer ends.
            "stop": (*stop, *(() if options.get("constraint") else ends)),
        }
        return Request.of(prompt, {"stop_loops": True, **options, **own})

    def _prompt(
        self, index: Index, turns: Sequence[Message], at: int, texts: Sequence[str]
    ) -> tuple[str | list[Message], tuple[str, ...]]:
        """Return the prompt whose question is turn `at`, and what ends its answer."""
        question = turns[at]["content"]
        if self.converses(index):
            said = {**turns[at], "content": self.message(question, texts)}
            return [*turns[:at], said, *turns[at + 1 :]], own_marks(question)
        if len(turns) > 1:
            raise ParameterError(
                "this prompt has no chat template, so it cannot hold other messages; ask the "
                "question alone"
            )
        if self.use_chat_template:
            return few_shot_prompt(question, texts), _FEW_SHOT_STOP
        return plain_prompt(question, texts), own_marks(question)

    def message(self, question: str, texts: Sequence[str]) -> str:
        """Return the user's message of a question and its chunks, for a chat template."""
        said = [self.instruction] if self.instruction else []
        return "\n\n".join([*texts, *said, f"Question: {question}"])


def reading_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return chunks by document: best document last, each document's chunks in its order.

    Small models answer best from what stands next to the question. A chunk that says only "she"
    or "the company" makes sense after the text that it continues.

    Parameters
    ----------
    chunks
        Best first.
    """
    rank: dict[str, int] = {}
    for chunk in chunks:
        rank.setdefault(chunk.source, len(rank))
    return sorted(chunks, key=lambda chunk: (-rank[chunk.source], chunk.ordinal))


def own_marks(question: str) -> tuple[str, ...]:
    """Return the strings at which an answer begins to ask itself; none if questions are wanted."""
    return () if "question" in question.lower() else ("\nQuestion:",)
