"""Prices fitted to times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_prices(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return what one of each amount costs, by least squares; nothing costs less than nothing.

    Parameters
    ----------
    amounts
        ``[n][k]``: of each of k things, how much was in each of n runs.
    seconds
        ``[n]``, above 0.
    """
    features, times = np.array(amounts, dtype=float), np.array(seconds)
    used = list(range(features.shape[1]))
    prices = np.zeros(features.shape[1])
    while used:
        # Relative errors: a short prompt's estimate is to be as good as a long one's.
        weights = 1.0 / times
        found, *_ = np.linalg.lstsq(features[:, used] * weights[:, None], times * weights)
        if (found >= 0.0).all():
            prices[used] = found
            break
        used.pop(int(found.argmin()))
    return [float(price) for price in prices]
