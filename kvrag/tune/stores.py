"""The cost of keeping an index's KV in different stores (`kvrag choose-store`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, StoreError
from kvrag.fusion.calibration import Calibration
from kvrag.fusion.controller import LoadingController
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import PromptRows, planned_counts
from kvrag.ingest.index import Index
from kvrag.loading.cost import TierCost
from kvrag.loading.price_list import PriceTable
from kvrag.store.base import Store
from kvrag.store.registry import open_store, without_password
from kvrag.tune.loading import given, measure_tier, reading_from, spread

_NUM_CHUNKS = 5
"""Number of chunks in the larger prompts that are loaded to measure a store."""


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


def measure_and_choose(
    index: Index,
    urls: Sequence[str],
    prices: PriceTable,
    *,
    loss: float = 0.01,
    reads: float = 30.0,
    say: Callable[[str], None] = lambda _: None,
) -> StoreChoice:
    """Measure stores, and choose the cheapest that loads an index's chunks in time.

    A store that holds none of the index's KV gets the records of a few chunks, which are removed
    afterwards.

    Parameters
    ----------
    urls
        URLs of the stores.
    prices
        The stores' prices.
    loss
        Share of quality that may be lost, which determines what is computed again.
    reads
        How often a chunk is read in a month.

    Raises
    ------
    ParameterError
        When the index is empty or not calibrated, a store's price is unknown, or `reads` is below 0
        or not finite.
    StoreError
        When a store does not answer.
    """
    if not 0.0 <= reads < math.inf:
        raise ParameterError(f"reads {reads}: expected a finite number a month, 0 or more")
    calibration = index.calibration
    if calibration is None:
        raise ParameterError(
            f"{index.path}: the cost of computing is not measured yet: run 'kvrag calibrate' first"
        )
    rows, size_bytes = _contents(index)
    named = [(url, prices.of(url)) for url in urls]
    policy, again = _recompute_seconds(calibration, index.config.num_layers, rows, loss)
    num_requests = len(rows) * (1 + index.config.num_layers)
    offers = []
    for url, price in named:
        say(f"measuring {without_password(url)}")
        with closing(open_store(url)) as store:
            cost = _cost_of(index, store)
        seconds = [cost.of(num_rows) for num_rows in rows]
        hidden = sum(load <= compute for load, compute in zip(seconds, again, strict=True))
        offers.append(
            Offer(
                store=cost.store,
                load_seconds=sum(seconds) / len(rows),
                hidden_share=hidden / len(rows),
                month=price.month(size_bytes, num_requests, reads),
            )
        )
    return choose_store(offers, sum(again) / len(rows), policy)


def _contents(index: Index) -> tuple[list[int], int]:
    """Return the rows of every record that the index needs, and their total bytes."""
    needed = index.catalog.stored.keys()
    if not needed:
        raise ParameterError(f"{index.path}: the index is empty, there is nothing to keep")
    sizes = {key.digest: size for key, size in index.store.sizes() if key.digest in needed}
    rows = [index.num_rows(num_tokens) for num_tokens in needed.values()]
    return rows, sum(sizes.values()) or sum(rows) * index.expected_bytes_per_token


def _recompute_seconds(
    calibration: Calibration, num_layers: int, rows: Sequence[int], loss: float
) -> tuple[str, list[float]]:
    """Return ``auto``'s time for a prompt, and the seconds it recomputes for each chunk."""
    auto = LoadingController(loss=loss, calibration=calibration)

    def prompt(num_rows: int) -> PromptRows:
        return PromptRows(num_rows, num_layers, (ReusedSpan("", 0, 0, num_rows),))

    typical = sorted(rows)[len(rows) // 2]
    repair, _ = auto.choose(prompt(typical), 0)
    per_row = calibration.cost.seconds_per_row
    known = {one: per_row * sum(planned_counts(repair.policy, prompt(one))) for one in set(rows)}
    return str(repair), [known[one] for one in rows]


def _cost_of(index: Index, store: Store) -> TierCost:
    url = without_password(store.url)
    chunks = spread(index, _NUM_CHUNKS)
    # A store that does not answer is not measured: its own records must not count as borrowed.
    ours = [chunk for chunk in chunks if store.contains(index.key_of(chunk))]
    borrowed: list[ChunkKey] = []
    try:
        if not ours:
            ours = given(index, store, chunks[: 2 * _NUM_CHUNKS])
            borrowed = [index.key_of(chunk) for chunk in ours]
        with reading_from(index, store):
            found = measure_tier(index, ours, _NUM_CHUNKS, lambda _: None)
    finally:
        for key in borrowed:
            with suppress(StoreError):
                store.delete(key)
    if found is None:
        raise StoreError(f"{url} delivered nothing: check that it is writable and has room")
    return TierCost(url, *found)
