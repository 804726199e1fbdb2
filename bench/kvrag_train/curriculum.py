"""The curriculum: how many documents, how varied a text, which prompt formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from kvrag_corpus.context import sample_context
from kvrag_corpus.grammar import Grammar
from kvrag_corpus.names import NameSource
from kvrag_corpus.questions import QuestionType
from kvrag_train.batches import Item
from kvrag_train.prompts import FORMAT_SHARES, FORMATS, PLAIN, PromptFormat

TRAINING_SHARES: Mapping[QuestionType, float] = {
    QuestionType.INSIDE: 0.2,
    QuestionType.CARRIED_OVER: 0.42,
    QuestionType.CARRIED_OVER_ORPHAN: 0.06,
    QuestionType.TWO_HOP: 0.4,
    QuestionType.SUPERSEDED: 0.12,
    QuestionType.UNANSWERABLE: 0.13,
}
HOPPING_SHARES: Mapping[QuestionType, float] = {
    **TRAINING_SHARES,
    QuestionType.UNANSWERABLE: 0.16,
}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes
    ----------
    num_documents
        Weights of the numbers of documents.
    grammar
        Variety of the text.
    shares
        Relative frequency of each question type.
    pass_mark
        The accuracy (running mean) at which the next stage begins.
    all_formats
        Whether every prompt format is used, or only the plain one.
    """

    num_documents: Mapping[int, float]
    grammar: Grammar
    shares: Mapping[QuestionType, float]
    pass_mark: float
    all_formats: bool = False


_BINDING = Grammar(
    wordings=1,
    facts_per_chunk=(2, 3),
    pronoun_share=0.0,
    name_share=1.0,
    relations_per_context=3,
    continuation_share=0.0,
)
_CARRYING = replace(_BINDING, facts_per_chunk=(2, 2), name_share=0.6, relations_per_context=4)

_BINDING_SHARES = {
    QuestionType.INSIDE: 0.9,
    QuestionType.SUPERSEDED: 0.1,
}
_CARRYING_SHARES = {
    QuestionType.INSIDE: 0.3,
    QuestionType.CARRIED_OVER: 0.55,
    QuestionType.SUPERSEDED: 0.15,
}
_VARIED = Grammar(facts_per_chunk=(2, 3), pronoun_share=0.1, relations_per_context=7)
_SHORT = Grammar(facts_per_chunk=(3, 4), relations_per_context=7)
_HOPPING = Grammar(continuation_share=0.8, link_share=0.95, confusable_share=0.75)
_DOCUMENTS = {1: 0.3, 2: 0.5, 3: 1.0, 4: 1.5, 5: 5.0, 6: 1.2}

STAGES: tuple[Stage, ...] = (
    Stage({2: 1}, _BINDING, _BINDING_SHARES, 0.85),
    Stage({2: 1, 3: 2}, replace(_CARRYING, continuation_share=0.8), _CARRYING_SHARES, 0.85),
    Stage({3: 1, 4: 2}, _VARIED, TRAINING_SHARES, 0.7),
    Stage({3: 1, 5: 3}, _SHORT, TRAINING_SHARES, 0.75),
    Stage(_DOCUMENTS, _SHORT, TRAINING_SHARES, 1.0, all_formats=True),
    # Contrasts come last: without those of _HOPPING the person in between may be any whom the
    # subject's document names, whatever the question's first relation is.
    Stage(_DOCUMENTS, _HOPPING, HOPPING_SHARES, 1.0, all_formats=True),
)


def choose_prompt(stage: Stage, rng: Random) -> tuple[int, PromptFormat]:
    """Draw the number of documents and the prompt format of one step."""
    prompt_format = PLAIN
    if stage.all_formats:
        prompt_format = rng.choices(FORMATS, FORMAT_SHARES)[0]
    counts = list(stage.num_documents)
    return rng.choices(counts, list(stage.num_documents.values()))[0], prompt_format


def sample_items(
    stage: Stage,
    names: NameSource,
    num_documents: int,
    prompt_format: PromptFormat,
    num_rows: int,
    num_questions: int,
    rng: Random,
) -> list[Item]:
    """Return `num_rows` fresh items of `stage`."""
    items = []
    for _ in range(num_rows):
        context = sample_context(
            rng, names, num_documents, num_questions, stage.shares, stage.grammar
        )
        items.append(Item(context.texts, context.questions, prompt_format))
    return items
