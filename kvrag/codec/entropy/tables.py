"""Probability tables for the entropy coder: rows with like distributions share one class.

CacheGen (SIGCOMM 2024, section 5.2) keeps one model for each layer and channel. A table of 4,096
slots for each of thousands of rows would fit no cache; rows are sorted by how wide their symbols
spread, and neighbours in that order share a table. What that costs in rate is measured by
``kvrag bench codec`` (entropy against bits per element).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

TOTAL = 4096
"""Sum of the frequencies of a table: 12-bit probabilities."""
NUM_SYMBOLS = 256
ZERO_SYMBOL = 128
"""The symbol that stands for 0; symbol s stands for s - 128."""
MAX_VALUE = 127
ESCAPE = 0
"""The symbol of a number that has none of its own, which is then stored beside the streams."""
# A symbol in its table costs all others 1.4 / 4096 bits, an escape some 28: it pays to keep those
# more likely than 5 in 100 slots.
_LEAST_SLOTS = 0.05
# Weight of the two-sided geometric tail that is mixed into what was counted.
_TAIL_WEIGHT = 0.01


def bits_of(frequencies: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return what each symbol costs in bits ``[C, 256]``; infinite where it cannot be coded."""
    with np.errstate(divide="ignore"):
        bits: NDArray[np.float32] = -np.log2(frequencies.astype(np.float32) / TOTAL)
    return bits


def fit_frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return a table for each class.

    Parameters
    ----------
    counts
        ``[C, 256]``: how often each class took each symbol.

    Returns
    -------
    ndarray
        uint16 ``[C, 256]``, each row summing to `TOTAL`; 0 where a symbol cannot be coded.
    """
    return np.stack([_table(row) for row in counts])


def fit_digit_frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return tables for symbols 127, 128 and 129 alone, each of which stays possible."""
    digits = np.zeros_like(counts, dtype=bool)
    digits[:, ZERO_SYMBOL - 1 : ZERO_SYMBOL + 2] = True
    shares = np.where(digits, counts + 0.5, 0.0)
    shares /= shares.sum(axis=1, keepdims=True)
    return np.stack([_whole_slots(row, kept) for row, kept in zip(shares, digits, strict=True)])


def symbols_of(values: torch.Tensor) -> torch.Tensor:
    """Return int64 symbols of whole numbers; `ESCAPE` for those beyond `MAX_VALUE`."""
    return torch.where(values.abs() > MAX_VALUE, ESCAPE, values + ZERO_SYMBOL).long()


def count_symbols(values: torch.Tensor) -> NDArray[np.int64]:
    """Return ``[R, 256]``: how often each row of whole numbers ``[R, T]`` takes each symbol."""
    index = symbols_of(values) + torch.arange(len(values))[:, None] * NUM_SYMBOLS
    counted = torch.bincount(index.flatten(), minlength=len(values) * NUM_SYMBOLS)
    return counted.view(len(values), NUM_SYMBOLS).numpy()


def empirical_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits of all rows, each coded at its own empirical entropy."""
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return float(-(counts * logs).sum())


def cluster(counts: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Group rows of like spread so that every class holds about as many bits as another.

    Parameters
    ----------
    counts
        ``[R, 256]``: how often each row took each symbol.
    num_classes
        At most this many classes.

    Returns
    -------
    ndarray
        ``[R]``: the class of each row, counted from 0 without gaps.
    """
    if not len(counts):
        return np.zeros(0, dtype=np.int64)
    values = np.arange(NUM_SYMBOLS) - ZERO_SYMBOL
    totals = np.maximum(counts.sum(axis=1), 1)
    spread = (counts * values**2).sum(axis=1) / totals
    order = np.argsort(spread, kind="stable")
    # Where symbols spread, a like step in log-spread costs a like share of the rate; classes are
    # cut by what rows weigh in bits, so that none is spent on rows that are all zeros.
    weight = 0.5 * np.log2(1.0 + 12.0 * spread[order]) + 1e-3
    position = np.cumsum(weight)
    index = np.minimum((position - weight / 2) / position[-1] * num_classes, num_classes - 1)
    classes = np.empty(len(counts), dtype=np.int64)
    # Numbered without gaps: a class nobody is in needs no table.
    classes[order] = np.unique(index.astype(np.int64), return_inverse=True)[1]
    return classes


def _table(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    total = counts.sum()
    values = np.abs(np.arange(NUM_SYMBOLS) - ZERO_SYMBOL)
    mean = (counts * values).sum() / max(total, 1)
    decay = mean / (1.0 + mean)
    tail = decay ** values.astype(np.float64)
    shares = (1 - _TAIL_WEIGHT) * counts / max(total, 1) + _TAIL_WEIGHT * tail / tail.sum()
    kept = (shares * TOTAL >= _LEAST_SLOTS) | (values == 0)
    kept[ESCAPE] = True  # for all the others
    shares = np.where(kept, shares, 0.0)
    shares[ESCAPE] = max(shares[ESCAPE], 0.25 / TOTAL)
    return _whole_slots(shares / shares.sum(), kept)


def _whole_slots(shares: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Return frequencies that sum to `TOTAL`, at least 1 where `kept`, nearest to `shares`."""
    slots = np.where(kept, np.maximum(1, np.floor(shares * TOTAL)), 0).astype(np.int64)
    missing = TOTAL - int(slots.sum())
    # One more slot saves the more bits the greater the share per slot; one less costs likewise.
    while missing:
        step = 1 if missing > 0 else -1
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = shares * np.log2((slots + step) / slots)
        gain[(slots + step < 1) | ~kept] = -np.inf
        best = np.argsort(-gain, kind="stable")[: min(abs(missing), max(1, int(kept.sum()) // 2))]
        slots[best[np.isfinite(gain[best])]] += step
        missing = TOTAL - int(slots.sum())
    return slots.astype(np.uint16)
