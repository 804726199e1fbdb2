"""Rates at equal distortion: curves read between their points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvrag_bench.codec.records import Point

TARGETS = (0.005, 0.02, 0.05)
"""Relative errors that codecs are compared at."""


def bits_at(points: Sequence[Point], error: float, *, balanced: bool = False) -> float | None:
    """Return the bits a curve takes at an error; None where it does not reach that far.

    Between two points bits are linear in the logarithm of the error, as theory has it for high
    rates.

    Parameters
    ----------
    balanced
        Whether `error` is the balanced one.
    """
    line = sorted((_error(p, balanced), p.bits) for p in points if _error(p, balanced) > 0)
    found = None
    for (low, more), (high, less) in itertools.pairwise(line):
        if low <= error <= high:
            share = 0.0 if high == low else math.log(error / low) / math.log(high / low)
            bits = more + share * (less - more)
            found = bits if found is None else min(found, bits)
    return found


def _error(point: Point, balanced: bool) -> float:
    return point.balanced_error if balanced else point.error
