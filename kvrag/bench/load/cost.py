"""What it costs to load KV from an index's store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from kvrag.chunk import Chunk
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.loader import SpanLoader, SpanLostError
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.loading import LOAD_THREADS
from kvrag.loading.cost import LoadingCost
from kvrag.loading.prices import fit_prices
from kvrag.store.registry import without_password

# Prompts loaded: enough for a fit, few enough that a slow store takes seconds.
_NUM_PROMPTS = 10


def measure_loading(
    index: Index, num_chunks: int, say: Callable[[str], None] = lambda _: None
) -> LoadingCost | None:
    """Load prompts of one chunk and of several, and fit what a chunk and a token cost.

    Chunks are spread over the index, and none is read again before all have been: what tiers of
    the store hold is then what they hold for prompts.

    Parameters
    ----------
    num_chunks
        Chunks of the larger prompts.

    Returns
    -------
    LoadingCost or None
        None where the store delivered nothing.
    """
    ids: list[str] = []
    index.catalog.each_text(lambda chunk_id, _: ids.append(chunk_id))
    sizes = [
        num_chunks if number % 2 else max(1, num_chunks // 4) for number in range(_NUM_PROMPTS)
    ]
    step = max(1, len(ids) // (sum(sizes) + num_chunks))
    chosen = cycle(index.get_chunks(ids[::step]))
    amounts, seconds = [], []
    for number, size in enumerate([num_chunks, *sizes]):
        say(f"loading prompt {number + 1} of {len(sizes) + 1}")
        chunks = list({chunk.chunk_id: chunk for chunk in islice(chosen, size)}.values())
        loaded, took = _load(index, chunks)
        # The first finds nothing ready, and is not counted.
        if number and loaded:
            amounts.append((float(len(loaded)), float(sum(span.length for span in loaded))))
            seconds.append(took)
    if not amounts:
        return None
    per_record, per_token = fit_prices(amounts, seconds)
    return LoadingCost(without_password(index.store.url), per_record, per_token)


def _load(index: Index, chunks: Sequence[Chunk]) -> tuple[list[ReusedSpan], float]:
    """Return what was loaded, and the seconds it took."""
    spans, num_tokens = [], 0
    for chunk in chunks:
        length = index.num_rows(len(chunk.token_ids))
        spans.append(ReusedSpan(chunk.chunk_id, num_tokens, 0, length, chunk.contexts[0]))
        num_tokens += length
    # Chunks that fit no prompt together are loaded all the same: any positions will do.
    positions = [row % index.model.max_positions for row in range(num_tokens)]
    return load_spans(index, spans, num_tokens, positions)


def load_spans(
    index: Index,
    spans: Sequence[ReusedSpan],
    num_tokens: int,
    positions: Sequence[int] | None = None,
    load_threads: int = LOAD_THREADS,
) -> tuple[list[ReusedSpan], float]:
    """Load spans into a prompt's buffer with nothing computed beside it.

    Returns
    -------
    (loaded, seconds)
        The spans that could be had.
    """
    model = index.model
    buffer = FusedKV(model.spec, num_tokens, num_tokens, model.device)
    buffer.storage.zero_()  # an engine's spare buffer has been touched before, too
    tables = model.tables(num_tokens, positions)
    started = time.perf_counter()
    loader = SpanLoader(spans, index.open_kv, num_threads=load_threads)
    loader.begin(buffer, tables)
    try:
        for layer_index, table in enumerate(tables):
            loader.load_layer(layer_index, buffer, table)
    except SpanLostError:
        loader.spans = []
    finally:
        loader.end()
    return loader.spans, time.perf_counter() - started
