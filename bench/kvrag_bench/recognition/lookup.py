"""Looking a long prompt up among very many chunks of random tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvrag.fusion.runs import Fingerprints, Ids, choose_runs, find_runs, ngram_hashes, window_minima

_VOCABULARY = 50_000
_PIECE = 250  # tokens of a piece of the prompt, from inside one chunk
_ROUNDS = 50


@dataclass(frozen=True)
class LookupRow:
    """The cost of a table of fingerprints. Seconds are CPU time: other processes do not count.

    Attributes
    ----------
    num_chunks, chunk_tokens
        The chunks, and the tokens of each.
    size_bytes
        Memory of the table.
    build_seconds, add_seconds
        Time to make it at once, and to add 1,000 chunks to it.
    num_tokens
        Tokens of the prompt: pieces from inside chunks.
    reused
        Share of the prompt's tokens that runs cover.
    table_seconds
        Hashing the prompt and looking it up in the table: median.
    compare_seconds
        Comparing the candidates and choosing runs, the candidates' tokens in memory: median.
    """

    num_chunks: int
    chunk_tokens: int
    size_bytes: int
    build_seconds: float
    add_seconds: float
    num_tokens: int
    reused: float
    table_seconds: float
    compare_seconds: float


def measure_lookup(
    num_chunks: int, chunk_tokens: int, num_tokens: int, on_progress: Callable[[str], None]
) -> LookupRow:
    """Make a table of random chunks, and look up a prompt of pieces of them."""

    def chunk_of(row: int) -> Ids:
        # Philox starts anywhere at once, so no chunk has to be kept.
        bits = np.random.Philox(key=row).random_raw((chunk_tokens + 3) // 4)
        values = bits.view(np.uint16)[:chunk_tokens]
        tokens: Ids = (values % _VOCABULARY).astype(np.int32)
        return tokens

    def chunks(first: int, last: int) -> Iterator[tuple[int, Ids]]:
        for row in range(first, last):
            if row % 100_000 == 0:
                on_progress(f"{row:,} of {num_chunks:,} chunks")
            yield row, chunk_of(row)

    started = time.thread_time()
    table = Fingerprints().with_chunks(chunks(0, num_chunks))
    build_seconds = time.thread_time() - started
    added = list(chunks(num_chunks, num_chunks + 1000))
    started = time.thread_time()
    table.with_chunks(added)
    add_seconds = time.thread_time() - started

    chance = np.random.default_rng(0)
    pieces = []
    for row in chance.integers(0, num_chunks, -(-num_tokens // _PIECE)):
        begin = int(chance.integers(0, max(1, chunk_tokens - _PIECE)))
        pieces.append(chunk_of(int(row))[begin : begin + _PIECE])
    prompt = np.concatenate(pieces)[:num_tokens]
    table_seconds, compare_seconds = [], []
    for _ in range(_ROUNDS):
        started = time.thread_time()
        hashes = np.unique(window_minima(ngram_hashes(prompt)))
        _, rows = table.look_up(hashes, 32)
        table_seconds.append(time.thread_time() - started)
        candidates = {str(row): chunk_of(int(row)) for row in np.unique(rows)}
        started = time.thread_time()
        _, usable = find_runs(prompt, [(0, len(prompt))], candidates, str)
        chosen = choose_runs(usable)
        compare_seconds.append(time.thread_time() - started)
    return LookupRow(
        num_chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        size_bytes=table.size_bytes,
        build_seconds=build_seconds,
        add_seconds=add_seconds,
        num_tokens=len(prompt),
        reused=sum(one.run.length for one in chosen) / len(prompt),
        table_seconds=statistics.median(table_seconds),
        compare_seconds=statistics.median(compare_seconds),
    )
