"""Summary: the chunks of one page in drawn order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from kvrag_corpus.real.asked import Asked
from kvrag_corpus.real.prose import cut, first_paragraph


def summaries(pages: Sequence[str], seed: int) -> Iterator[Asked]:
    """Yield pages to summarise; their first paragraph counts as a good summary.

    No page comes again before all have come.
    """
    rng = Random(f"summary {seed}")
    while True:
        for page in rng.sample(pages, len(pages)):
            chunks = cut(page)
            order = rng.sample(range(len(chunks)), len(chunks))
            yield Asked(
                question="What is this page about? Summarise it in two sentences.",
                answers=(first_paragraph(page),),
                chunks=tuple(chunks[number] for number in order),
                supporting=tuple(range(len(chunks))),
                before=tuple(tuple(chunks[:number]) for number in order),
                is_summary=True,
            )
