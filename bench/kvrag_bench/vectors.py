"""`kvrag bench vectors`: the graph of very many vectors against comparing all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrag.errors import ParameterError
from kvrag.ingest.cachefile import GRAPH_FROM
from kvrag.ingest.config import write_atomically
from kvrag.ingest.vectors import Flat, Graph, Rows, VectorIndex, Vectors

_BATCH = 20_000
_GENERATED = 50_000
_KEEP_SECONDS = 60.0
_CLUSTERS = 1000
_FACTORS = 48  # directions in which the vectors of a cluster differ
_QUESTION_NOISE = 0.2
_NUM_CHANGED = 1000
_SHARES = (1.0, 0.5, 0.1, 0.01)


@dataclass(frozen=True)
class VectorBenchOptions:
    """What to measure.

    Attributes
    ----------
    num_vectors, dim
        How many vectors of which length.
    num_questions
        How many searches of each kind.
    k
        Chunks to find.
    graph
        File where the graph is kept while it is made, so that a later run continues; None keeps
        none.
    """

    num_vectors: int = 200_000
    dim: int = 384
    num_questions: int = 200
    k: int = 10
    graph: str | None = None


@dataclass(frozen=True)
class VectorBenchRow:
    """Searches among a share of the vectors, as a filter leaves them.

    Attributes
    ----------
    way
        ``all``, ``filtered``, or ``after changes`` (1,000 vectors added and 1,000 removed).
    num_wanted
        How many vectors may be found.
    recall
        Share of the `k` nearest, by comparing all, that the graph finds.
    milliseconds, slow_milliseconds, flat_milliseconds
        Median and 95th percentile of a search, and median of comparing all.
    """

    way: str
    num_wanted: int
    recall: float
    milliseconds: float
    slow_milliseconds: float
    flat_milliseconds: float


@dataclass(frozen=True)
class VectorBenchResult:
    """Searches, and what graph and changes cost.

    Attributes
    ----------
    build_seconds
        Time to make the graph, NaN where a run before made a part of it.
    memory_bytes
        Memory of vectors, rows and links.
    add_milliseconds, remove_milliseconds
        Time of an added and of a removed vector.
    """

    num_vectors: int
    dim: int
    build_seconds: float
    memory_bytes: int
    add_milliseconds: float
    remove_milliseconds: float
    rows: tuple[VectorBenchRow, ...]


def run_vector_bench(
    options: VectorBenchOptions, on_progress: Callable[[str], None] = lambda _: None
) -> VectorBenchResult:
    """Make a graph of generated vectors, and compare its searches with a flat index's."""
    if options.num_vectors <= 2 * GRAPH_FROM:
        raise ParameterError(
            f"{options.num_vectors:,} vectors: expected more than {2 * GRAPH_FROM:,}, since up to "
            f"{GRAPH_FROM:,} are all compared"
        )
    given = clustered(options.num_vectors + _NUM_CHANGED, options.dim)
    kept, new = given[: options.num_vectors], given[options.num_vectors :]
    graph, seconds = _made(kept, options, on_progress)
    rows = np.arange(len(kept))
    found = VectorIndex(b"", rows, rows.astype(np.uint64), graph)
    flat = VectorIndex(b"", rows, rows.astype(np.uint64), Flat(kept))
    questions = _questions(kept, options.num_questions)
    measured = []
    for share in _SHARES:
        on_progress(f"searching among {share:.0%}")
        wanted = None if share == 1 else np.flatnonzero(_random(3).random(len(kept)) < share)
        measured.append(_row(found, flat, questions, options.k, wanted))
    on_progress("changing")
    started = time.perf_counter()
    numbers = np.arange(len(kept), len(given))
    found._join(graph, numbers, numbers.astype(np.uint64), new)
    added = time.perf_counter() - started
    is_gone = np.zeros(len(given), bool)
    # Every other one of those that stand first for a question: what removal could hide.
    is_gone[[flat.search(one, 1)[0][0] for one in questions][::2]] = True
    is_gone[_random(4).choice(len(kept), _NUM_CHANGED - int(is_gone.sum()), replace=False)] = True
    started = time.perf_counter()
    found._drop(graph, is_gone)
    removed = time.perf_counter() - started
    left = VectorIndex(b"", np.arange(len(given)), found.marks, Flat(given), found.is_gone)
    measured.append(_row(found, left, questions, options.k, None, "after changes"))
    return VectorBenchResult(
        num_vectors=len(kept),
        dim=options.dim,
        build_seconds=seconds,
        memory_bytes=found.size_bytes,
        add_milliseconds=added * 1e3 / _NUM_CHANGED,
        remove_milliseconds=removed * 1e3 / _NUM_CHANGED,
        rows=tuple(measured),
    )


def clustered(num: int, dim: int) -> Vectors:
    """Return unit vectors ``[num, dim]`` in clusters, like those of texts about many topics."""
    random = _random(0)
    scale = 1 / np.sqrt(dim)
    factors = _normal(random, (_FACTORS, dim)) * scale
    middles = _normal(random, (_CLUSTERS, dim)) * scale
    weights = (1 / np.sqrt(np.arange(1, _FACTORS + 1))).astype(np.float32)
    weights /= np.linalg.norm(weights)
    found = np.empty((num, dim), np.float32)
    for first in range(0, num, _GENERATED):
        some = found[first : first + _GENERATED]
        some[:] = middles[random.integers(_CLUSTERS, size=len(some))]
        some += (_normal(random, (len(some), _FACTORS)) * weights) @ factors
        some += 0.3 * scale * _normal(random, some.shape)
        some /= np.linalg.norm(some, axis=1, keepdims=True)
    return found


def _made(
    given: Vectors, options: VectorBenchOptions, on_progress: Callable[[str], None]
) -> tuple[Graph, float]:
    path = None if options.graph is None else Path(options.graph)
    graph = Graph(options.dim)
    if path is not None and path.exists():
        graph = Graph.from_bytes(path.read_bytes())
        if graph.dim != options.dim or len(graph) > len(given):
            raise ParameterError(f"{path}: a graph of other vectors; give another file")
    is_whole = not len(graph)
    started = last = time.perf_counter()
    for some in _rest(graph, given):
        on_progress(f"making the graph, {len(graph):,} of {len(given):,}")
        graph.add(some)
        if path is not None and (
            time.perf_counter() - last > _KEEP_SECONDS or len(graph) == len(given)
        ):
            write_atomically(path, graph.to_bytes())
            last = time.perf_counter()
    return graph, time.perf_counter() - started if is_whole else float("nan")


def _rest(graph: Graph, given: Vectors) -> Iterator[Vectors]:
    while len(graph) < len(given):
        yield given[len(graph) : len(graph) + _BATCH]


def _questions(given: Vectors, num: int) -> Vectors:
    random = _random(1)
    found = given[random.integers(len(given), size=num)]
    found = found + _QUESTION_NOISE * _normal(random, found.shape) / np.sqrt(given.shape[1])
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), np.float32)


def _row(
    found: VectorIndex,
    flat: VectorIndex,
    questions: Vectors,
    k: int,
    wanted: Rows | None,
    way: str = "",
) -> VectorBenchRow:
    hits, times, flat_times = 0, [], []
    for one in questions:
        begun = time.perf_counter()
        nearest = found.search(one, k, wanted)
        between = time.perf_counter()
        expected = {row for row, _ in flat.search(one, k, wanted)}
        flat_times.append(time.perf_counter() - between)
        times.append(between - begun)
        hits += len(expected & {row for row, _ in nearest})
    return VectorBenchRow(
        way=way or ("all" if wanted is None else "filtered"),
        num_wanted=len(found.rows) - found.num_gone if wanted is None else len(wanted),
        recall=hits / (k * len(questions)),
        milliseconds=float(np.median(times)) * 1e3,
        slow_milliseconds=float(np.quantile(times, 0.95)) * 1e3,
        flat_milliseconds=float(np.median(flat_times)) * 1e3,
    )


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> Vectors:
    return random.standard_normal(shape, dtype=np.float32)
