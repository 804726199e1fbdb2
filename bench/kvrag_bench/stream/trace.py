"""How fast a link is, second by second."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SLOWEST_GBPS = 0.1
FASTEST_GBPS = 10.0


@dataclass(frozen=True)
class Trace:
    """Rates that follow each other, each for the same time, over and over again.

    Attributes
    ----------
    rates
        Bytes a second.
    step_seconds
        How long each of them holds.
    """

    rates: tuple[float, ...]
    step_seconds: float

    def finish(self, begin: float, num_bytes: float) -> float:
        """Return when `num_bytes` have been carried if they start at `begin`."""
        now, left = begin, num_bytes
        while True:
            step = math.floor(now / self.step_seconds)
            rate = self.rates[step % len(self.rates)]
            until = (step + 1) * self.step_seconds
            if until <= now:  # rounding: the step that begins here
                until += self.step_seconds
                rate = self.rates[(step + 1) % len(self.rates)]
            carried = (until - now) * rate
            if carried >= left:
                return now + left / rate
            now, left = until, left - carried


def constant(bytes_per_second: float) -> Trace:
    """Return a link that is always as fast."""
    return Trace((bytes_per_second,), 1.0)


def random_trace(
    seed: int, step_seconds: float, bytes_per_gigabit: float, num_steps: int = 200
) -> Trace:
    """Return a trace between 0.1 and 10 Gb/s; the logarithm of each rate is drawn evenly.

    Parameters
    ----------
    seed
        The same seed gives the same trace.
    bytes_per_gigabit
        What a gigabit is on the scaled link.

    Notes
    -----
    CacheGen §7.4 draws the throughput of each chunk from 0.1 to 10 Gb/s.
    """
    draw = random.Random(seed)
    low, high = math.log(SLOWEST_GBPS), math.log(FASTEST_GBPS)
    rates = [math.exp(draw.uniform(low, high)) for _ in range(num_steps)]
    return Trace(tuple(rate * bytes_per_gigabit for rate in rates), step_seconds)
