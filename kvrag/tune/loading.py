"""The cost of loading KV from an index's store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import cycle, islice

import torch

from kvrag.chunk import Chunk
from kvrag.errors import RecordError, StoreError
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.loader import SpanLoader
from kvrag.fusion.loss import LostError
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.loading import LOAD_THREADS
from kvrag.loading.cost import LoadingCost, TierCost
from kvrag.loading.pace import fit_prices
from kvrag.store.base import Store, read_whole
from kvrag.store.capabilities import tiers_of
from kvrag.store.registry import without_password

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
            record = index.store.open(index.key_of(chunk))
            if record is not None:
                with closing(record):
                    tier.put(index.key_of(chunk), read_whole(record))
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
        length = index.num_rows(len(chunk.token_ids))
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
