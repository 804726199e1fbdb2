"""One context: the chunks given to the model together, and questions about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from kvrag_corpus.grammar import Grammar
from kvrag_corpus.layout import shuffle_readably
from kvrag_corpus.names import NameSource
from kvrag_corpus.people import PlannedChunk, plan_people
from kvrag_corpus.questions import Question, Questioner, QuestionType
from kvrag_corpus.wording import write_chunk


@dataclass(frozen=True)
class Context:
    """Chunks in the order of the prompt, their texts, and questions about them."""

    chunks: tuple[PlannedChunk, ...]
    texts: tuple[str, ...]
    questions: tuple[Question, ...]


def sample_context(
    rng: Random,
    names: NameSource,
    num_chunks: int,
    num_questions: int,
    shares: Mapping[QuestionType, float],
    grammar: Grammar,
    subject_names: NameSource | None = None,
) -> Context:
    """Invent one context.

    Parameters
    ----------
    rng
        Where randomness comes from.
    names
        Source of values; every name in the context differs.
    num_chunks
        How many documents the model is given.
    num_questions
        Upper bound; a short context may not allow as many.
    shares
        Relative frequency of each question type among those that the context allows.
    grammar
        How varied the text is.
    subject_names
        A separate source for the persons' names.
    """
    names.forget()
    persons = plan_people(num_chunks, names, grammar, rng, subject_names=subject_names)
    chunks = shuffle_readably(persons, rng)
    texts = tuple(write_chunk(chunk, grammar, rng) for chunk in chunks)
    strangers = [names.draw()]
    questions = Questioner(chunks, strangers, grammar, rng).ask(num_questions, shares)
    return Context(tuple(chunks), texts, tuple(questions))
