"""What loading costs, and what it costs beside computing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrag.errors import ParameterError


@dataclass(frozen=True)
class TierCost:
    """Seconds of loading alone, out of one tier, on the machine that measured it.

    Attributes
    ----------
    store
        The tier's URL, without secrets.
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

    def of(self, num_tokens: int, num_records: int = 1) -> float:
        """Return the estimate for so many tokens in all of so many chunks."""
        return self.seconds_per_record * num_records + self.seconds_per_token * num_tokens


@dataclass(frozen=True)
class StoredRows:
    """A record that a prompt needs, and what the prompt takes from it.

    Attributes
    ----------
    chunk_id, context_ids
        Which record: the chunk's that was encoded behind these tokens.
    num_rows
        Rows that the prompt takes.
    tier
        The store's tier that would deliver it, 0 the fastest; None where that is not known.
    """

    chunk_id: str
    context_ids: tuple[int, ...]
    num_rows: int
    tier: int | None = None


@dataclass(frozen=True)
class LoadingCost:
    """Seconds of loading out of a store.

    Attributes
    ----------
    store
        Its URL, without secrets.
    tiers
        Of each of its tiers, the fastest first; of a plain store there is one.

    Raises
    ------
    ParameterError
        When there is no tier.
    """

    store: str
    tiers: tuple[TierCost, ...]

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ParameterError(f"loading from {self.store}: expected what a tier costs")

    def tier(self, number: int | None) -> TierCost:
        """Return what a tier costs; None means the last, where all records are at home."""
        return self.tiers[-1 if number is None else min(number, len(self.tiers) - 1)]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LoadingCost:
        """Return what `dataclasses.asdict` made of one. Raises KeyError, TypeError."""
        return cls(str(fields["store"]), tuple(TierCost(**tier) for tier in fields["tiers"]))


@dataclass(frozen=True)
class ChunkDecision:
    """Whether a stored chunk was loaded or computed, why, and what came of it.

    Attributes
    ----------
    chunk_id
        The chunk.
    tier
        Where it would be loaded from: the number of the store's tier, 0 the fastest.
    num_tokens
        Tokens of the prompt that it gives.
    is_computed
        Whether it was computed.
    expected_load_seconds, expected_compute_seconds
        What the one and the other were expected to take, each alone.
    seconds
        What it took: of a chunk that was loaded, the seconds in which a thread opened and read it;
        of one that was computed, its rows' share of the seconds of computing. None where the
        loading failed.
    """

    chunk_id: str
    tier: int
    num_tokens: int
    is_computed: bool
    expected_load_seconds: float
    expected_compute_seconds: float
    seconds: float | None = None


def pipelined_seconds(load_seconds: float, compute_seconds: float, num_layers: int) -> float:
    """Return what loading and computing take together, each spread evenly over the layers.

    Neither the first layer's loading nor the last layer's computing has anything to hide behind.

    Source: CacheBlend (arXiv 2405.16444) §5.1, where it is the longer of both.
    """
    if num_layers < 1:
        return load_seconds + compute_seconds
    shorter, longer = sorted((load_seconds, compute_seconds))
    return longer + shorter / num_layers
