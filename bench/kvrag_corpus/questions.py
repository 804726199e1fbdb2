"""Questions about planned chunks: five labelled types, answers that are copied spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from kvrag_corpus.grammar import UNKNOWN_ANSWER, Grammar, Relation
from kvrag_corpus.people import ChunkKind, Fact, Person, PlannedChunk


class QuestionType(StrEnum):
    """What a question needs.

    `INSIDE` (a): one chunk. `CARRIED_OVER` (b): a chunk that names its subject only by
    trade or pronoun, and the chunk before it. `CARRIED_OVER_ORPHAN`: the same without the
    predecessor, so the answer is `UNKNOWN_ANSWER`. `TWO_HOP` (c): two chunks.
    `SUPERSEDED` (d): a later chunk corrects an earlier one. `UNANSWERABLE` (e).
    """

    INSIDE = "inside"
    CARRIED_OVER = "carried_over"
    CARRIED_OVER_ORPHAN = "carried_over_orphan"
    TWO_HOP = "two_hop"
    SUPERSEDED = "superseded"
    UNANSWERABLE = "unanswerable"


TYPE_SHARES: dict[QuestionType, float] = {
    QuestionType.INSIDE: 0.18,
    QuestionType.CARRIED_OVER: 0.44,
    QuestionType.CARRIED_OVER_ORPHAN: 0.12,
    QuestionType.TWO_HOP: 0.13,
    QuestionType.SUPERSEDED: 0.16,
    QuestionType.UNANSWERABLE: 0.1,
}
"""Relative frequency in the benchmark of each type among those that a context allows.

Not every context has an orphan, an update or a link for two hops, so of 1,000 questions about
half are carried over, a fifth inside one chunk, and the others share the rest.
"""


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and the numbers of the chunks that they follow from.

    The bare answer stands first. Two hops may also say the person in between before it; that
    stands last.
    """

    type: QuestionType
    text: str
    answers: tuple[str, ...]
    supporting: tuple[int, ...]

    @property
    def full_answer(self) -> str:
        """The answer that models are trained to write: it says whatever leads to the last word."""
        return self.answers[-1]


class Questioner:
    """Asks about one context.

    Parameters
    ----------
    chunks
        The chunks in the order in which they are given to the model.
    strangers
        Names that no chunk mentions, for unanswerable questions.
    grammar
        How varied the wording is.
    rng
        Where randomness comes from.
    """

    def __init__(
        self, chunks: list[PlannedChunk], strangers: list[str], grammar: Grammar, rng: Random
    ) -> None:
        self._chunks = chunks
        self._strangers = strangers
        self._grammar = grammar
        self._rng = rng
        self._index = {(id(c.person), c.kind): i for i, c in enumerate(chunks)}

    def ask(self, count: int, shares: Mapping[QuestionType, float]) -> list[Question]:
        """Return up to `count` different questions, their types drawn by `shares`."""
        candidates = self.all_questions()
        for questions in candidates.values():
            self._rng.shuffle(questions)
        asked: list[Question] = []
        # A context always allows many unanswerable questions; they never fill up for others.
        unknown = candidates[QuestionType.UNANSWERABLE]
        del unknown[max(1, round(1.5 * count * shares.get(QuestionType.UNANSWERABLE, 0.0))) :]
        while len(asked) < count:
            types = [kind for kind, left in candidates.items() if left and shares.get(kind, 0) > 0]
            if not types:
                break
            kind = self._rng.choices(types, [shares[kind] for kind in types])[0]
            asked.append(candidates[kind].pop())
        return asked

    def all_questions(self) -> dict[QuestionType, list[Question]]:
        """Return every question that the context allows, by type."""
        found: dict[QuestionType, list[Question]] = {kind: [] for kind in QuestionType}
        persons = list({id(chunk.person): chunk.person for chunk in self._chunks}.values())
        for person in persons:
            for question in self._about(person):
                found[question.type].append(question)
            if person.has_intro:
                for question in self._two_hops(person, persons):
                    found[QuestionType.TWO_HOP].append(question)
        asked_relations = {
            fact.relation.name: fact.relation for c in self._chunks for fact in c.facts
        }
        for relation in asked_relations.values():
            subjects = [p.name for p in persons if p.has_intro and not p.states(relation)]
            for name in subjects + self._strangers[:1]:
                found[QuestionType.UNANSWERABLE].append(self._unknown(relation, name))
        return found

    def _about(self, person: Person) -> list[Question]:
        corrected = [fact.relation for fact in person.facts.get(ChunkKind.UPDATE, ())]
        questions = []
        for kind, facts in person.facts.items():
            place = self._index[(id(person), kind)]
            for fact in facts:
                if kind is not ChunkKind.UPDATE and fact.relation in corrected:
                    continue
                supporting: tuple[int, ...] = (place,)
                answer = fact.value
                if fact.changed:
                    label = QuestionType.SUPERSEDED
                    supporting = (self._index[(id(person), ChunkKind.INTRO)], place)
                elif kind is not ChunkKind.CONTINUATION:
                    label = QuestionType.INSIDE
                elif person.has_intro:
                    label = QuestionType.CARRIED_OVER
                    supporting = (self._index[(id(person), ChunkKind.INTRO)], place)
                else:
                    label, answer = QuestionType.CARRIED_OVER_ORPHAN, UNKNOWN_ANSWER
                text = self._wording(fact.relation, person.name)
                questions.append(Question(label, text, (answer,), supporting))
        return questions

    def _two_hops(self, person: Person, persons: list[Person]) -> list[Question]:
        by_name = {other.name: other for other in persons if other.has_intro}
        links = [
            (fact.relation, by_name[fact.value])
            for fact in _standing(person)
            if fact.value in by_name
        ]
        questions = []
        for first, other in links:
            both = (self._index[(id(who), ChunkKind.INTRO)] for who in (person, other))
            places = tuple(sorted(both))
            elsewhere = {
                fact.relation.name
                for _, rival in links
                if rival is not other
                for fact in _standing(rival)
            }
            for second in _standing(other):
                if second.value == person.name:
                    continue
                left_out = self._grammar.confusable_share
                confusable = second.relation.name in elsewhere
                if left_out and not confusable and self._rng.random() < left_out:
                    continue
                subject = f"the {first.role} of {person.name}"
                text = self._wording(second.relation, subject)
                answers = (second.value, f"{other.name}: {second.value}")
                questions.append(Question(QuestionType.TWO_HOP, text, answers, places))
        return questions

    def _unknown(self, relation: Relation, name: str) -> Question:
        text = self._wording(relation, name)
        return Question(QuestionType.UNANSWERABLE, text, (UNKNOWN_ANSWER,), ())

    def _wording(self, relation: Relation, subject: str) -> str:
        wordings = relation.questions[: self._grammar.wordings]
        return self._rng.choice(wordings).format(subject=subject)


def _standing(person: Person) -> list[Fact]:
    """Return the facts of the intro that no update corrects."""
    corrected = [fact.relation for fact in person.facts.get(ChunkKind.UPDATE, ())]
    return [fact for fact in person.facts[ChunkKind.INTRO] if fact.relation not in corrected]
