"""Biography: the lives of fictional people, one to a chunk, and a question about one fact."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from kvrag_corpus.real.asked import Asked, draw_choices
from kvrag_corpus.real.attributes import ASIDES_OF_PEOPLE, OF_PEOPLE
from kvrag_corpus.real.people import Cast, draw_facts, tell

_OPENINGS = (
    "This page is about {name}.",
    "The newsletter of the club introduces {name}.",
    "Our new neighbour is called {name}.",
    "These notes are about the life of {name}.",
    "Not many people know the life story of {name}.",
)
_LEAST_ATTRIBUTES, _MOST_ATTRIBUTES = 8, 12
_NUM_ASIDES = 2


def biographies(num_chunks: int, seed: int) -> Iterator[Asked]:
    """Yield questions over the lives of `num_chunks` people, without end.

    All lives of one prompt tell the same 8 to 12 kinds of facts, so that the kind alone never
    tells the chunk.
    """
    rng = Random(f"biography {num_chunks} {seed}")
    cast = Cast(seed, rng)
    while True:
        people = cast.draw(num_chunks)
        told = rng.sample(OF_PEOPLE, rng.randint(_LEAST_ATTRIBUTES, _MOST_ATTRIBUTES))
        facts = draw_facts(told, num_chunks, rng)
        chunks = []
        for person, life in zip(people, facts, strict=True):
            asides = rng.sample(ASIDES_OF_PEOPLE, _NUM_ASIDES)
            opening = rng.choice(_OPENINGS).format(name=person.name)
            text = tell(life, asides, person.who, person.their, rng, person.name)
            chunks.append(f"{opening} {text}")
        place, attribute = rng.randrange(num_chunks), rng.choice(told)
        right = facts[place][attribute]
        yield Asked(
            question=attribute.question.format(who=people[place].name),
            answers=(right,),
            chunks=tuple(chunks),
            supporting=(place,),
            choices=draw_choices(right, [f[attribute] for f in facts], attribute.values, rng),
        )
