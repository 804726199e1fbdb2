"""Matrices of symbols that entropy coders are timed on, and the tables they are coded with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.codec.level import LevelCoder
from kvrag.codec.profile import Level, Profile
from kvrag.codec.tables import (
    NUM_CONTEXTS,
    NUM_SYMBOLS,
    TOTAL,
    ZERO_SYMBOL,
    digit_contexts,
    fit_frequencies,
)
from kvrag.native.entropy import RansModel, ideal_bits

_SPREAD = 1.95  # of normal numbers that take about 3 bits each


@dataclass(frozen=True)
class SymbolMatrix:
    """One matrix to code.

    Attributes
    ----------
    model
        Its tables.
    symbols
        uint8 ``[R, T]``.
    classes
        uint16 ``[R]``.
    context
        uint8 ``[R, T]``, or None.
    """

    model: RansModel
    symbols: NDArray[np.uint8]
    classes: NDArray[np.uint16]
    context: NDArray[np.uint8] | None = None

    @property
    def entropy(self) -> float:
        """Code length of all symbols under the tables, in bits."""
        return ideal_bits(self.model, self.symbols, self.classes, context=self.context)


def three_bits(num_rows: int, num_tokens: int, seed: int = 0) -> SymbolMatrix:
    """Return rounded normal numbers of about 3 bits a symbol, all with one table."""
    draw = np.random.default_rng(seed)
    symbols = np.rint(draw.normal(0.0, _SPREAD, (num_rows, num_tokens))) + ZERO_SYMBOL
    symbols = symbols.astype(np.uint8)
    counts = np.bincount(symbols.ravel(), minlength=NUM_SYMBOLS)[None]
    frequencies = fit_frequencies(counts.astype(np.int64))
    # The rarest symbols may have no slot; in a record they would be patches.
    codable = frequencies[0, symbols] > 0
    symbols[~codable] = ZERO_SYMBOL
    return SymbolMatrix(RansModel(frequencies), symbols, np.zeros(num_rows, dtype=np.uint16))


def preset_mix(
    profile: Profile, level: Level, num_rows: int, num_tokens: int, seed: int = 0
) -> list[SymbolMatrix]:
    """Return symbols drawn from a level's own tables, one matrix for each of its planes.

    Rows are those of the level, repeated to `num_rows`, so that classes and planes have the
    shares that they have in records.
    """
    draw = np.random.default_rng(seed)
    coder = LevelCoder(profile, level)
    of_level = level.classes.astype(np.int64)
    rows = np.arange(num_rows) % len(of_level)
    classes = of_level[rows]
    values = np.zeros((num_rows, num_tokens), dtype=np.int64)
    found = []
    for number, plane in enumerate(level.planes):
        is_coded = _coded_rows(level, number)[rows]
        if not is_coded.any():
            continue
        slots = np.stack([np.repeat(np.arange(NUM_SYMBOLS), row) for row in plane.frequencies])
        drawn = draw.integers(TOTAL, size=(int(is_coded.sum()), num_tokens))
        mine, known = classes[is_coded], values[is_coded]
        if number == 0:
            symbols = slots[mine[:, None], drawn]
            values[is_coded] = symbols - ZERO_SYMBOL
            context, used = None, mine
        else:
            context = digit_contexts(torch.from_numpy(known)).numpy()
            used = mine * NUM_CONTEXTS
            symbols = slots[used[:, None] + context, drawn]
            values[is_coded] = 3 * known + np.where(known < 0, -1, 1) * (symbols - ZERO_SYMBOL)
        found.append(
            SymbolMatrix(
                coder.models[number], symbols.astype(np.uint8), used.astype(np.uint16), context
            )
        )
    return found


def _coded_rows(level: Level, plane: int) -> NDArray[np.bool_]:
    """Return which of a level's rows are coded in a plane."""
    is_coded = np.zeros(len(level.classes), dtype=bool)
    counts = level.planes[plane].num_rows
    for rows, count in zip(level.class_slices, counts, strict=True):
        is_coded[rows.start : rows.start + count] = True
    return is_coded
