"""Matrices to code, from plain to awkward."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Case:
    """Symbols ``[R, T]`` with what coding them needs."""

    frequencies: NDArray[np.uint16]
    symbols: NDArray[np.uint8]
    classes: NDArray[np.uint16]
    context: NDArray[np.uint8] | None = None


def tables(rng: np.random.Generator, num_classes: int, num_symbols: int) -> NDArray[np.uint16]:
    """Return frequencies from nearly flat to a single symbol, some of them 0."""
    found = np.zeros((num_classes, num_symbols), np.uint16)
    for row in found:
        kind = rng.integers(4)
        if kind == 0 or num_symbols == 1:
            row[rng.integers(num_symbols)] = 4096
            continue
        used = rng.choice(num_symbols, rng.integers(1, num_symbols + 1), replace=False)
        weights = rng.random(len(used)) ** (1, 1, 4, 40)[kind] + 1e-9
        shares = np.maximum(1, weights / weights.sum() * 4096).astype(int)
        while shares.sum() > 4096:
            shares[shares.argmax()] -= shares.sum() - 4096 if shares.max() > 300 else 1
        shares[shares.argmax()] += 4096 - shares.sum()
        row[used] = shares
    assert (found.sum(axis=1, dtype=np.int64) == 4096).all()
    return found


def make_case(
    seed: int,
    num_rows: int,
    num_tokens: int,
    *,
    num_classes: int = 5,
    num_symbols: int = 256,
    with_context: bool = False,
) -> Case:
    """Return symbols drawn from their own tables."""
    rng = np.random.default_rng(seed)
    frequencies = tables(rng, num_classes + (2 if with_context else 0), num_symbols)
    classes = rng.integers(0, num_classes, num_rows).astype(np.uint16)
    shape = (num_rows, num_tokens)
    context = rng.integers(0, 3, shape).astype(np.uint8) if with_context else None
    cumulative = np.cumsum(frequencies, axis=1, dtype=np.int64)
    table_of = np.broadcast_to(classes.astype(np.int64)[:, None], shape)
    if context is not None:
        table_of = table_of + context
    slots = rng.integers(0, 4096, shape)
    symbols = np.empty(shape, np.uint8)
    for table in range(len(frequencies)):
        here = table_of == table
        symbols[here] = np.searchsorted(cumulative[table], slots[here], side="right")
    return Case(frequencies, symbols, classes, context)
