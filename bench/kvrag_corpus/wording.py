"""Puts a planned chunk into words."""

from __future__ import annotations

from random import Random

from kvrag_corpus.grammar import OPENINGS, UPDATE_OPENINGS, Grammar
from kvrag_corpus.people import ChunkKind, PlannedChunk


def write_chunk(chunk: PlannedChunk, grammar: Grammar, rng: Random) -> str:
    """Return the paragraph of `chunk`, one sentence a fact.

    A continuation never names its person; every other chunk does in its first sentence.
    No paragraph begins with a name.
    """
    sentences = []
    for index, fact in enumerate(chunk.facts):
        subject = _first_subject(chunk, rng) if index == 0 else _next_subject(chunk, grammar, rng)
        predicate = rng.choice(fact.relation.statements[: grammar.wordings])
        now = " now" if fact.changed else ""
        sentences.append(f"{subject}{now} {predicate.format(value=fact.value)}.")
    return " ".join(sentences)


def _first_subject(chunk: PlannedChunk, rng: Random) -> str:
    person = chunk.person
    if chunk.kind is ChunkKind.CONTINUATION:
        return f"The {person.trade}"
    openings = UPDATE_OPENINGS if chunk.kind is ChunkKind.UPDATE else OPENINGS
    return f"{rng.choice(openings)} {person.name} the {person.trade}"


def _next_subject(chunk: PlannedChunk, grammar: Grammar, rng: Random) -> str:
    person = chunk.person
    if rng.random() < grammar.pronoun_share:
        return person.pronoun
    if chunk.kind is not ChunkKind.CONTINUATION and rng.random() < grammar.name_share:
        return person.name
    return f"The {person.trade}"
