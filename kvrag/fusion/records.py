"""Choosing the record of a chunk's KV that fits a prompt, by the text before the chunk.

Chunks of several documents may have the same text, each encoded after different context. KV that
has seen another document must not be used for this one. If the prompt does not show which document
is meant, a record without context is chosen, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvrag.chunk import Chunk

Record = tuple[Chunk, tuple[int, ...]]
"""A chunk, and the context tokens that this record of it was encoded after."""


@dataclass(frozen=True)
class FoundText:
    """A stretch of the prompt that is the text of a chunk.

    Attributes
    ----------
    chunks
        The chunks with this text, at least one.
    is_whole
        Whether the prompt contains all of the text.
    has_more
        Whether further chunks may have the same text.
    """

    chunks: Sequence[Chunk]
    is_whole: bool
    has_more: bool


def choose_records(
    found: Sequence[FoundText],
    is_exact: Callable[[int, tuple[int, ...]], bool],
    hints: Collection[str] = (),
) -> list[Record | None]:
    """Choose for every text found the record that fits the prompt best.

    The rules apply in this order:

    1. A record that is exact at the text's place.
    2. The record with context of a chunk whose predecessor in the document precedes the text,
       whole; the nearest predecessor counts.
    3. The first record of the chunk. If several chunks have the text: that of the only document
       with more text in the prompt, or that of the chunk hinted at.
    4. If the records that remain have different contexts: a record without context, or None.

    Parameters
    ----------
    found
        The texts in prompt order.
    is_exact
        Takes the number of a text and a context of one of its chunks; returns whether that record
        is exact there.
    hints
        Ids of chunks that the prompt probably contains.
    """
    choice = _Choice(found, hints)
    return [choice.record(number, is_exact) for number in range(len(found))]


class _Choice:
    def __init__(self, found: Sequence[FoundText], hints: Collection[str]) -> None:
        self._found = found
        self._hints = frozenset(hints)

    def record(
        self, number: int, is_exact: Callable[[int, tuple[int, ...]], bool]
    ) -> Record | None:
        here = self._found[number]
        records = [(chunk, ids) for chunk in here.chunks for ids in chunk.contexts]
        if not any(ids for _, ids in records):
            return records[0]
        exact = [record for record in records if is_exact(number, record[1])]
        if exact:
            return exact[0]
        likely = self._behind_predecessors(number, records)
        likely = likely or [(chunk, chunk.contexts[0]) for chunk in here.chunks]
        if here.has_more:
            # The prompt may contain as much of the documents of unknown chunks; hints decide.
            likely = self._hinted(likely)
        elif _differ(likely):
            likely = self._of_present_document(number, likely)
            likely = (self._hinted(likely) or likely) if _differ(likely) else likely
        if likely and not _differ(likely):
            return likely[0]
        return next((record for record in records if not record[1]), None)

    def _behind_predecessors(self, number: int, records: list[Record]) -> list[Record]:
        """Return the records encoded after the nearest predecessor that the prompt has whole."""
        for earlier in reversed(self._found[:number]):
            if earlier.is_whole:
                ends = {(chunk.source, chunk.ordinal + 1) for chunk in earlier.chunks}
                behind = [
                    (chunk, ids)
                    for chunk, ids in records
                    if ids and (chunk.source, chunk.ordinal) in ends
                ]
                if behind:
                    return behind
        return []

    def _of_present_document(self, number: int, likely: list[Record]) -> list[Record]:
        """Return the records of the only document with other text in the prompt."""
        text = self._found[number].chunks[0].text
        candidates = {chunk.source for chunk, _ in likely}
        present = set()
        for other in self._found:
            if not other.has_more and other.chunks[0].text != text:
                # Text that several candidates share supports none of them.
                owners = candidates & {chunk.source for chunk in other.chunks}
                present |= owners if len(owners) == 1 else set()
        if len(present) != 1:
            return likely
        return [(chunk, ids) for chunk, ids in likely if chunk.source in present]

    def _hinted(self, likely: list[Record]) -> list[Record]:
        return [(chunk, ids) for chunk, ids in likely if chunk.chunk_id in self._hints]


def _differ(records: Sequence[Record]) -> bool:
    """Return whether records of one text have different contexts; otherwise their KV is equal."""
    return len({ids for _, ids in records}) > 1
