"""The cost of loading, alone and overlapped with computing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrag.errors import ParameterError


@dataclass(frozen=True)
class TierCost:
    """Seconds of loading from one tier, without computing, on the machine that measured them.

    Attributes
    ----------
    store
        The tier's URL, without secrets.
    seconds_per_record, seconds_per_token
        Seconds for each chunk, and for all layers of each token in it.

    Raises
    ------
    ParameterError
        If a figure is below 0, or not finite.
    """

    store: str
    seconds_per_record: float
    seconds_per_token: float

    def __post_init__(self) -> None:
        prices = self.seconds_per_record, self.seconds_per_token
        if not all(isinstance(one, int | float) and 0.0 <= one < math.inf for one in prices):
            raise ParameterError(f"loading {prices}: expected 0 or more seconds each, and finite")

    def of(self, num_tokens: int, num_records: int = 1) -> float:
        """Return the estimate for `num_records` chunks of `num_tokens` tokens in total."""
        return self.seconds_per_record * num_records + self.seconds_per_token * num_tokens


@dataclass(frozen=True)
class StoredRows:
    """A record that a prompt needs, and how much of it.

    Attributes
    ----------
    chunk_id, context_ids
        The record: that of the chunk, encoded after these tokens.
    num_rows
        Rows that the prompt uses.
    tier
        The store's tier that would deliver it, 0 the fastest; None if that is not known.
    """

    chunk_id: str
    context_ids: tuple[int, ...]
    num_rows: int
    tier: int | None = None


@dataclass(frozen=True)
class LoadingCost:
    """Seconds of loading from a store.

    Attributes
    ----------
    store
        The store's URL, without secrets.
    tiers
        The cost of each of its tiers, the fastest first. A plain store has one.

    Raises
    ------
    ParameterError
        If there is no tier.
    """

    store: str
    tiers: tuple[TierCost, ...]

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ParameterError(f"loading from {self.store}: expected the cost of a tier")

    def tier(self, number: int | None) -> TierCost:
        """Return the cost of a tier; None means the last tier, which has all records."""
        return self.tiers[-1 if number is None else min(number, len(self.tiers) - 1)]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LoadingCost:
        """Return the cost in a result of `dataclasses.asdict`. Raises KeyError, TypeError."""
        return cls(str(fields["store"]), tuple(TierCost(**tier) for tier in fields["tiers"]))


@dataclass(frozen=True)
class ChunkDecision:
    """Whether a stored chunk was loaded or computed, why, and how long it took.

    Attributes
    ----------
    chunk_id
        The chunk.
    tier
        The number of the store's tier that it would be loaded from, 0 the fastest.
    num_tokens
        How many of the prompt's tokens it provides.
    is_computed
        Whether it was computed.
    expected_load_seconds, expected_compute_seconds
        How long loading and computing were expected to take, each alone.
    seconds
        How long it took. For a loaded chunk: the time in which a thread opened and read it. For a
        computed chunk: its rows' share of the computing time. None if loading failed.
    """

    chunk_id: str
    tier: int
    num_tokens: int
    is_computed: bool
    expected_load_seconds: float
    expected_compute_seconds: float
    seconds: float | None = None


def pipelined_seconds(load_seconds: float, compute_seconds: float, num_layers: int) -> float:
    """Return the seconds of loading overlapped with computing, each spread evenly over the layers.

    Only loading the first layer and computing the last one do not overlap with anything.

    Source: CacheBlend (arXiv 2405.16444) §5.1, which takes the longer of both.
    """
    if num_layers < 1:
        return load_seconds + compute_seconds
    shorter, longer = sorted((load_seconds, compute_seconds))
    return longer + shorter / num_layers
