"""Fictional people: names that no other seed uses, facts that nobody shares, and prose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from random import Random

from kvrag_corpus.real.attributes import Attribute
from kvrag_corpus.real.words import MEN, SURNAMES, WOMEN

NUM_CASTS = 8
"""Seeds with different remainders by this share no person."""


@dataclass(frozen=True)
class Person:
    """A person's name and pronouns, as `tell` takes them."""

    first: str
    last: str
    who: str
    their: str

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first} {self.last}"


class Cast:
    """Draws the people of one seed.

    Parameters
    ----------
    seed
        Whose people to use.
    rng
        Draws their order.
    """

    def __init__(self, seed: int, rng: Random) -> None:
        women = (Person(*name, "she", "her") for name in product(WOMEN, SURNAMES))
        men = (Person(*name, "he", "his") for name in product(MEN, SURNAMES))
        everyone = [p for p in (*women, *men) if _cast_of(p) == seed % NUM_CASTS]
        self._people = rng.sample(everyone, len(everyone))

    def draw(self, count: int) -> list[Person]:
        """Return the people of one prompt, no two with the same first or last name.

        Nobody comes again before everybody has come.
        """
        drawn: list[Person] = []
        for person in self._people:
            if all(person.first != p.first and person.last != p.last for p in drawn):
                drawn.append(person)
                if len(drawn) == count:
                    break
        self._people = [p for p in self._people if p not in drawn] + drawn
        return drawn


def _cast_of(person: Person) -> int:
    return hashlib.blake2b(person.name.encode(), digest_size=8).digest()[0] % NUM_CASTS


Facts = dict[Attribute, str]
"""What is true of one person."""


def draw_facts(attributes: Iterable[Attribute], count: int, rng: Random) -> list[Facts]:
    """Return the facts of `count` people; no value comes twice."""
    facts: list[Facts] = [{} for _ in range(count)]
    taken: set[str] = set()
    for attribute in attributes:
        free = [value for value in attribute.values if value not in taken]
        for one, value in zip(facts, rng.sample(free, count), strict=True):
            one[attribute] = value
            taken.add(value)
    return facts


def tell(
    facts: Mapping[Attribute, str],
    asides: Iterable[str],
    who: str,
    their: str,
    rng: Random,
    name: str = "",
) -> str:
    """Put facts and asides into sentences, in drawn order and wordings.

    Parameters
    ----------
    facts, asides
        What to say, and what to say beside it.
    who, their
        What the subject is called: "she" and "her", "the firm" and "its".
    rng
        Where randomness comes from.
    name
        Replaces `who` in half of the sentences; empty: in none.
    """
    said = [(rng.choice(attribute.statements), value) for attribute, value in facts.items()]
    said += [(aside, "") for aside in asides]
    rng.shuffle(said)
    sentences = []
    for wording, value in said:
        subject, owner = who, their
        if name and rng.random() < 0.5:
            subject = name
            owner = their if "{who}" in wording else f"{name}'s"
        sentence = wording.format(who=subject, their=owner, value=value)
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences)
