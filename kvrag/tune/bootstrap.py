"""Confidence interval of a mean over questions, by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    # Resampled in parts: 2,000 times 10,000 questions at once would take 160 MB.
    rows_at_once = max(1, 1_000_000 // len(sample))
    means = np.concatenate(
        [
            sample[generator.integers(len(sample), size=(count, len(sample)))].mean(axis=1)
            for count in _parts(NUM_RESAMPLES, rows_at_once)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _parts(total: int, size: int) -> list[int]:
    return [min(size, total - begin) for begin in range(0, total, size)]
