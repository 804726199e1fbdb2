"""Whole numbers for the entropy coder: their steps, and tables of their probabilities.

Rows with similar distributions share one class.

CacheGen (SIGCOMM 2024, section 5.2) keeps one model for each layer and channel. Here, tables of
4,096 slots for thousands of rows would not fit into a cache. So rows are sorted by the spread of
their symbols, and neighbours in that order share a table. ``kvrag bench codec`` measures the cost
in rate (entropy against bits per element).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError

TOTAL = 4096
"""Sum of the frequencies of a table: 12-bit probabilities."""
NUM_SYMBOLS = 256
ZERO_SYMBOL = 128
"""The symbol for 0; symbol s represents s - 128."""
MAX_VALUE = 127
ESCAPE = 0
"""The symbol for numbers without a symbol, which are stored next to the streams."""
# A symbol in a table costs all others 1.4 / 4096 bits; an escape costs about 28 bits. So a symbol
# gets a slot if it is expected to fill at least 5 % of one.
_LEAST_SLOTS = 0.05
# Weight of the two-sided geometric tail that is mixed into the counts.
_TAIL_WEIGHT = 0.01


def bits_of(frequencies: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the cost of each symbol in bits ``[C, 256]``; infinite if it cannot be coded."""
    with np.errstate(divide="ignore"):
        bits: NDArray[np.float32] = -np.log2(frequencies.astype(np.float32) / TOTAL)
    return bits


def fit_frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return a table for each class.

    Parameters
    ----------
    counts
        ``[C, 256]``: how often each symbol occurs in each class.

    Returns
    -------
    ndarray
        uint16 ``[C, 256]``. Each row sums to `TOTAL`; 0 means that a symbol cannot be coded.
    """
    return np.stack([_table(row) for row in counts])


def fit_digit_frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return tables for symbols 127, 128 and 129 only, all of which can be coded."""
    digits = np.zeros_like(counts, dtype=bool)
    digits[:, ZERO_SYMBOL - 1 : ZERO_SYMBOL + 2] = True
    shares = np.where(digits, counts + 0.5, 0.0)
    shares /= shares.sum(axis=1, keepdims=True)
    return np.stack([_whole_slots(row, kept) for row, kept in zip(shares, digits, strict=True)])


def symbols_of(values: torch.Tensor) -> torch.Tensor:
    """Return int64 symbols of whole numbers; `ESCAPE` for those beyond `MAX_VALUE`."""
    return torch.where(values.abs() > MAX_VALUE, ESCAPE, values + ZERO_SYMBOL).long()


def count_symbols(values: torch.Tensor) -> NDArray[np.int64]:
    """Return ``[R, 256]``: how often each symbol occurs in each row of numbers ``[R, T]``."""
    index = symbols_of(values) + torch.arange(len(values))[:, None] * NUM_SYMBOLS
    counted = torch.bincount(index.flatten(), minlength=len(values) * NUM_SYMBOLS)
    return counted.view(len(values), NUM_SYMBOLS).numpy()


def empirical_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits of all rows, each coded at its empirical entropy."""
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return float(-(counts * logs).sum())


def cluster(counts: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Group rows of similar spread into classes that have about equally many bits.

    Parameters
    ----------
    counts
        ``[R, 256]``: how often each symbol occurs in each row.
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
    # Equal ratios of spread cost equal shares of the rate. Classes are cut by the rows' bits, so
    # that no class is wasted on rows that are all zeros.
    weight = 0.5 * np.log2(1.0 + 12.0 * spread[order]) + 1e-3
    position = np.cumsum(weight)
    index = np.minimum((position - weight / 2) / position[-1] * num_classes, num_classes - 1)
    classes = np.empty(len(counts), dtype=np.int64)
    # Numbered without gaps: empty classes need no table.
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
    kept[ESCAPE] = True  # for all symbols that are not kept
    shares = np.where(kept, shares, 0.0)
    shares[ESCAPE] = max(shares[ESCAPE], 0.25 / TOTAL)
    return _whole_slots(shares / shares.sum(), kept)


def _whole_slots(shares: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Return the frequencies nearest to `shares` that sum to `TOTAL`, at least 1 where `kept`."""
    slots = np.where(kept, np.maximum(1, np.floor(shares * TOTAL)), 0).astype(np.int64)
    missing = TOTAL - int(slots.sum())
    # A slot more saves most bits where the share per slot is greatest; a slot less costs least
    # where it is smallest.
    while missing:
        step = 1 if missing > 0 else -1
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = shares * np.log2((slots + step) / slots)
        gain[(slots + step < 1) | ~kept] = -np.inf
        best = np.argsort(-gain, kind="stable")[: min(abs(missing), max(1, int(kept.sum()) // 2))]
        slots[best[np.isfinite(gain[best])]] += step
        missing = TOTAL - int(slots.sum())
    return slots.astype(np.uint16)


# Coarse numbers and their refinements: digits to base 3.
#
# A quantiser with three times the step gives the finer whole number divided by three and rounded.
# The digit that is missing is -1, 0 or 1. A stream that stops after any plane has the numbers of a
# quantiser with that step. Each digit is coded given the magnitude of the number so far. Together
# the planes then cost hardly more than the finest numbers at once (measured: 0.2 to 0.6 %).


RADIX = 3
NUM_CONTEXTS = 3
"""Contexts of a digit: the magnitude so far is 0, 1 or more."""


def coarser(values: torch.Tensor) -> torch.Tensor:
    """Return int32 numbers of the quantiser with three times the step."""
    return torch.div(values + 1, RADIX, rounding_mode="floor")


def digit_symbols(values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the digits that refine `known` to `values`, as symbols uint8.

    Digits are mirrored if `known` is negative, so that "further from zero" is always one symbol.
    """
    sign = torch.where(known < 0, -1, 1)
    return ((values - RADIX * known) * sign + ZERO_SYMBOL).to(torch.uint8)


def digit_contexts(known: torch.Tensor) -> torch.Tensor:
    """Return uint8: the context in which a digit is coded."""
    return known.abs().clamp(max=NUM_CONTEXTS - 1).to(torch.uint8)


def value_costs(
    base: NDArray[np.uint16], refinements: list[NDArray[np.uint16]], num_classes: int
) -> torch.Tensor:
    """Return how many bits whole numbers cost in all planes together.

    Parameters
    ----------
    base
        uint16 ``[C, 256]``.
    refinements
        uint16 ``[3 C, 256]`` (class times context) for each further plane.

    Returns
    -------
    torch.Tensor
        float32 ``[C, 256]`` for -128 to 127 of the finest plane; infinite for numbers without code.
    """
    values = torch.arange(NUM_SYMBOLS) - ZERO_SYMBOL
    costs = torch.zeros(num_classes, NUM_SYMBOLS)
    for frequencies in reversed(refinements):
        known = coarser(values)
        bits = torch.from_numpy(bits_of(frequencies)).view(num_classes, NUM_CONTEXTS, NUM_SYMBOLS)
        costs += bits[:, digit_contexts(known).long(), digit_symbols(values, known).long()]
        values = known
    costs += torch.from_numpy(bits_of(base))[:, symbols_of(values)]
    return costs


ESCAPE_BITS = 28.0
"""About what a number outside its table costs: the escape's code and the number itself."""
MAX_MAGNITUDE = 32767
"""The greatest magnitude of a whole number: escaped ones are stored in 16 bits."""


@dataclass(frozen=True)
class Quantiser:
    """The base class of quantisers.

    Attributes
    ----------
    rate_weight
        The distortion, in squared steps, that one bit is worth; 0 rounds to the nearest number.
    refinements
        Planes after the coarsest one. Each divides the step by three.
    """

    name: ClassVar[str]
    rate_weight: float = 0.1
    refinements: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate_weight <= 1.0:
            raise ParameterError(
                f"quantiser {self.name}: rate_weight must be 0 to 1, found {self.rate_weight}"
            )
        if not 0 <= self.refinements <= 4:
            raise ParameterError(
                f"quantiser {self.name}: refinements must be 0 to 4, found {self.refinements}"
            )

    def units(self, spread: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[R]``: the step of each row before allocation scales it.

        Parameters
        ----------
        spread
            float32 ``[R]``: root mean square of each row in the corpus.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Uniform(Quantiser):
    """One step for all rows: the least distortion at a given rate if all errors count alike."""

    name: ClassVar[str] = "uniform"

    def units(self, spread: torch.Tensor) -> torch.Tensor:
        """Return ones."""
        return torch.ones(len(spread))


@dataclass(frozen=True)
class PerChannel(Quantiser):
    """Steps in proportion to each row's spread in the corpus."""

    name: ClassVar[str] = "per_channel"

    def units(self, spread: torch.Tensor) -> torch.Tensor:
        """Return the spread; the mean of all rows for a row that never varied."""
        mean = spread.mean().clamp(min=1e-6)
        return torch.where(spread > 1e-3 * mean, spread, mean)


@dataclass(frozen=True)
class Exact(Quantiser):
    """Keeps every bit (codec ``lossless``); a row's step is a typical power of two."""

    name: ClassVar[str] = "exact"
    rate_weight: float = 0.0


def quantise(
    rows: torch.Tensor,
    costs: torch.Tensor | None = None,
    classes: torch.Tensor | None = None,
    rate_weight: float = 0.0,
) -> torch.Tensor:
    """Return whole numbers int32 ``[R, T]`` for rows in units of their step.

    Parameters
    ----------
    costs
        float32 ``[C, 256]``: bits of each symbol in each class; None rounds to the nearest number.
    classes
        int64 ``[R]``: the class of each row.
    """
    nearest = rows.round().clamp(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    if costs is None or classes is None or rate_weight == 0.0:
        return nearest.int()
    inner = nearest - nearest.sign()
    bits = costs.clamp(max=ESCAPE_BITS)
    bits[:, ESCAPE] = ESCAPE_BITS

    def cost(values: torch.Tensor) -> torch.Tensor:
        index = symbols_of(values)
        index += classes[:, None] * NUM_SYMBOLS
        return bits.flatten()[index]

    saved = cost(nearest) - cost(inner)
    worse = (rows - inner).square() - (rows - nearest).square()
    return torch.where(worse < rate_weight * saved, inner, nearest).int()


def to_symbols(
    values: torch.Tensor, frequencies: NDArray[np.uint16], classes: NDArray[np.uint16]
) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Return the symbols of whole numbers, with escapes for those that the tables cannot code.

    Parameters
    ----------
    values
        int32 ``[R, T]``.

    Returns
    -------
    (symbols, escaped)
        uint8 ``[R, T]``, and int16: the numbers that have the escape as their symbol, row by row.
    """
    symbols = symbols_of(values).to(torch.uint8).numpy()
    symbols[frequencies[classes[:, None], symbols] == 0] = ESCAPE
    return symbols, values.numpy()[symbols == ESCAPE].astype(np.int16)


def to_values(symbols: NDArray[np.uint8], escaped: NDArray[np.int16]) -> NDArray[np.int16]:
    """Return the whole numbers int16 ``[R, T]`` that `to_symbols` was given."""
    values = symbols.astype(np.int16)
    values -= ZERO_SYMBOL
    if len(escaped):
        values[symbols == ESCAPE] = escaped
    return values
