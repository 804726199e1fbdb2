"""Estimates how long work takes, from how long it took before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

_NUM_REMEMBERED = 32
_LEAST_SPREAD = 2.0


class Pace:
    """Seconds as a constant plus a price for each unit of work, fitted to recent observations.

    Thread-safe.

    Parameters
    ----------
    kept_to
        The share of observations for which the estimate is high enough: nine of ten by default,
        since callers reserve that time.
    """

    def __init__(self, kept_to: float = 0.9) -> None:
        self._kept_to = kept_to
        self._lock = threading.Lock()
        self._seen: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)
        self._prices: tuple[float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._seen)

    def observe(self, amount: float, seconds: float) -> None:
        """Record how long an amount of work took."""
        if seconds <= 0.0:
            return
        with self._lock:
            self._seen.append((amount, seconds))
            self._prices = None

    def forget_oldest(self) -> None:
        """Forget the oldest observation, if there is one."""
        with self._lock:
            if self._seen:
                self._seen.popleft()
                self._prices = None

    def seconds(self, amount: float) -> float | None:
        """Return how long an amount of work will take; None before any observation."""
        with self._lock:
            if not self._seen:
                return None
            if self._prices is None:
                seen = list(self._seen)
                amounts = [amount for amount, _ in seen]
                # If amounts are similar, constant and price cannot be separated: use no constant.
                has_fixed = max(amounts) >= _LEAST_SPREAD * min(amounts)
                features = [(float(has_fixed), amount) for amount in amounts]
                fixed, per_unit = fit_prices(features, [took for _, took in seen])
                # The estimate for an amount of 0 may be 0.
                told = [(fixed + per_unit * amount, took) for amount, took in seen]
                over = sorted(took / expected for expected, took in told if expected > 0.0)
                slack = over[int(self._kept_to * (len(over) - 1))]
                self._prices = fixed * slack, per_unit * slack
            fixed, per_unit = self._prices
            return fixed + per_unit * amount


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
