"""Where tokens of stored chunks may be in a prompt: a table of sampled n-grams.

Source: winnowing (Schleimer, Wilkerson, Aiken: "Winnowing: local algorithms for document
fingerprinting", SIGMOD 2003). The n-gram with the least hash of each `WINDOW` consecutive ones is a
fingerprint. Two texts that share `MIN_RUN` tokens share a whole window, and so a fingerprint,
wherever they were cut. The table says only which chunks to compare: it keeps no places and no
tokens.

Among equal hashes it does not matter which one is taken, since places are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

NGRAM = 8
"""Tokens of an n-gram."""

WINDOW = 25
"""Consecutive n-grams of which one is a fingerprint, on average one in 13 of all."""

MIN_RUN = NGRAM + WINDOW - 1
"""Tokens of a run that is always found."""

_ROW_BITS = 30
_MAX_ROW = (1 << _ROW_BITS) - 1
_ROWS = np.uint64(_MAX_ROW)
_SHIFT = np.uint64(_ROW_BITS)
# Odd multipliers without a pattern.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_BASE = 0xA0761D6478BD642F
# Tokens hashed at once: the arrays between then fit a processor's cache.
_STRETCH = 1 << 16

Hashes = NDArray[np.uint64]


def ngram_hashes(token_ids: NDArray[np.int32]) -> Hashes:
    """Return the hash of the n-gram at each place ``[max(0, n - NGRAM + 1)]``."""
    hashes = token_ids.astype(np.uint64)
    hashes *= _SPREAD
    hashes ^= hashes >> np.uint64(29)
    hashes *= _MIX
    width = 1
    while width < NGRAM:
        if len(hashes) <= width:
            return hashes[:0]
        factor = np.uint64(pow(_BASE, width, 1 << 64))
        hashes = hashes[:-width] * factor + hashes[width:]
        width *= 2
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    return hashes


def window_minima(hashes: Hashes) -> Hashes:
    """Return the least hash of the window at each place ``[max(0, n - WINDOW + 1)]``."""
    if len(hashes) < WINDOW:
        return hashes[:0]
    width = 1
    least = hashes
    while width * 2 <= WINDOW:
        least = np.minimum(least[:-width], least[width:])
        width *= 2
    rest = WINDOW - width
    return np.minimum(least[:-rest], least[rest:])


class Fingerprints:
    """A table of fingerprints with the catalog rows of the chunks that have them.

    A table is never changed: `with_chunks` returns another one, which shares most of its memory.

    Attributes
    ----------
    size_bytes
        Memory of the table: 8 bytes a fingerprint.
    """

    def __init__(self, parts: tuple[Hashes, ...] = ()) -> None:
        # Each part is sorted: 34 bits of the hash, then 30 bits of the row.
        self._parts = parts

    @property
    def parts(self) -> tuple[Hashes, ...]:
        """Sorted entries, in several arrays: what a table is made of again."""
        return self._parts

    def of_rows(self, rows: NDArray[np.int64]) -> Fingerprints:
        """Return a table with the chunks of some rows only."""
        kept = []
        for part in self._parts:
            owners = (part & _ROWS).astype(np.int64)
            kept.append(part[np.isin(owners, rows)])
        return Fingerprints(tuple(part for part in kept if len(part)))

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def with_chunks(self, chunks: Iterable[tuple[int, NDArray[np.int32]]]) -> Fingerprints:
        """Return a table that has further chunks, given as row and token ids ``[T]``.

        Chunks with fewer than `MIN_RUN` tokens, or in rows from 2**30 on, have no fingerprints.
        """
        found: list[Hashes] = []
        rows: list[int] = []
        waiting: list[NDArray[np.int32]] = []
        num_waiting = 0
        for row, token_ids in chunks:
            if len(token_ids) < MIN_RUN or row > _MAX_ROW:
                continue
            rows.append(row)
            waiting.append(token_ids)
            num_waiting += len(token_ids)
            if num_waiting >= _STRETCH:
                found.append(_entries(rows, waiting))
                rows, waiting, num_waiting = [], [], 0
        if waiting:
            found.append(_entries(rows, waiting))
        if not found:
            return self
        added = np.concatenate(found)
        found.clear()
        added.sort()
        parts = [*self._parts, added]
        # Each part is at least twice the next: few parts, and each entry is copied few times.
        while len(parts) > 1 and len(parts[-2]) < 2 * len(parts[-1]):
            merged = np.concatenate(parts[-2:])
            parts[-2:] = []
            merged.sort()
            parts.append(merged)
        return Fingerprints(tuple(parts))

    def look_up(self, hashes: Hashes, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunks that have fingerprints.

        Parameters
        ----------
        hashes
            Hashes of n-grams, ascending.
        most
            Number of chunks for one hash at which the rest of them is left out.

        Returns
        -------
        places, rows
            ``[m]``, ``[m]``: the place of a hash in `hashes`, and the row of a chunk that has it.
            Some chunks may have another n-gram, with a similar hash.
        """
        wanted = hashes >> _SHIFT << _SHIFT
        places: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        for part in self._parts:
            entries = np.searchsorted(part, wanted)
            asked = np.arange(len(wanted))
            for _ in range(most):
                inside = entries < len(part)
                entries, asked = entries[inside], asked[inside]
                values = part[entries]
                same = (values ^ wanted[asked]) <= _ROWS
                if not same.any():
                    break
                entries, asked, values = entries[same], asked[same], values[same]
                places.append(asked)
                rows.append((values & _ROWS).astype(np.int64))
                entries = entries + 1
        if not places:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(places), np.concatenate(rows)


def _entries(rows: Sequence[int], chunks: Sequence[NDArray[np.int32]]) -> Hashes:
    """Return the entries of chunks' fingerprints, each at least once."""
    lengths = np.array([len(chunk) for chunk in chunks])
    minima = window_minima(ngram_hashes(np.concatenate(chunks)))
    # A window that reaches into the next chunk is none.
    ends = np.cumsum(lengths)
    owners = np.repeat(np.arange(len(chunks)), lengths)[: len(minima)]
    inside = np.arange(len(minima)) + MIN_RUN <= ends[owners]
    entries = minima >> _SHIFT << _SHIFT
    entries |= np.array(rows, np.uint64)[owners]
    entries = entries[inside]
    # Neighbouring windows mostly have the same least hash.
    is_new = np.ones(len(entries), bool)
    np.not_equal(entries[1:], entries[:-1], out=is_new[1:])
    return entries[is_new]
