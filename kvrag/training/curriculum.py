"""The curriculum: how many documents, how varied a text, which prompt formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from kvrag.bench.corpus.context import sample_context
from kvrag.bench.corpus.grammar import Grammar
from kvrag.bench.corpus.names import NameSource
from kvrag.bench.corpus.questions import QuestionType
from kvrag.training.batches import Item
from kvrag.training.prompts import FORMAT_SHARES, FORMATS, PLAIN

TRAINING_SHARES: Mapping[QuestionType, float] = {
    QuestionType.INSIDE: 0.2,
    QuestionType.CARRIED_OVER: 0.42,
    QuestionType.CARRIED_OVER_ORPHAN: 0.04,
    QuestionType.TWO_HOP: 0.15,
    QuestionType.SUPERSEDED: 0.08,
    QuestionType.UNANSWERABLE: 0.11,
}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes
    ----------
    num_documents
        How many documents, as weights by count.
    grammar
        How varied the text is.
    all_formats
        Whether every prompt format is used, or the plain one alone.
    """

    num_documents: Mapping[int, float]
    grammar: Grammar
    all_formats: bool = False


STAGES: tuple[Stage, ...] = (
    Stage({2: 1}, Grammar(wordings=1, facts_per_chunk=(2, 3), pronoun_share=0.0)),
    Stage({2: 1, 3: 2}, Grammar(wordings=1, facts_per_chunk=(2, 3), pronoun_share=0.1)),
    Stage({3: 1, 4: 2}, Grammar(facts_per_chunk=(2, 4), pronoun_share=0.1)),
    Stage({3: 1, 5: 3}, Grammar()),
    Stage({1: 0.3, 2: 0.5, 3: 1, 4: 1.5, 5: 5, 6: 1.2}, Grammar(), all_formats=True),
)
PASS_MARK = 0.9
"""The accuracy (running mean) at which the next stage begins."""


def sample_items(
    stage: Stage, names: NameSource, num_rows: int, num_questions: int, rng: Random
) -> list[Item]:
    """Return `num_rows` fresh items of `stage`, all with the same prompt format."""
    prompt_format = PLAIN
    if stage.all_formats:
        prompt_format = rng.choices(FORMATS, FORMAT_SHARES)[0]
    counts = list(stage.num_documents)
    count = rng.choices(counts, list(stage.num_documents.values()))[0]
    items = []
    for _ in range(num_rows):
        context = sample_context(rng, names, count, num_questions, TRAINING_SHARES, stage.grammar)
        items.append(Item(context.texts, context.questions, prompt_format))
    return items
