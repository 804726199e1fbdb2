"""How fast stores load an index's KV, and what keeping it there costs (`kvrag choose-store`)."""

from __future__ import annotations

import math
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import ParameterError, RecordError, StoreError
from kvrag.fusion.controller import Calibration, LoadingController
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.loader import SpanLoader
from kvrag.fusion.policies.base import PromptRows, planned_counts
from kvrag.fusion.slices import LostError
from kvrag.ingest.config import no_kv
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.loading import LOAD_THREADS
from kvrag.loading.cost import LoadingCost, TierCost
from kvrag.loading.pace import fit_prices
from kvrag.regularfile import read_regular
from kvrag.store.base import Store, content_of, tiers_of
from kvrag.store.registry import open_store, without_password

# -- prices --------------------------------------------------------------------------------------

FILE_NAME = "prices.toml"

EXAMPLES = """\
# What stores cost, in one currency. THESE ARE EXAMPLES: rounded list prices, in US dollars, of
# the kind that large providers publish for one region. Yours differ: edit them.
#
# A name is what a store's URL begins with; of several that fit, the longest counts.
#   gb_month         keeping a gigabyte (10^9 bytes) for a month
#   gb_read          reading a gigabyte: transfer, where it is charged
#   thousand_reads   a thousand requests; a chunk takes one for its header and one for each layer

["file:"]
gb_month = 0.08

["memory:"]
gb_month = 3.0

["redis:"]
gb_month = 10.0

["rediss:"]
gb_month = 10.0

["unix:"]
gb_month = 10.0

["s3:"]
gb_month = 0.023
thousand_reads = 0.0004

["gs:"]
gb_month = 0.020
thousand_reads = 0.0004

["az:"]
gb_month = 0.018
thousand_reads = 0.0005

["http:"]
gb_month = 0.08

["https:"]
gb_month = 0.08
gb_read = 0.09
"""


@dataclass(frozen=True)
class Price:
    """The prices of a store, in one currency.

    Attributes
    ----------
    gb_month
        Keeping 10^9 bytes for a month.
    gb_read
        Reading 10^9 bytes.
    thousand_reads
        A thousand requests.
    """

    gb_month: float = 0.0
    gb_read: float = 0.0
    thousand_reads: float = 0.0

    def month(self, size_bytes: int, num_requests: int, reads: float) -> float:
        """Return the cost of a month.

        Parameters
        ----------
        size_bytes
            Bytes that are kept.
        num_requests
            Requests that it takes to read all of them once.
        reads
            How often all of them are read in a month.
        """
        size = size_bytes / 1e9
        requests = num_requests * self.thousand_reads / 1000
        return size * self.gb_month + reads * (size * self.gb_read + requests)


class PriceTable(NamedTuple):
    """Prices by the beginnings of URLs, and the file that they come from."""

    prices: Mapping[str, Price]
    where: str

    def of(self, url: str) -> Price:
        """Return the price of a store. Raises ParameterError if the table lacks it."""
        fitting = [name for name in self.prices if url.startswith(name)]
        if not fitting:
            raise ParameterError(
                f"{self.where} has no price of {url}: give one under a name that the URL begins "
                "with"
            )
        return self.prices[max(fitting, key=len)]


def parse_prices(text: str, where: str) -> PriceTable:
    """Return a price table.

    Raises
    ------
    ParameterError
        If the text is not such a table. Messages call it `where`.
    """
    known = [field.name for field in fields(Price)]
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{where}: not a table of prices: {error}") from error
    prices = {}
    for name, entries in table.items():
        if not isinstance(entries, dict) or not entries or entries.keys() - set(known):
            raise ParameterError(
                f'{where}: expected ["{name}"] with some of {", ".join(known)}; found '
                f"{shown(entries)}"
            )
        for what, price in entries.items():
            is_number = isinstance(price, int | float) and not isinstance(price, bool)
            if not is_number or not 0.0 <= price <= sys.float_info.max:
                raise ParameterError(
                    f"{where}: expected a finite {what} of {name!r}, 0 or more; found "
                    f"{shown(price)}"
                )
        prices[name] = Price(**entries)
    return PriceTable(prices, where)


def read_prices(path: Path) -> PriceTable:
    """Return the price table in a file. Raises ParameterError as `parse_prices` does."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: the table of prices cannot be read: {error}") from error
    return parse_prices(text, str(path))


# -- stores --------------------------------------------------------------------------------------

# Prompts loaded: enough for a fit, and few enough that a slow store takes only seconds.
_NUM_PROMPTS = 10


def measure_loading(
    index: Index, num_chunks: int, say: Callable[[str], None] = lambda _: None
) -> LoadingCost | None:
    """Load prompts of one chunk and of several, and fit the cost of a chunk and of a token.

    Each tier of the store is measured separately, with chunks spread over the index, each read once
    before any is read again. A tier that holds none of them gets a few. A tier that delivers
    nothing is assumed to cost as much as the tier below it.

    Parameters
    ----------
    num_chunks
        Number of chunks in the larger prompts.

    Returns
    -------
    LoadingCost or None
        None if the last tier, or a store without tiers, delivered nothing.
    """
    store = index.store
    tiers = tiers_of(store)
    costs: list[TierCost] = []
    for number, tier in reversed(list(enumerate(tiers))):
        chunks = spread(index, num_chunks)
        if number < len(tiers) - 1:
            chunks = held(index, tier, chunks) or given(index, tier, chunks[: 2 * num_chunks])
        with reading_from(index, tier):
            found = measure_tier(index, chunks, num_chunks, say)
        if found is None and not costs:
            return None
        name = without_password(tier.url)
        costs.insert(0, TierCost(name, *found) if found else replace(costs[0], store=name))
    return LoadingCost(without_password(store.url), tuple(costs))


@contextmanager
def reading_from(index: Index, tier: Store) -> Iterator[None]:
    whole, index.store = index.store, tier
    try:
        yield
    finally:
        index.store = whole


def require_kv(index: Index) -> None:
    """Raise ParameterError for an index that stores no KV."""
    if not index.config.has_kv:
        raise ParameterError(f"nothing to measure: {no_kv(index.path, index.model.why_whole)}")


def spread(index: Index, num_chunks: int) -> list[Chunk]:
    """Return chunks from all over the index, enough for all prompts if it has this many."""
    ids: list[str] = []
    index.catalog.texts.each_text(lambda chunk_id, _: ids.append(chunk_id))
    return index.get_chunks(ids[:: max(1, len(ids) // (_NUM_PROMPTS * num_chunks))])


def held(index: Index, tier: Store, chunks: Sequence[Chunk]) -> list[Chunk]:
    with suppress(StoreError):
        return [chunk for chunk in chunks if tier.contains(index.key_of(chunk))]
    return []


def given(index: Index, tier: Store, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Copy chunks' records to a tier, as reading them often would; return those it has taken."""
    given = []
    for chunk in chunks:
        with suppress(StoreError, RecordError):
            key = index.key_of(chunk)
            content = content_of(index.store, key)
            if content is not None:
                tier.put(key, content)
                given.append(chunk)
    return given


def measure_tier(
    index: Index, chunks: Sequence[Chunk], num_chunks: int, say: Callable[[str], None]
) -> tuple[float, float] | None:
    """Return the seconds for a record and for a token, or None if nothing was delivered."""
    sizes = [
        num_chunks if number % 2 else max(1, num_chunks // 4) for number in range(_NUM_PROMPTS)
    ]
    chosen = cycle(chunks)
    amounts, seconds = [], []
    for number, size in enumerate([num_chunks, *sizes]):
        say(f"loading prompt {number + 1} of {len(sizes) + 1}")
        chunks = list({chunk.chunk_id: chunk for chunk in islice(chosen, size)}.values())
        loaded, took = _load(index, chunks)
        # The first prompt pays for one-time setup and is not counted.
        if number and loaded:
            amounts.append((float(len(loaded)), float(sum(span.length for span in loaded))))
            seconds.append(took)
    if not amounts:
        return None
    per_record, per_token = fit_prices(amounts, seconds)
    return per_record, per_token


def _load(index: Index, chunks: Sequence[Chunk]) -> tuple[list[ReusedSpan], float]:
    """Return the loaded spans and the seconds that loading took."""
    spans, num_tokens = [], 0
    for chunk in chunks:
        length = len(chunk.token_ids)
        spans.append(ReusedSpan(chunk.chunk_id, num_tokens, 0, length, chunk.contexts[0]))
        num_tokens += length
    # Chunks that fit into no prompt together are loaded too: any positions will do.
    positions = [row % index.model.max_positions for row in range(num_tokens)]
    return load_spans(index, spans, num_tokens, positions)


def load_spans(
    index: Index,
    spans: Sequence[ReusedSpan],
    num_tokens: int,
    positions: Sequence[int] | None = None,
    load_threads: int = LOAD_THREADS,
    unneeded: Mapping[ReusedSpan, int] | None = None,
) -> tuple[list[ReusedSpan], float]:
    """Load spans into a prompt's buffer without computing anything meanwhile.

    Parameters
    ----------
    unneeded
        For each span, the number of first layers that are not loaded.

    Returns
    -------
    (loaded, seconds)
        The available spans.
    """
    model = index.model
    buffer = FusedKV(model.spec, num_tokens, num_tokens, model.device)
    buffer.storage.zero_()  # an engine's spare buffer has been touched before, too
    tables = model.tables(num_tokens, positions)
    started = time.perf_counter()
    loader = SpanLoader(index.open_kv, num_threads=load_threads)
    try:
        spans = _opened(loader, spans)
        loader.begin(buffer, tables, unneeded)
        for layer_index in range(len(tables)):
            loader.load_layer(layer_index)
        loader.check()
        if model.device.type == "cuda":
            torch.cuda.current_stream(model.device).synchronize()
    except LostError:
        spans = []
    finally:
        loader.end()
    return list(spans), time.perf_counter() - started


def _opened(loader: SpanLoader, spans: Sequence[ReusedSpan]) -> Sequence[ReusedSpan]:
    """Open the records of spans; return the available spans."""
    try:
        loader.open(spans)
    except LostError as error:
        return _opened(loader, [span for span in spans if span.record_id not in error.lost])
    return spans


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
        reason = f"the cheapest of {len(hiding)} that load a chunk within {again}"
    else:
        chosen = min(offers, key=lambda offer: (offer.load_seconds, offer.month))
        reason = f"the fastest: none loads a chunk within {again}"
    reason += f"; this one takes {1000 * chosen.load_seconds:.3g} ms"
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
    require_kv(index)
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
    rows = list(needed.values())
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
