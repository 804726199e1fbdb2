"""Confidence intervals of means over questions, by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000


def mean_interval(
    values: Sequence[float], *, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean.

    Parameters
    ----------
    values
        One value for each question. For a paired comparison, pass the differences between two
        answers to the same question, so that the question's difficulty cancels out.
    seed
        The seed; the same seed and values give the same interval.
    confidence
        Share of resampled means inside the interval.
    """
    return _interval(_resampled_means(values, seed), confidence)


def ratio_interval(
    parts: Sequence[float], wholes: Sequence[float], *, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a ratio of two means over the same questions.

    Parameters
    ----------
    parts, wholes
        One value each for each question; the same questions are drawn of both. Means of `wholes`
        must not be zero.
    seed, confidence
        As for `mean_interval`.
    """
    # The same seed draws the same questions.
    means = _resampled_means(parts, seed) / _resampled_means(wholes, seed)
    return _interval(means, confidence)


def _resampled_means(values: Sequence[float], seed: int) -> FloatArray:
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    # Resampled in parts: 2,000 times 10,000 questions at once would take 160 MB.
    rows_at_once = max(1, 1_000_000 // len(sample))
    return np.concatenate(
        [
            sample[generator.integers(len(sample), size=(count, len(sample)))].mean(axis=1)
            for count in _parts(NUM_RESAMPLES, rows_at_once)
        ]
    )


def _interval(means: FloatArray, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _parts(total: int, size: int) -> list[int]:
    return [min(size, total - begin) for begin in range(0, total, size)]
