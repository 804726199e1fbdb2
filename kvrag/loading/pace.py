"""How long computing takes, learnt from what it took."""

from __future__ import annotations

import threading
from collections import deque

from kvrag.loading.prices import fit_prices

_NUM_REMEMBERED = 32
_LEAST_SPREAD = 2.0


class Pace:
    """Seconds as a constant and a price a unit, fitted to what was observed last.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)
        self._prices: list[float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._seen)

    def observe(self, amount: float, seconds: float) -> None:
        """Remember what an amount of work took."""
        if seconds <= 0.0:
            return
        with self._lock:
            self._seen.append((amount, seconds))
            self._prices = None

    def seconds(self, amount: float) -> float | None:
        """Return what an amount will take; None where nothing is known."""
        with self._lock:
            if not self._seen:
                return None
            if self._prices is None:
                seen = list(self._seen)
                amounts = [amount for amount, _ in seen]
                # Of amounts much the same it is not known what is constant: then nothing is.
                has_fixed = max(amounts) >= _LEAST_SPREAD * min(amounts)
                features = [(float(has_fixed), amount) for amount in amounts]
                self._prices = fit_prices(features, [took for _, took in seen])
            fixed, per_unit = self._prices
            return fixed + per_unit * amount
