"""The work that all peers do: questions over pages that come back in other orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvrag.errors import ParameterError
from kvrag_bench.quality.handbook import handbook_pages
from kvrag_corpus.real import cut

FIRST, ORDER, QUESTION = "first visit", "another order", "another question"
VISITS = (FIRST, ORDER, QUESTION)
"""What a prompt asks of a cache, in the order of asking.

The documents are together for the first time; then in another order, with another question; then in
that same order, with a third question.
"""

_QUESTIONS = (
    "What does this say about pay? Answer in one sentence.",
    "Who should be asked, and when? Answer in one sentence.",
    "Summarise the rules above in one sentence.",
)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes
    ----------
    visit
        One of `VISITS`.
    texts, question
        The documents, in their order, and the question after them.
    """

    visit: str
    texts: tuple[str, ...]
    question: str


def handbook_chunks() -> list[str]:
    """Return the handbook as chunks of whole paragraphs, of at least 90 words but the last."""
    return [chunk for page in handbook_pages() for chunk in cut(page)]


def make_prompts(
    documents: Sequence[str], num_chunks: int, num_sets: int, seed: int
) -> Iterator[Prompt]:
    """Yield three visits to each of `num_sets` sets of `num_chunks` documents.

    Raises
    ------
    ParameterError
        When there are fewer documents than the sets need: no two sets share one.
    """
    needed = num_chunks * num_sets
    if needed > len(documents):
        raise ParameterError(
            f"bench peers: {num_sets} sets of {num_chunks} chunks need {needed} documents, the "
            f"handbook has {len(documents)}: ask for fewer"
        )
    rng = Random(seed)
    drawn = rng.sample(list(documents), needed)
    for first in range(0, needed, num_chunks):
        chosen = drawn[first : first + num_chunks]
        shuffled = rng.sample(chosen, num_chunks)
        while shuffled[0] == chosen[0] and num_chunks > 1:
            shuffled = rng.sample(chosen, num_chunks)
        for visit, order, question in zip(
            VISITS, (chosen, shuffled, shuffled), _QUESTIONS, strict=True
        ):
            yield Prompt(visit, tuple(order), question)
