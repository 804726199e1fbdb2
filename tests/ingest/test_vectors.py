"""Vectors of an index: compared all, or found by a graph that follows the catalog."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrag.chunk import Document
from kvrag.ingest import cachefile, vectors
from kvrag.ingest.index import Index
from kvrag.ingest.vectors import Flat, Graph, VectorIndex
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import MakeIndex
from tests.support.folders import key_file

VERSION = b""
WORDS = [
    *("amber", "birch", "cedar", "delta", "ember", "flint", "grove"),
    *("heron", "iris", "jade", "kelp", "lotus", "maple", "night"),
]


def clustered(num: int, dim: int = 32, seed: int = 0) -> vectors.Vectors:
    random = np.random.default_rng(seed)
    middles = random.standard_normal((20, dim))
    found = middles[random.integers(20, size=num)] + 0.5 * random.standard_normal((num, dim))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found.astype(np.float32)


def indexed(body: Flat | Graph, given: vectors.Vectors, windows: int = 1) -> VectorIndex:
    rows = np.arange(len(given), dtype=np.int64) // windows
    return VectorIndex(VERSION, rows, rows.astype(np.uint64), body)


def graph_of(given: vectors.Vectors) -> Graph:
    graph = Graph(given.shape[1])
    graph.add(given)
    return graph


def recall(found: VectorIndex, flat: VectorIndex, wanted: Any = None) -> float:
    asked = clustered(100, seed=1)
    hits = 0
    for one in asked:
        expected = {row for row, _ in flat.search(one, 10, wanted)}
        hits += len(expected & {row for row, _ in found.search(one, 10, wanted)})
    return hits / 1000


@pytest.fixture
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make graphs of nine vectors or more."""
    monkeypatch.setattr(cachefile, "GRAPH_FROM", 8)
    return


@pytest.mark.parametrize("windows", [1, 3])
def test_a_graph_finds_what_comparing_all_finds(windows: int, small_graphs: None) -> None:
    given = clustered(2000)
    graph, flat = indexed(graph_of(given), given, windows), indexed(Flat(given), given, windows)
    assert recall(graph, flat) >= 0.98
    for wanted in (np.arange(0, 2000, 2), np.arange(0, 2000, 50), np.arange(3), np.arange(0)):
        assert recall(graph, flat, wanted) >= 0.98 * min(len(wanted), 10) / 10
    (best, *_), again = graph.search(given[7], 3), graph_of(given)
    assert best == (7 // windows, pytest.approx(1.0, abs=1e-3))
    assert Graph.from_bytes(again.to_bytes()).to_bytes() == again.to_bytes()


def test_chunks_with_very_many_windows_leave_room_for_others(small_graphs: None) -> None:
    given = clustered(600)
    given[:500] = given[0]
    rows = np.array([0] * 500 + list(range(1, 101)), np.int64)
    for body in (Flat(given), graph_of(given)):
        found = VectorIndex(VERSION, rows, rows.astype(np.uint64), body).search(given[0], 5)
        assert len(found) == 5
        assert found[0][0] == 0


def test_a_blotted_out_vector_leaves_nothing(small_graphs: None) -> None:
    given = clustered(500)
    graph = graph_of(given)
    is_gone = np.zeros(500, bool)
    is_gone[[3, 77]] = True
    graph.blot_out(np.array([3, 77]), is_gone)
    left = graph.vectors_at(np.arange(500))
    kept = np.delete(left, [3, 77], axis=0)
    for place in (3, 77):
        assert np.abs(left[place] - given[place]).max() > 0.01
        assert (kept == left[place]).all(axis=1).any()  # its neighbour's
    np.testing.assert_allclose(kept, np.delete(given, [3, 77], axis=0), atol=1e-3)


def filled(index: Index) -> Index:
    index.add([Document(word, f"The {word} is here.") for word in WORDS])
    return index


def sources(index: Index, question: str, k: int = 3) -> list[str]:
    return [hit.chunk.source for hit in index.search_dense(question, k)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Return all graphs that are made, not read."""
    found: list[Graph] = []
    init = Graph.__init__

    def noting(self: Graph, dim: int) -> None:
        found.append(self)
        init(self, dim)

    monkeypatch.setattr(Graph, "__init__", noting)
    return found


def test_a_graph_follows_the_catalog(
    index: Index, model: KVModel, small_graphs: None, made: list[Graph]
) -> None:
    filled(index)
    assert len(made) == 1
    assert index.stats().has_graph
    assert index.stats().num_vectors == len(WORDS)
    assert index.stats().vectors_memory_bytes > 2 * 384 * len(WORDS)
    assert sources(index, "cedar")[0] == "cedar"
    index.delete(sources=["cedar"])
    assert "cedar" not in sources(index, "cedar", len(WORDS))
    index.add([Document("zinc", "The zinc is here."), Document("birch", "The quartz is here.")])
    assert sources(index, "zinc")[0] == "zinc"
    assert sources(index, "quartz")[0] == "birch"
    assert len(sources(index, "the", 99)) == len(WORDS)
    with Index.open(index.path, model=model) as again:
        assert sources(again, "zinc")[0] == "zinc"
        assert "cedar" not in sources(again, "cedar", 99)
        other = Document("onyx", "The onyx is here.")
        index.add([other])
        assert sources(again, "onyx")[0] == "onyx"
    assert len(made) == 1  # nothing made it anew


def test_gc_makes_a_missing_graph(
    index: Index, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(index)
    assert not index.stats().has_graph
    monkeypatch.setattr(cachefile, "GRAPH_FROM", 8)
    assert sources(index, "maple")[0] == "maple"
    assert not index.stats().has_graph  # a search makes none
    index.upkeep.gc()
    assert index.stats().has_graph
    with Index.open(index.path, model=model) as again:
        assert sources(again, "maple")[0] == "maple"


def test_a_damaged_graph_is_replaced(index: Index, model: KVModel, small_graphs: None) -> None:
    filled(index)
    cache = index.path / "vectors.cache"
    good = cache.read_bytes()
    for place in (9, 20, len(good) // 2, len(good) - 1):
        cache.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with Index.open(index.path, model=model) as again:
            assert sources(again, "heron")[0] == "heron"
    cache.write_bytes(good[:-5])
    with Index.open(index.path, model=model) as again:
        again.upkeep.gc()
        assert again.stats().has_graph
        assert sources(again, "heron")[0] == "heron"


@pytest.mark.parametrize(
    ("damage", "how"),
    [
        ("UPDATE documents SET digest = 'x' WHERE source = 'long'", "at once"),
        ("UPDATE documents SET seal = x'00' WHERE source = 'long'", "one by one"),
        ("DELETE FROM documents WHERE source = 'long'", "document"),
        ("DELETE FROM documents WHERE source = 'long'", "one by one"),
    ],
)
def test_chunks_of_a_damaged_document_leave_the_vectors(
    index: Index, model: KVModel, damage: str, how: str
) -> None:
    index.add([Document("long", "\n\n".join(f"The {word}, and the sea. " * 9 for word in WORDS))])
    first, second, *_ = ids = index.catalog.chunk_ids_of("long")
    index.search_dense("heron", 1)
    index.catalog._connection.execute("PRAGMA foreign_keys = OFF")
    index.catalog._connection.execute(damage)
    if how == "document":
        index.delete(sources=["long"])
    else:
        for some in [[first, second]] if how == "at once" else [[first], [second]]:
            assert index.delete(chunk_ids=some) == len(some)
    gone = len(ids) if how == "document" else 2
    with Index.open(index.path, model=model) as again:
        for one in (index, again):
            assert len(one._storage.vectors.get().rows) == len(ids) - gone


@pytest.mark.parametrize("lost", ["", " WHERE ordinal = 1"])
def test_vectors_of_lost_chunks_come_back_with_them(
    index: Index, model: KVModel, lost: str
) -> None:
    """No cache of what a damaged catalog still has counts as that of the mended one."""
    long = Document("long", "\n\n".join(f"The {word}, and the sea. " * 9 for word in WORDS))
    index.add([long])
    expected = {hit.chunk.chunk_id for hit in index.search_dense("heron", 99)}
    index.close()
    (index.path / "vectors.cache").unlink()
    with Index.open(index.path, model=model) as damaged:
        damaged.catalog._connection.execute(f"DELETE FROM chunks{lost}")
        assert len(damaged.search_dense("heron", 99)) < len(expected)
        damaged.upkeep.verify(repair=True)
        damaged.add([long])
        assert {hit.chunk.chunk_id for hit in damaged.search_dense("heron", 99)} == expected
    with Index.open(index.path, model=model) as again:
        assert {hit.chunk.chunk_id for hit in again.search_dense("heron", 99)} == expected


@pytest.mark.parametrize("graph_from", [8, 50_000])
def test_a_catalog_that_was_put_back_gets_its_own_vectors(
    index: Index, tmp_path: Path, model: KVModel, graph_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachefile, "GRAPH_FROM", graph_from)
    filled(index)
    index.close()
    catalog = index.path / "catalog.sqlite"
    shutil.copyfile(catalog, tmp_path / "backup")
    with Index.open(index.path, model=model) as later:
        later.add([Document("zinc", "The zinc is here.")])
        assert sources(later, "zinc")[0] == "zinc"
    shutil.copyfile(tmp_path / "backup", catalog)
    with Index.open(index.path, model=model) as back:
        back.add([Document("onyx", "The onyx is here.")])  # in the row that zinc had
        back.add([Document("opal", "The opal is here.")])
        assert sources(back, "onyx")[0] == "onyx"
        assert back.search_dense("zinc", 1)[0].score < 0.9


def test_an_encrypted_catalog_has_no_graph(
    make_index: MakeIndex, tmp_path: Path, small_graphs: None
) -> None:
    pytest.importorskip("sqlcipher3")
    key = key_file(tmp_path / "key")
    index = filled(make_index(store=f"file:{tmp_path / 'kv'}?key_file={key}"))
    assert sources(index, "delta")[0] == "delta"
    assert not (index.path / "vectors.cache").exists()


def test_searches_go_on_while_vectors_join_and_leave(index: Index, small_graphs: None) -> None:
    filled(index)
    failed: list[BaseException] = []
    is_done = threading.Event()

    def search() -> None:
        try:
            while not is_done.is_set():
                assert sources(index, "lotus")[0] == "lotus"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for one in threads:
        one.start()
    for number in range(12):
        index.add([Document(f"new {number}", f"The number {number} is new.")])
        index.delete(sources=[f"new {number - 2}"])
    is_done.set()
    for one in threads:
        one.join()
    assert not failed
