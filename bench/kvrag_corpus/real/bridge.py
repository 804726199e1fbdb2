"""Bridge: one chunk names the director of a firm, another tells the life of that person."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from kvrag_corpus.real.asked import Asked, draw_choices
from kvrag_corpus.real.attributes import ASIDES_OF_FIRMS, ASIDES_OF_PEOPLE, OF_FIRMS, OF_PEOPLE
from kvrag_corpus.real.people import Cast, draw_facts, tell
from kvrag_corpus.real.words import FIRMS

_NUM_FIRMS = 3
_NUM_FACTS = 6
_NUM_ASIDES = 2


def bridges(seed: int) -> Iterator[Asked]:
    """Yield questions about the director of a firm, over three firms and their directors."""
    rng = Random(f"bridge {seed}")
    cast = Cast(seed, rng)
    about_people = [attribute for attribute in OF_PEOPLE if attribute.name != "employer"]
    while True:
        people = cast.draw(_NUM_FIRMS)
        firms = rng.sample(FIRMS, _NUM_FIRMS)
        asked_of_people = rng.sample(about_people, _NUM_FACTS)
        told = rng.sample(OF_FIRMS, _NUM_FACTS)
        # One draw for both, so that no value of a firm is also a person's.
        facts = draw_facts([*asked_of_people, *told], _NUM_FIRMS, rng)
        chunks = []
        for firm, person, known in zip(firms, people, facts, strict=True):
            of_firm = {attribute: known[attribute] for attribute in told}
            of_person = {attribute: known[attribute] for attribute in asked_of_people}
            asides = rng.sample(ASIDES_OF_FIRMS, _NUM_ASIDES)
            business = tell(of_firm, asides, "the firm", "its", rng, firm)
            asides = rng.sample(ASIDES_OF_PEOPLE, _NUM_ASIDES)
            life = tell(of_person, asides, person.who, person.their, rng, person.name)
            chunks.append(f"The director of {firm} is {person.name}. {business}")
            chunks.append(f"This page is about the life of {person.name}. {life}")
        order = rng.sample(range(len(chunks)), len(chunks))
        place, attribute = rng.randrange(_NUM_FIRMS), rng.choice(asked_of_people)
        right = facts[place][attribute]
        yield Asked(
            question=attribute.question.format(who=f"the director of {firms[place]}"),
            answers=(right,),
            chunks=tuple(chunks[number] for number in order),
            supporting=tuple(sorted(order.index(2 * place + i) for i in range(2))),
            choices=draw_choices(right, [f[attribute] for f in facts], attribute.values, rng),
        )
