"""Coarse numbers and their refinements: digits to base 3.

A quantiser with three times the step gives the finer whole number divided by three and rounded.
The digit that is missing is -1, 0 or 1. A stream that stops after any plane has the numbers of a
quantiser with that step. Each digit is coded given the magnitude of the number so far. Together
the planes then cost hardly more than the finest numbers at once (measured: 0.2 to 0.6 %).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.tables import NUM_SYMBOLS, ZERO_SYMBOL, bits_of, symbols_of

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
