"""Entropy coders as one writes them with numba: rANS with a table a slot.

The plain one has one state, each symbol waiting for the one before it; the other has four in turn.

It shares the arithmetic of `kvrag.native` (32-bit states, 16-bit words, 12-bit probabilities), so
what is compared is how it is run, not what it computes. numba comes with the extra ``bench`` and
is imported here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = 12
_TOTAL = 1 << _BITS
_LEAST = 1 << 16


class NumbaCoder:
    """Codes sequences of symbols that share one table.

    Parameters
    ----------
    frequencies
        uint16 ``[256]``, summing to 4096.
    lanes
        1 or 4 states.
    """

    def __init__(self, frequencies: NDArray[np.uint16], lanes: int) -> None:
        import numba

        self._lanes = lanes
        self._frequencies = frequencies.astype(np.uint32)
        self._starts = np.concatenate([[0], np.cumsum(frequencies)[:-1]]).astype(np.uint32)
        slots = np.repeat(np.arange(len(frequencies)), frequencies)
        self._symbol_of_slot = slots.astype(np.uint8)
        # One load a symbol: frequency, and distance of the slot to the symbol's first.
        self._frequency_of_slot = self._frequencies[slots]
        self._bias_of_slot = np.arange(_TOTAL, dtype=np.uint32) - self._starts[slots]
        self._encode: Callable[..., int] = numba.njit(_encode)
        self._decode: Callable[..., None] = numba.njit(_decode_one if lanes == 1 else _decode_four)

    def encode(self, symbols: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        """Return words, in the order in which they are read, and the first states."""
        words = np.empty(len(symbols) + 8, dtype=np.uint16)
        states = np.full(self._lanes, _LEAST, dtype=np.uint32)
        count = self._encode(symbols, self._frequencies, self._starts, states, words)
        return words[:count][::-1].copy(), states

    def decode(
        self, coded: tuple[NDArray[np.uint16], NDArray[np.uint32]], out: NDArray[np.uint8]
    ) -> None:
        """Write the symbols that `encode` was given into `out`; its length is a multiple of 4."""
        words, states = coded
        tables = (self._symbol_of_slot, self._frequency_of_slot, self._bias_of_slot)
        self._decode(words, states, *tables, out)


def _encode(symbols: Any, frequencies: Any, starts: Any, states: Any, words: Any) -> int:
    count = 0
    for index in range(len(symbols) - 1, -1, -1):
        lane = index % len(states)
        state = np.uint64(states[lane])
        frequency = np.uint64(frequencies[symbols[index]])
        if state >= frequency << np.uint64(20):
            words[count] = np.uint16(state & np.uint64(0xFFFF))
            count += 1
            state = state >> np.uint64(16)
        whole = state // frequency
        state = (whole << np.uint64(12)) + (state - whole * frequency)
        states[lane] = np.uint32(state + np.uint64(starts[symbols[index]]))
    return count


def _decode_one(words: Any, states: Any, symbol: Any, frequency: Any, bias: Any, out: Any) -> None:
    mask, shift, word_bits = np.uint32(4095), np.uint32(12), np.uint32(16)
    least = np.uint32(65536)
    state = states[0]
    at = 0
    for index in range(len(out)):
        slot = state & mask
        out[index] = symbol[slot]
        state = np.uint32(frequency[slot] * (state >> shift) + bias[slot])
        if state < least:
            state = np.uint32((state << word_bits) | np.uint32(words[at]))
            at += 1


def _decode_four(words: Any, states: Any, symbol: Any, frequency: Any, bias: Any, out: Any) -> None:
    mask, shift, word_bits = np.uint32(4095), np.uint32(12), np.uint32(16)
    least = np.uint32(65536)
    first, second, third, fourth = states[0], states[1], states[2], states[3]
    at = 0
    for index in range(0, len(out), 4):
        slot = first & mask
        out[index] = symbol[slot]
        first = np.uint32(frequency[slot] * (first >> shift) + bias[slot])
        if first < least:
            first = np.uint32((first << word_bits) | np.uint32(words[at]))
            at += 1
        slot = second & mask
        out[index + 1] = symbol[slot]
        second = np.uint32(frequency[slot] * (second >> shift) + bias[slot])
        if second < least:
            second = np.uint32((second << word_bits) | np.uint32(words[at]))
            at += 1
        slot = third & mask
        out[index + 2] = symbol[slot]
        third = np.uint32(frequency[slot] * (third >> shift) + bias[slot])
        if third < least:
            third = np.uint32((third << word_bits) | np.uint32(words[at]))
            at += 1
        slot = fourth & mask
        out[index + 3] = symbol[slot]
        fourth = np.uint32(frequency[slot] * (fourth >> shift) + bias[slot])
        if fourth < least:
            fourth = np.uint32((fourth << word_bits) | np.uint32(words[at]))
            at += 1
