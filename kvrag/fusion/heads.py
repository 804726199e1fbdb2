"""The beginnings of chunks, and where in a text one of them may stand."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# Characters that decide whether a position is looked at closely; a head has at least as many.
_NUM_SAMPLED = 6
# Odd, and without a pattern, so that few positions are looked at for nothing.
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
# Half a kilobyte each while they are marked; those of an index are not left to its first prompt.
_MARKED_AT_ONCE = 1 << 12
# Of so few positions each is looked up.
_FEW = 256

_Codes = NDArray[np.uint64]


class Heads:
    """Which chunks begin with which characters, all heads of one width.

    Notes
    -----
    Readers may share it between threads as long as nobody adds or discards meanwhile.

    Parameters
    ----------
    width
        Characters of a head, 6 or more.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._sampled = [width * part // (_NUM_SAMPLED - 1) for part in range(_NUM_SAMPLED - 1)]
        self._sampled.append(width - 1)
        self._families: dict[str, dict[str, int]] = {}
        # Where a hash of sampled characters is set, a head may begin; discarded ones stay set.
        self._marks = np.zeros(_LEAST_MARKS, bool)
        self._unmarked: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._families)

    def __getitem__(self, head: str) -> dict[str, int]:
        """Return the chunks that begin with `head`, and the length of each."""
        return self._families[head]

    def add(self, head: str, chunk_id: str, length: int) -> None:
        """Make known that a chunk of so many characters begins with `head`."""
        family = self._families.get(head)
        if family is None:
            family = self._families[head] = {}
            self._unmarked.append(head)
            if len(self._unmarked) == _MARKED_AT_ONCE:
                self._mark()
        family[chunk_id] = length

    def discard(self, head: str, chunk_id: str) -> None:
        """Forget a chunk that was added."""
        family = self._families[head]
        del family[chunk_id]
        if not family:
            del self._families[head]

    def positions(self, text: str, start: int, end: int) -> list[int]:
        """Return the ascending positions of ``text[start:end]`` at which a head stands whole."""
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
        """Set the marks of heads added since the last time."""
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
        # In this order: who finds nothing unmarked has all marks before it.
        self._marks = marks
        self._unmarked = []


def _index(sampled: Iterable[_Codes], num_marks: int) -> _Codes:
    """Return ``[n]``: the marks of n places, of each of which the sampled characters are given."""
    products = (codes * np.uint64(factor) for codes, factor in zip(sampled, _FACTORS, strict=True))
    mixed = next(products)
    for product in products:
        mixed ^= product
    # The highest bits: all characters have a part in them.
    mixed >>= np.uint64(64 - (num_marks.bit_length() - 1))
    return mixed


def _codes(text: str) -> _Codes:
    """Return the characters' code points as 64-bit numbers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
