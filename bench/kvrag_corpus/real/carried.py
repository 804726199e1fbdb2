"""Carried over: documents of two chunks, of which only the first names the person or the firm."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from kvrag_corpus.real.asked import Asked, draw_choices
from kvrag_corpus.real.attributes import ASIDES_OF_FIRMS, ASIDES_OF_PEOPLE, OF_FIRMS, OF_PEOPLE
from kvrag_corpus.real.people import Cast, draw_facts, tell
from kvrag_corpus.real.words import FIRMS

_NUM_DOCUMENTS = 4
_FACTS_PER_CHUNK = 5
_ASIDES_PER_CHUNK = 4


def carried_over(seed: int) -> Iterator[Asked]:
    """Yield questions about what a second chunk says of a pronoun or of "the firm".

    The documents of a prompt come in drawn order, each whole. They are all about people or all
    about firms, and their second chunks tell the same kinds of facts.
    """
    rng = Random(f"carried {seed}")
    cast = Cast(seed, rng)
    while True:
        if rng.random() < 0.5:
            people = cast.draw(_NUM_DOCUMENTS)
            subjects = [(person.name, person.who, person.their) for person in people]
            told, asides = OF_PEOPLE, ASIDES_OF_PEOPLE
            opening = "This document is about {name}."
        else:
            subjects = [(n, "the firm", "its") for n in rng.sample(FIRMS, _NUM_DOCUMENTS)]
            told, asides = OF_FIRMS, ASIDES_OF_FIRMS
            opening = "This document is about the firm {name}."
        drawn = rng.sample(told, 2 * _FACTS_PER_CHUNK)
        facts = draw_facts(drawn, _NUM_DOCUMENTS, rng)
        chunks: list[str] = []
        for (name, who, their), known in zip(subjects, facts, strict=True):
            mixed_in = rng.sample(asides, 2 * _ASIDES_PER_CHUNK)
            first = {attribute: known[attribute] for attribute in drawn[:_FACTS_PER_CHUNK]}
            second = {attribute: known[attribute] for attribute in drawn[_FACTS_PER_CHUNK:]}
            beginning = tell(first, mixed_in[:_ASIDES_PER_CHUNK], who, their, rng)
            chunks.append(f"{opening.format(name=name)} {beginning}")
            chunks.append(tell(second, mixed_in[_ASIDES_PER_CHUNK:], who, their, rng))
        place, attribute = rng.randrange(_NUM_DOCUMENTS), rng.choice(drawn[_FACTS_PER_CHUNK:])
        right = facts[place][attribute]
        yield Asked(
            question=attribute.question.format(who=subjects[place][0]),
            answers=(right,),
            chunks=tuple(chunks),
            supporting=(2 * place, 2 * place + 1),
            choices=draw_choices(right, [f[attribute] for f in facts], attribute.values, rng),
            before=tuple(tuple(chunks[i - 1 : i]) if i % 2 else () for i in range(len(chunks))),
        )
