"""The work that all peers do: questions over pages that come back in other orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvrag.errors import ParameterError
from kvrag.models.kv_model import KVModel
from kvrag_bench.quality.handbook import handbook_pages

FIRST, ORDER, QUESTION = "first visit", "another order", "another question"
VISITS = (FIRST, ORDER, QUESTION)
"""What a prompt asks of a cache, in the order of asking.

The documents are together for the first time; then in another order, with another question; then in
that same order, with a third question.
"""

_CHUNK_TOKENS = 230
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
    content
        What the user says: documents, a blank line between them, then the question.
    """

    visit: str
    content: str


def handbook_chunks(model: KVModel) -> list[str]:
    """Return chunks of the handbook of up to 230 tokens, each made of whole paragraphs.

    Parameters
    ----------
    model
        Its tokenizer counts.
    """
    chunks = []
    for page in handbook_pages():
        parts: list[str] = []
        for paragraph in page.strip().split("\n\n"):
            joined = "\n\n".join([*parts, paragraph])
            if parts and len(model.tokenizer(joined)["input_ids"]) > _CHUNK_TOKENS:
                chunks.append("\n\n".join(parts))
                parts = []
            parts.append(paragraph)
        chunks.append("\n\n".join(parts))
    return chunks


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
            yield Prompt(visit, "\n\n".join([*order, f"Question: {question}"]))
