"""Fits prices to times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_prices(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the price of a unit of each of k things, by least squares; no price is below 0.

    Parameters
    ----------
    amounts
        ``[n][k]``: the amount of each of k things in each of n runs.
    seconds
        ``[n]``, above 0.
    """
    features, times = np.array(amounts, dtype=float), np.array(seconds)
    used = list(range(features.shape[1]))
    prices = np.zeros(features.shape[1])
    while used:
        # Relative errors count: a short prompt's estimate should be as good as a long one's.
        weights = 1.0 / times
        found, *_ = np.linalg.lstsq(
            features[:, used] * weights[:, None], times * weights, rcond=None
        )
        if (found >= 0.0).all():
            prices[used] = found
            break
        used.pop(int(found.argmin()))
    return [float(price) for price in prices]
