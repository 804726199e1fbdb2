"""Which record of a chunk's KV fits a prompt: what stands before the chunk decides.

Chunks of several documents may have one text, and each of them may be encoded behind other text.
KV that has seen what another document says must not be taken for the one that is meant: where it
cannot be told which is meant, a record encoded behind nothing is taken, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvrag.chunk import Chunk

Record = tuple[Chunk, tuple[int, ...]]
"""A chunk, and the tokens that this record of it was encoded behind."""


@dataclass(frozen=True)
class FoundText:
    """A stretch of the prompt that is a text of the index.

    Attributes
    ----------
    chunks
        The chunks that have this text, at least one.
    is_whole
        Whether the prompt holds all of it.
    has_more
        Whether further chunks may have this text.
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

    That is the one that is exact where the text stands. Else, of the chunks whose predecessor in
    their document stands before it, whole, the one whose predecessor is nearest, behind it. Else
    the first record of its chunk; of several chunks, that of the only document of which more stands
    in the prompt, or that of the chunk hinted at. Where these too are encoded behind different
    text, a record that was encoded behind nothing; else None.

    Parameters
    ----------
    found
        In the order of the prompt.
    is_exact
        From the number of a text, and a context of one of its chunks, to whether that record is
        exact there.
    hints
        Ids of chunks likely in the prompt.
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
            # Of those that are not known as much may stand in the prompt; hinted ones are known.
            likely = self._hinted(likely)
        elif _differ(likely):
            likely = self._of_present_document(number, likely)
            likely = (self._hinted(likely) or likely) if _differ(likely) else likely
        if likely and not _differ(likely):
            return likely[0]
        return next((record for record in records if not record[1]), None)

    def _behind_predecessors(self, number: int, records: list[Record]) -> list[Record]:
        """Return the records behind the nearest predecessor that stands before, whole."""
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
        """Return the records of the only document of which other text stands in the prompt."""
        text = self._found[number].chunks[0].text
        candidates = {chunk.source for chunk, _ in likely}
        present = set()
        for other in self._found:
            if not other.has_more and other.chunks[0].text != text:
                # Text that several of them have speaks for none.
                owners = candidates & {chunk.source for chunk in other.chunks}
                present |= owners if len(owners) == 1 else set()
        if len(present) != 1:
            return likely
        return [(chunk, ids) for chunk, ids in likely if chunk.source in present]

    def _hinted(self, likely: list[Record]) -> list[Record]:
        return [(chunk, ids) for chunk, ids in likely if chunk.chunk_id in self._hints]


def _differ(records: Sequence[Record]) -> bool:
    """Whether records of one text are encoded behind different text: others are the same KV."""
    return len({ids for _, ids in records}) > 1
