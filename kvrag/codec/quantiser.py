"""Quantisers: rows of numbers to whole numbers, and back.

A number is rounded to the nearest whole number, or to the next one towards zero if that lowers
distortion + ``rate_weight`` x bits (rate-distortion optimised quantisation, as in video coders).
A decoded value is the mean of the numbers that were rounded to it, which is a little nearer to
zero than the whole number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.tables import ESCAPE, NUM_SYMBOLS, ZERO_SYMBOL, symbols_of
from kvrag.errors import ParameterError

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

    def units(self, spread: torch.Tensor) -> torch.Tensor:
        """Return the power of two below each row's spread."""
        return torch.exp2(spread.clamp(min=2.0**-100).log2().floor())


@dataclass(frozen=True)
class Symbols:
    """A quantised matrix in the form that tables can code.

    Attributes
    ----------
    symbols
        uint8 ``[R, T]``.
    escaped
        int16: the numbers that have the escape as their symbol, row by row.
    """

    symbols: NDArray[np.uint8]
    escaped: NDArray[np.int16]


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
) -> Symbols:
    """Return the symbols of whole numbers, with escapes for those that the tables cannot code.

    Parameters
    ----------
    values
        int32 ``[R, T]``.
    """
    symbols = symbols_of(values).to(torch.uint8).numpy()
    symbols[frequencies[classes[:, None], symbols] == 0] = ESCAPE
    return Symbols(symbols, values.numpy()[symbols == ESCAPE].astype(np.int16))


def to_values(symbols: Symbols) -> NDArray[np.int16]:
    """Return the whole numbers int16 ``[R, T]`` that `symbols` represent."""
    values = symbols.symbols.astype(np.int16)
    values -= ZERO_SYMBOL
    if len(symbols.escaped):
        values[symbols.symbols == ESCAPE] = symbols.escaped
    return values
