"""A shared index of very many small chunks: to open cold, to search, and to commit to."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvrag.ingest.embedding import Embedding
from kvrag.ingest.index import Index
from kvrag.ingest.schema import Change, ChunkRow
from kvrag_bench.store.contents import key_of
from kvrag_bench.store.million import chunk_number, source_of
from kvrag_bench.vectors import clustered

_DIM = 384
_CHUNKS_PER_DOCUMENT = 1000
_DOCUMENTS_PER_COMMIT = 20
_NUM_COMMITTED = 1000
_NUM_SEARCHES = 200
_FILES = ("catalog.sqlite", "vectors.cache", "words.cache")
_WRITTEN_AT_ONCE = 4 << 20


@dataclass(frozen=True)
class SharedRow:
    """Costs of a shared index with that many chunks, without their KV.

    Attributes
    ----------
    url
        Where it is, without options.
    num_chunks
        Chunks of 32 tokens, each with a vector of 384 values.
    build_seconds
        Committing all of them, 20,000 at a time.
    compact_seconds
        Making the graph and the index of words, and publishing a whole catalog.
    base_bytes, catalog_bytes_per_chunk, vectors_bytes_per_chunk, words_bytes_per_chunk
        Size of what a new machine reads, and its parts for each chunk.
    cold_open_seconds, first_search_seconds
        Opening on a machine without a view, and the first search by a vector after it.
    write_seconds
        Writing as many bytes as the base has to that machine's disk, and nothing else.
    warm_open_seconds
        Opening where there is a view.
    search_seconds, slow_search_seconds
        A search by a vector for 10 chunks: median and 95th percentile.
    commit_seconds
        A commit of 1,000 chunks.
    follow_seconds, follow_vectors_seconds
        Another machine's refresh after it, and bringing its vectors up to date.
    idle_refresh_seconds
        A refresh that finds nothing new.
    """

    url: str
    num_chunks: int
    build_seconds: float
    compact_seconds: float
    base_bytes: int
    catalog_bytes_per_chunk: float
    vectors_bytes_per_chunk: float
    words_bytes_per_chunk: float
    cold_open_seconds: float
    first_search_seconds: float
    write_seconds: float
    warm_open_seconds: float
    search_seconds: float
    slow_search_seconds: float
    commit_seconds: float
    follow_seconds: float
    follow_vectors_seconds: float
    idle_refresh_seconds: float


class _NoText(Embedding):
    """Stands for the embedding whose vectors the bench writes itself."""

    name = "kvrag-bench-given"
    dim = _DIM

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        return np.zeros((len(texts), _DIM), np.float32)


def measure_shared(
    folder: Path, url: str, num_chunks: int, on_progress: Callable[[str], None]
) -> SharedRow:
    """Make a shared index at a URL where there is none, and use it from two machines.

    The machine that only reads keeps its view in the folder that ``KVRAG_VIEWS`` names, if any.
    """
    views = os.environ.get("KVRAG_VIEWS") or folder
    with tempfile.TemporaryDirectory(prefix="kvrag-", dir=views) as other:
        return _measured(folder, Path(other), url, num_chunks, on_progress)


def _measured(
    folder: Path, other: Path, url: str, num_chunks: int, on_progress: Callable[[str], None]
) -> SharedRow:
    given = clustered(num_chunks + _NUM_COMMITTED, _DIM)
    embedding = _NoText()
    with _machine(folder / "writer"):
        writer = Index.create(url, model="kvrag-tiny", embedding=embedding, context="none")
    with writer:
        started = time.perf_counter()
        step = _CHUNKS_PER_DOCUMENT * _DOCUMENTS_PER_COMMIT
        for first in range(0, num_chunks, step):
            writer._storage.apply(_change(given, first, min(first + step, num_chunks)))
            on_progress(f"{first + step:,} of {num_chunks:,} chunks committed")
        build_seconds = time.perf_counter() - started
        on_progress("publishing a whole catalog")
        started = time.perf_counter()
        writer.upkeep.gc()
        compact_seconds = time.perf_counter() - started

        on_progress("opening cold")
        os.sync()  # another machine would not wait for what this one has just written
        with _machine(other):
            started = time.perf_counter()
            reader = Index.open(url, embedding=embedding)
            cold_open_seconds = time.perf_counter() - started
            started = time.perf_counter()
            first_hits = reader.search_by_vector(given[0], 10)
            first_search_seconds = time.perf_counter() - started
            assert [hit.chunk for hit in first_hits] == [
                hit.chunk for hit in writer.search_by_vector(given[0], 10)
            ]
            sizes = {path.name: path.stat().st_size for path in reader.path.iterdir()}
            reader.close()
            started = time.perf_counter()
            reader = Index.open(url, embedding=embedding)
            warm_open_seconds = time.perf_counter() - started
        base_bytes = sum(sizes[name] for name in _FILES)
        os.sync()
        write_seconds = _seconds_to_write(other / "bytes", base_bytes)
        with reader:
            on_progress("searching")
            reader.search_by_vector(given[0], 10)
            random = np.random.default_rng(1)
            seconds = []
            for place in random.integers(num_chunks, size=_NUM_SEARCHES):
                started = time.perf_counter()
                reader.search_by_vector(given[place], 10)
                seconds.append(time.perf_counter() - started)
            on_progress("committing")
            change = _change(given, num_chunks, num_chunks + _NUM_COMMITTED)
            started = time.perf_counter()
            writer._storage.apply(change)
            commit_seconds = time.perf_counter() - started
            started = time.perf_counter()
            reader.refresh()
            follow_seconds = time.perf_counter() - started
            started = time.perf_counter()
            reader.search_by_vector(given[-1], 10)
            follow_vectors_seconds = time.perf_counter() - started
            started = time.perf_counter()
            reader.refresh()
            idle_refresh_seconds = time.perf_counter() - started
    return SharedRow(
        url=url.partition("?")[0],
        num_chunks=num_chunks,
        build_seconds=build_seconds,
        compact_seconds=compact_seconds,
        base_bytes=base_bytes,
        catalog_bytes_per_chunk=sizes["catalog.sqlite"] / num_chunks,
        vectors_bytes_per_chunk=sizes["vectors.cache"] / num_chunks,
        words_bytes_per_chunk=sizes["words.cache"] / num_chunks,
        cold_open_seconds=cold_open_seconds,
        first_search_seconds=first_search_seconds,
        write_seconds=write_seconds,
        warm_open_seconds=warm_open_seconds,
        search_seconds=statistics.median(seconds),
        slow_search_seconds=statistics.quantiles(seconds, n=20)[-1],
        commit_seconds=commit_seconds,
        follow_seconds=follow_seconds,
        follow_vectors_seconds=follow_vectors_seconds,
        idle_refresh_seconds=idle_refresh_seconds,
    )


def _change(given: NDArray[np.float32], first: int, end: int) -> Change:
    change = Change()
    for begin in range(first, end, _CHUNKS_PER_DOCUMENT):
        numbers = range(begin, min(begin + _CHUNKS_PER_DOCUMENT, end))
        rows = [
            ChunkRow(chunk_number(number), [key_of(number)], given[number : number + 1])
            for number in numbers
        ]
        change.put.append((source_of(begin), None, "0" * 40, {}, rows))
    return change


def _seconds_to_write(path: Path, num_bytes: int) -> float:
    content = os.urandom(_WRITTEN_AT_ONCE)
    started = time.perf_counter()
    with path.open("wb") as file:
        for first in range(0, num_bytes, _WRITTEN_AT_ONCE):
            file.write(content[: num_bytes - first])
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


@contextmanager
def _machine(views: Path) -> Iterator[None]:
    """Open or create with the views of one machine."""
    former = os.environ.get("KVRAG_VIEWS")
    os.environ["KVRAG_VIEWS"] = str(views)
    try:
        yield
    finally:
        if former is None:
            del os.environ["KVRAG_VIEWS"]
        else:
            os.environ["KVRAG_VIEWS"] = former
