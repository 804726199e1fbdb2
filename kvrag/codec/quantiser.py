"""Rows of numbers to whole numbers, and back.

Rounding is to the nearest whole number unless the next one towards zero costs so many bits less
that distortion + ``rate_weight`` x bits falls (rate-distortion optimised quantisation, as video
coders do it); the values that come back are the means of what was rounded to them, which lie a
little nearer to zero than the whole numbers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.entropy.tables import ESCAPE, NUM_SYMBOLS, ZERO_SYMBOL, symbols_of
from kvrag.codec.transform.base import MatrixPlan
from kvrag.errors import ParameterError

ESCAPE_BITS = 28.0
"""What a number outside its table costs, about: the escape's own bits and the number."""
MAX_MAGNITUDE = 32767
"""Of a whole number: escaped ones are stored in 16 bits."""
_TOKEN_STEPS = 16.0  # CacheGen's public code cuts its middle bins so


@dataclass(frozen=True)
class Quantiser:
    """What all quantisers share.

    Attributes
    ----------
    rate_weight
        Squared steps of distortion that one bit is worth; 0 rounds to the nearest.
    refinements
        Planes after the coarsest one; each makes the step a third.
    """

    name: ClassVar[str]
    scales_tokens: ClassVar[bool] = False
    rate_weight: float = 0.1
    refinements: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate_weight <= 1.0:
            raise ParameterError(
                f"quantiser {self.name}: rate_weight is 0 to 1, found {self.rate_weight}"
            )
        if not 0 <= self.refinements <= 4:
            raise ParameterError(
                f"quantiser {self.name}: refinements is 0 to 4, found {self.refinements}"
            )

    def units(self, plan: MatrixPlan, spread: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[R]``: the step of each row before allocation scales it.

        Parameters
        ----------
        spread
            float32 ``[R]``: root mean square of each row in the corpus.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Uniform(Quantiser):
    """One step for all rows: least distortion at a rate, where errors count alike."""

    name: ClassVar[str] = "uniform"

    def units(self, plan: MatrixPlan, spread: torch.Tensor) -> torch.Tensor:
        """Return ones."""
        return torch.ones(plan.num_rows)


@dataclass(frozen=True)
class PerChannel(Quantiser):
    """Steps in proportion to what a row spreads in the corpus."""

    name: ClassVar[str] = "per_channel"

    def units(self, plan: MatrixPlan, spread: torch.Tensor) -> torch.Tensor:
        """Return the spread; a row that never varied has the others' mean."""
        mean = spread.mean().clamp(min=1e-6)
        return torch.where(spread > 1e-3 * mean, spread, mean)


@dataclass(frozen=True)
class PerToken(Quantiser):
    """Steps in proportion to a token's greatest magnitude in a layer and kind, stored with it."""

    name: ClassVar[str] = "per_token"
    scales_tokens: ClassVar[bool] = True

    def units(self, plan: MatrixPlan, spread: torch.Tensor) -> torch.Tensor:
        """Return a sixteenth of the greatest magnitude."""
        return torch.full((plan.num_rows,), 1.0 / _TOKEN_STEPS)


@dataclass(frozen=True)
class Exact(Quantiser):
    """No quantiser: every bit is kept (codec ``lossless``); steps are typical powers of two."""

    name: ClassVar[str] = "exact"
    rate_weight: float = 0.0

    def units(self, plan: MatrixPlan, spread: torch.Tensor) -> torch.Tensor:
        """Return the power of two below each row's spread."""
        return torch.exp2(spread.clamp(min=2.0**-100).log2().floor())


def token_scales(plan: MatrixPlan, rows: torch.Tensor) -> torch.Tensor:
    """Return float16 ``[segments, T]``: each token's greatest magnitude in each segment."""
    num_segments = plan.num_segments
    scales = torch.zeros(num_segments, rows.shape[1])
    index = plan.segments[: len(rows), None].expand(rows.shape)
    scales.scatter_reduce_(0, index, rows.abs(), "amax")
    # Zero rows keep a scale that can be divided by.
    return scales.clamp(2.0**-14, 65504.0).half()


@dataclass(frozen=True)
class Symbols:
    """A quantised matrix as its tables can code it.

    Attributes
    ----------
    symbols
        uint8 ``[R, T]``.
    escaped
        int16: the numbers whose symbol is the escape, row by row.
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
        float32 ``[C, 256]``: bits of each symbol in each class; None rounds to the nearest.
    classes
        int64 ``[R]``.
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
    """Return symbols that the tables can code, and the numbers that they cannot.

    Parameters
    ----------
    values
        int32 ``[R, T]``.
    """
    symbols = symbols_of(values).to(torch.uint8).numpy()
    symbols[frequencies[classes[:, None], symbols] == 0] = ESCAPE
    return Symbols(symbols, values.numpy()[symbols == ESCAPE].astype(np.int16))


def to_values(symbols: Symbols) -> NDArray[np.int16]:
    """Return the whole numbers int16 ``[R, T]`` that symbols stand for."""
    values = symbols.symbols.astype(np.int16)
    values -= ZERO_SYMBOL
    if len(symbols.escaped):
        values[symbols.symbols == ESCAPE] = symbols.escaped
    return values
