"""Fits classes and probability tables to whole numbers, plane by plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.config import PipelineConfig
from kvrag.codec.entropy.tables import (
    ESCAPE,
    NUM_SYMBOLS,
    bits_of,
    cluster,
    count_symbols,
    fit_digit_frequencies,
    fit_frequencies,
)
from kvrag.codec.planes import (
    NUM_CONTEXTS,
    coarser,
    digit_contexts,
    digit_symbols,
    value_costs,
)
from kvrag.codec.quantiser import ESCAPE_BITS


@dataclass(frozen=True)
class SampleMatrix:
    """One matrix of one block over all kept tokens, in units of the tokens' scales."""

    rows: torch.Tensor
    units: torch.Tensor
    layers: torch.Tensor
    is_exact: bool


class FittedPlanes:
    """Classes and tables for whole numbers, plane by plane.

    Attributes
    ----------
    values
        For each plane, from coarse to fine, the numbers ``[R, T]`` of each matrix.
    num_rows
        For each matrix, how many rows are coded in the finest plane.
    classes
        For each matrix, the class of each of those rows.
    frequencies
        The tables of each plane.
    bits
        The size of each plane in bits.
    """

    def __init__(
        self, config: PipelineConfig, matrices: list[SampleMatrix], values: list[torch.Tensor]
    ) -> None:
        self._matrices = matrices
        self.values = [values]
        for _ in range(config.quantiser.refinements):
            finer = zip(matrices, self.values[0], strict=True)
            self.values.insert(0, [v if m.is_exact else coarser(v) for m, v in finer])
        self.num_rows = [_last_used(v) for v in values]
        counts = [count_symbols(v[:n]) for v, n in zip(values, self.num_rows, strict=True)]
        classes = cluster(np.concatenate(counts), config.coder.classes)
        self.num_classes = int(classes.max()) + 1 if len(classes) else 1
        self.classes = np.split(classes, np.cumsum(self.num_rows)[:-1])
        self.frequencies: list[NDArray[np.uint16]] = []
        self.bits: list[float] = []
        for plane in range(len(self.values)):
            self._fit_plane(plane)

    def num_rows_of(self, plane: int, matrix: int) -> int:
        """Return how many rows of a matrix are coded in a plane."""
        if self._matrices[matrix].is_exact:
            return self.num_rows[matrix] if plane == 0 else 0
        return _last_used(self.values[plane][matrix])

    def classes_of(self, matrix: int) -> NDArray[np.int64]:
        """Return int64 ``[R']``: the classes of a matrix's coded rows."""
        return self.classes[matrix].astype(np.int64)

    @property
    def costs(self) -> torch.Tensor:
        """Cost in bits of whole numbers of the finest plane, float32 ``[C, 256]``."""
        return value_costs(self.frequencies[0], self.frequencies[1:], self.num_classes)

    def _fit_plane(self, plane: int) -> None:
        num_contexts = 1 if plane == 0 else NUM_CONTEXTS
        counts = np.zeros((self.num_classes * num_contexts, NUM_SYMBOLS), dtype=np.int64)
        for index, values in enumerate(self.values[plane]):
            n = self.num_rows_of(plane, index)
            classes = torch.from_numpy(self.classes_of(index)[:n])
            if plane == 0:
                np.add.at(counts, classes.numpy(), count_symbols(values[:n]))
            elif n:
                known = self.values[plane - 1][index][:n]
                symbols = digit_symbols(values[:n], known).long()
                which = classes[:, None] * num_contexts + digit_contexts(known).long()
                flat = (which * NUM_SYMBOLS + symbols).flatten()
                counted = torch.bincount(flat, minlength=counts.size).numpy()
                counts += counted.reshape(counts.shape)
        fit = fit_frequencies if plane == 0 else fit_digit_frequencies
        frequencies = fit(counts)
        self.frequencies.append(frequencies)
        self.bits.append(float((counts * with_escapes(bits_of(frequencies))).sum()))


def with_escapes(bits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `bits` with the cost of an escape for symbols that have no code."""
    bits = np.minimum(bits, ESCAPE_BITS)
    bits[:, ESCAPE] = ESCAPE_BITS
    return bits


def _last_used(values: torch.Tensor) -> int:
    """Return the number of rows up to and including the last one that is not all zeros."""
    used = (values != 0).any(1).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
