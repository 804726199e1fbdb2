"""The order of chunks: shuffled, as far as "the {trade}" still means one person."""

from __future__ import annotations

from random import Random

from kvrag_corpus.people import ChunkKind, Person, PlannedChunk


def is_readable(chunks: list[PlannedChunk]) -> bool:
    """Say whether a reader from top to bottom can tell whom every chunk means.

    A continuation follows a chunk that names its person, and no other person of the same
    trade is named between the two; an update follows its intro. A continuation without
    predecessor (an orphan) has a unique trade, so no question asks about it.
    """
    named_last: dict[str, Person] = {}
    for chunk in chunks:
        person = chunk.person
        if chunk.kind is ChunkKind.CONTINUATION:
            if person.has_intro and named_last.get(person.trade) is not person:
                return False
        elif chunk.kind is ChunkKind.UPDATE and person not in named_last_persons(chunks, chunk):
            return False
        else:
            named_last[person.trade] = person
    return True


def named_last_persons(chunks: list[PlannedChunk], before: PlannedChunk) -> list[Person]:
    """Return the persons whose intro precedes the chunk `before`."""
    earlier = chunks[: chunks.index(before)]
    return [chunk.person for chunk in earlier if chunk.kind is ChunkKind.INTRO]


def shuffle_readably(persons: list[Person], rng: Random) -> list[PlannedChunk]:
    """Return the chunks of all persons in a random readable order."""
    chunks = [PlannedChunk(person, kind) for person in persons for kind in person.facts]
    order = chunks
    for _ in range(200):
        order = rng.sample(chunks, len(chunks))
        if is_readable(order):
            return order
    return chunks  # person by person, which is always readable
