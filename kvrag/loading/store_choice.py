"""Which store is the cheapest that is fast enough."""

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
        Its URL, without secrets.
    load_seconds
        Of loading a chunk of the index, the mean over all.
    hidden_share
        Share of the chunks whose loading hides behind computing what is computed again of them.
    month
        What keeping the index there costs a month, and reading it as often as was said.
    """

    store: str
    load_seconds: float
    hidden_share: float
    month: float


@dataclass(frozen=True)
class StoreChoice:
    """Where the KV of an index is best kept, and why.

    Attributes
    ----------
    offers
        All that were looked at.
    chosen
        The best.
    recompute_seconds
        Of computing what is computed again of a chunk, the mean over all.
    policy
        That which computes it.
    reason
        In words.
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
    """Choose the cheapest store whose loading hides behind recompute; where none does, the fastest.

    Source: CacheBlend (arXiv 2405.16444) §5.1: the cheapest device for which
    ``T_recompute >= T_load``.

    Raises
    ------
    ParameterError
        When there is nothing to choose from.
    """
    if not offers:
        raise ParameterError("there is no store to choose from")
    hiding = [offer for offer in offers if offer.load_seconds <= recompute_seconds]
    again = f"{1000 * recompute_seconds:.3g} ms of computing again what {policy} does of a chunk"
    if hiding:
        chosen = min(hiding, key=lambda offer: (offer.month, offer.load_seconds))
        reason = (
            f"the cheapest of {len(hiding)} that load a chunk within {again}: it takes "
            f"{1000 * chosen.load_seconds:.3g} ms"
        )
    else:
        chosen = min(offers, key=lambda offer: (offer.load_seconds, offer.month))
        reason = (
            f"the fastest: none loads a chunk within {again}; this one takes "
            f"{1000 * chosen.load_seconds:.3g} ms"
        )
    return StoreChoice(tuple(offers), chosen, recompute_seconds, policy, reason)
