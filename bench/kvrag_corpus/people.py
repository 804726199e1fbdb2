"""Persons, the chunks written about them, and the facts each chunk states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from kvrag_corpus.grammar import RELATIONS, TRADES, Grammar, Relation
from kvrag_corpus.names import NameSource


class ChunkKind(StrEnum):
    """What a chunk is to its person.

    `INTRO` names the person and the trade, `CONTINUATION` says only "the {trade}",
    `UPDATE` names the person again and corrects facts of the intro.
    """

    INTRO = "intro"
    CONTINUATION = "continuation"
    UPDATE = "update"


@dataclass(frozen=True)
class Fact:
    """One relation with its value; `changed` marks a correction of an earlier chunk."""

    relation: Relation
    value: str
    changed: bool = False


@dataclass
class Person:
    """A person in the documents, with the facts of each of their chunks."""

    name: str
    trade: str
    pronoun: str
    facts: dict[ChunkKind, list[Fact]] = field(default_factory=dict)
    has_intro: bool = True

    def states(self, relation: Relation) -> bool:
        """Say whether any chunk of this person states `relation`."""
        return any(fact.relation is relation for facts in self.facts.values() for fact in facts)


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk before it is put into words."""

    person: Person
    kind: ChunkKind

    @property
    def facts(self) -> list[Fact]:
        """The facts that the chunk states, in order."""
        return self.person.facts[self.kind]


def _kinds_per_person(
    num_chunks: int, continuation_share: float, rng: Random
) -> list[list[ChunkKind]]:
    """Share `num_chunks` chunks out: who has a continuation, who an update."""
    num_updates = int(num_chunks >= 2 and rng.random() < (0.25 if num_chunks == 2 else 0.45))
    num_others = num_chunks - num_updates
    num_continuations = num_others // 2
    if rng.random() >= continuation_share:
        num_continuations = 0
    elif num_continuations > 1 and rng.random() < 0.2:
        num_continuations -= 1
    elif num_continuations == 1 and rng.random() < 0.15:
        num_continuations = 0
    persons = [[ChunkKind.INTRO] for _ in range(num_others - num_continuations)]
    for kinds in persons[:num_continuations]:
        kinds.append(ChunkKind.CONTINUATION)
    if num_updates:
        rng.choice(persons).append(ChunkKind.UPDATE)
    return persons


def _trades(count: int, shared: float, rng: Random) -> list[str]:
    fresh = rng.sample(TRADES, count)
    trades = fresh[:1]
    for trade in fresh[1:]:
        trades.append(rng.choice(trades) if rng.random() < shared else trade)
    return trades


def _give_facts(
    person: Person,
    kinds: list[ChunkKind],
    pool: list[Relation],
    names: NameSource,
    grammar: Grammar,
    rng: Random,
) -> None:
    unused = rng.sample(pool, len(pool))

    def new_facts(count: int) -> list[Fact]:
        return [Fact(unused.pop(), names.draw()) for _ in range(min(count, len(unused)))]

    for kind in (ChunkKind.INTRO, ChunkKind.CONTINUATION):
        if kind in kinds:
            person.facts[kind] = new_facts(rng.randint(*grammar.facts_per_chunk))
    if ChunkKind.UPDATE in kinds:
        changeable = [fact for fact in person.facts[ChunkKind.INTRO] if fact.relation.changes]
        corrected = rng.sample(changeable, min(3, len(changeable)))
        facts = [Fact(fact.relation, names.draw(), changed=True) for fact in corrected]
        facts += new_facts(max(1, grammar.facts_per_chunk[0] - len(facts)))
        facts = facts or [Fact(person.facts[ChunkKind.INTRO][0].relation, names.draw(), True)]
        rng.shuffle(facts)
        person.facts[ChunkKind.UPDATE] = facts


def _link_persons(persons: list[Person], link_share: float, rng: Random) -> None:
    """Let person-valued facts of one intro name another person of the context (two hops)."""
    targets = [person for person in persons if person.has_intro]
    for person in targets:
        others = [other for other in targets if other is not person]
        rng.shuffle(others)
        facts = person.facts[ChunkKind.INTRO]
        corrected = [fact.relation for fact in person.facts.get(ChunkKind.UPDATE, [])]
        for index, fact in enumerate(facts):
            linkable = fact.relation.value_is_person and fact.relation not in corrected
            if linkable and others and rng.random() < link_share:
                facts[index] = Fact(fact.relation, others.pop().name)


def plan_people(
    num_chunks: int,
    names: NameSource,
    grammar: Grammar,
    rng: Random,
    subject_names: NameSource | None = None,
) -> list[Person]:
    """Invent the persons of one context and the facts of their chunks.

    Parameters
    ----------
    num_chunks
        How many chunks all persons have together.
    names
        Where values come from (and subjects, when `subject_names` is not given).
    grammar
        How varied the text is.
    rng
        Where randomness comes from.
    subject_names
        A separate source for the persons' names, to keep them unique in a corpus.

    Returns
    -------
    list of Person
        Their chunks, one for each key of `facts` (the intro of an orphan left out), are
        `num_chunks` in number.
    """
    shares = _kinds_per_person(num_chunks, grammar.continuation_share, rng)
    orphan = num_chunks >= 3 and rng.random() < grammar.orphan_share
    if orphan:
        # The predecessor that is left out makes room for one more person.
        shares.append([ChunkKind.INTRO])
    trades = _trades(len(shares), grammar.shared_trade_share, rng)
    pool = rng.sample(RELATIONS, grammar.relations_per_context)
    persons = []
    for trade in trades:
        name = (subject_names or names).draw()
        names.avoid(name)
        persons.append(Person(name, trade, rng.choice(("She", "He"))))
    for person, kinds in zip(persons, shares, strict=True):
        _give_facts(person, kinds, pool, names, grammar, rng)
    if orphan:
        _make_orphan(persons)
    _link_persons(persons, grammar.link_share, rng)
    return persons


def _make_orphan(persons: list[Person]) -> None:
    """Take the intro from one person who has a continuation and no update."""
    for person in persons:
        if set(person.facts) == {ChunkKind.INTRO, ChunkKind.CONTINUATION}:
            person.has_intro = False
            del person.facts[ChunkKind.INTRO]
            taken = {other.trade for other in persons if other is not person}
            if person.trade in taken:
                person.trade = next(trade for trade in TRADES if trade not in taken)
            return
    # Nobody qualifies: the last person, added for the orphan's room, goes again.
    persons.pop()
