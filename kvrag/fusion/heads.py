"""The heads (first characters) of chunks, and a search for them in a text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# Characters sampled to decide whether to check a position; a head has at least as many.
_NUM_SAMPLED = 6
# Odd multipliers without a pattern, so that few positions are checked in vain.
_FACTORS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
)
_LEAST_MARKS = 1 << 16
_MARKS_PER_HEAD = 8
# Marking takes half a kilobyte per head. An index's heads are marked as they are added, not all at
# the first prompt.
_MARKED_AT_ONCE = 1 << 12
# Up to this many positions are looked up one by one.
_FEW = 256

_Codes = NDArray[np.uint64]


class Heads:
    """A table of the characters that chunks begin with; all heads have the same width.

    Notes
    -----
    Several threads may read the table at once as long as no thread adds or discards heads.

    Parameters
    ----------
    width
        Number of characters in a head, 6 or more.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._sampled = [width * part // (_NUM_SAMPLED - 1) for part in range(_NUM_SAMPLED - 1)]
        self._sampled.append(width - 1)
        self._families: dict[str, dict[str, int]] = {}
        # A mark at the hash of sampled characters means that a head may begin there; the marks of
        # discarded heads stay set.
        self._marks = np.zeros(_LEAST_MARKS, bool)
        self._unmarked: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._families)

    def __getitem__(self, head: str) -> dict[str, int]:
        """Return the chunks that begin with `head`: chunk id to length in characters."""
        return self._families[head]

    def copy(self) -> Heads:
        """Return a table with the same heads, which is altered apart from this one."""
        copied = Heads(self._width)
        copied._families = {head: dict(family) for head, family in self._families.items()}
        copied._marks, copied._unmarked = self._marks.copy(), list(self._unmarked)
        return copied

    def add(self, head: str, chunk_id: str, length: int) -> None:
        """Add a chunk of `length` characters that begins with `head`."""
        family = self._families.get(head)
        if family is None:
            family = self._families[head] = {}
            self._unmarked.append(head)
            if len(self._unmarked) == _MARKED_AT_ONCE:
                self._mark()
        family[chunk_id] = length

    def discard(self, head: str, chunk_id: str) -> None:
        """Remove a chunk that was added."""
        family = self._families[head]
        del family[chunk_id]
        if not family:
            del self._families[head]

    def positions(self, text: str, start: int, end: int) -> list[int]:
        """Return the ascending positions in `text` of all heads within ``text[start:end]``."""
        width, families = self._width, self._families
        places: Iterable[int] = range(start, end - width + 1)
        if end - start > _FEW:
            self._mark()
            codes, num_places = _codes(text[start:end]), end - start - width + 1
            sampled = [codes[offset : offset + num_places] for offset in self._sampled]
            marked = self._marks[_index(sampled, len(self._marks))]
            places = (marked.nonzero()[0] + start).tolist()
        return [place for place in places if text[place : place + width] in families]

    def _mark(self) -> None:
        """Set the marks of heads added since the last call."""
        unmarked = self._unmarked
        if not unmarked:
            return
        marks = self._marks
        if _MARKS_PER_HEAD * len(self._families) > len(marks):
            marks = np.zeros(1 << (_MARKS_PER_HEAD * len(self._families)).bit_length(), bool)
            unmarked = list(self._families)
        for begin in range(0, len(unmarked), _MARKED_AT_ONCE):
            some = unmarked[begin : begin + _MARKED_AT_ONCE]
            codes = _codes("".join(some)).reshape(len(some), self._width)
            marks[_index(codes.T[self._sampled], len(marks))] = True
        # In this order: a thread that sees no unmarked heads must already see all marks.
        self._marks = marks
        self._unmarked = []


def _index(sampled: Iterable[_Codes], num_marks: int) -> _Codes:
    """Return ``[n]``: the index of the mark of each of n places, from their sampled characters."""
    products = (codes * np.uint64(factor) for codes, factor in zip(sampled, _FACTORS, strict=True))
    mixed = next(products)
    for product in products:
        mixed ^= product
    # All characters influence the highest bits.
    mixed >>= np.uint64(64 - (num_marks.bit_length() - 1))
    return mixed


def _codes(text: str) -> _Codes:
    """Return the characters' code points as 64-bit numbers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
