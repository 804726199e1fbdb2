"""The learning rate: warm-up, a plateau, and a linear decay at the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step.

    Attributes
    ----------
    peak
        Learning rate of the plateau.
    total_steps
        Steps of the whole run.
    decay_steps
        The last steps, over which the rate falls linearly to a fiftieth.
    warmup_steps
        The first steps, over which it rises linearly.
    """

    peak: float
    total_steps: int
    decay_steps: int
    warmup_steps: int = 100

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = min(1.0, max(0.02, (self.total_steps - step) / max(1, self.decay_steps)))
        return self.peak * min(rise, fall)
