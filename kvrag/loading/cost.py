"""What loading costs, and what it costs beside computing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrag.errors import ParameterError


@dataclass(frozen=True)
class LoadingCost:
    """Seconds of loading alone, out of one store, on the machine that measured it.

    Attributes
    ----------
    store
        The store's URL, without secrets.
    seconds_per_record, seconds_per_token
        What a chunk costs, and each token of it in all layers.

    Raises
    ------
    ParameterError
        When a figure is below 0, or not finite.
    """

    store: str
    seconds_per_record: float
    seconds_per_token: float

    def __post_init__(self) -> None:
        prices = self.seconds_per_record, self.seconds_per_token
        if not all(isinstance(one, int | float) and 0.0 <= one < math.inf for one in prices):
            raise ParameterError(f"loading {prices}: expected 0 or more seconds each, and finite")

    def of(self, num_records: int, num_tokens: int) -> float:
        """Return the estimate for so many chunks, and tokens in all of them."""
        return self.seconds_per_record * num_records + self.seconds_per_token * num_tokens


def pipelined_seconds(load_seconds: float, compute_seconds: float, num_layers: int) -> float:
    """Return what loading and computing take together, each spread evenly over the layers.

    Neither the first layer's loading nor the last layer's computing has anything to hide behind.

    Source: CacheBlend (arXiv 2405.16444) §5.1, where it is the longer of both.
    """
    if num_layers < 1:
        return load_seconds + compute_seconds
    shorter, longer = sorted((load_seconds, compute_seconds))
    return longer + shorter / num_layers
