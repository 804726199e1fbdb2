"""Chooses the cheapest store that is fast enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrag.errors import ParameterError


@dataclass(frozen=True)
class Offer:
    """One store that the KV of an index could be kept in.

    Attributes
    ----------
    store
        The store's URL, without secrets.
    load_seconds
        Mean seconds of loading a chunk of the index.
    hidden_share
        Share of the chunks that load in less time than recomputing their tokens takes.
    month
        The cost of a month: keeping the index there, and reading it as often as was assumed.
    """

    store: str
    load_seconds: float
    hidden_share: float
    month: float


@dataclass(frozen=True)
class StoreChoice:
    """The best store for the KV of an index, and why.

    Attributes
    ----------
    offers
        All stores that were compared.
    chosen
        The best one.
    recompute_seconds
        Mean seconds of recomputing the policy's tokens of a chunk.
    policy
        The policy that chooses these tokens.
    reason
        The reason in words.
    """

    offers: tuple[Offer, ...]
    chosen: Offer
    recompute_seconds: float
    policy: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def choose_store(offers: Sequence[Offer], recompute_seconds: float, policy: str) -> StoreChoice:
    """Choose the cheapest store that loads faster than tokens are recomputed, or else the fastest.

    Source: CacheBlend (arXiv 2405.16444) §5.1: the cheapest device for which
    ``T_recompute >= T_load``.

    Raises
    ------
    ParameterError
        If there is nothing to choose from.
    """
    if not offers:
        raise ParameterError("there is no store to choose from")
    hiding = [offer for offer in offers if offer.load_seconds <= recompute_seconds]
    again = f"{1000 * recompute_seconds:.3g} ms, the time in which {policy} recomputes its tokens"
    if hiding:
        chosen = min(hiding, key=lambda offer: (offer.month, offer.load_seconds))
        reason = (
            f"the cheapest of {len(hiding)} that load a chunk within {again}; this one takes "
            f"{1000 * chosen.load_seconds:.3g} ms"
        )
    else:
        chosen = min(offers, key=lambda offer: (offer.load_seconds, offer.month))
        reason = (
            f"the fastest: none loads a chunk within {again}; this one takes "
            f"{1000 * chosen.load_seconds:.3g} ms"
        )
    return StoreChoice(tuple(offers), chosen, recompute_seconds, policy, reason)
