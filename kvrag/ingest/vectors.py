"""Nearest chunks by inner product: the vectors of a catalog, compared all or by a graph.

Above `GRAPH_FROM` vectors, writers make a graph (`kvrag.ingest.vectors`). New vectors join it, and
those of removed chunks are left out of what it finds, so that no change makes it again.

A cache on disk saves reading every row of the catalog when an index is opened, and making the
graph. It is never trusted: one with another length or seal is made again, one of other contents of
the catalog is brought up to date. An encrypted catalog has none, and no graph.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.errors import IndexMismatchError
from kvrag.ingest import cachefile
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import VECTORS_NAME

# A graph of neighbouring vectors: finds the nearest of very many without comparing all.
#
# Source: hierarchical navigable small worlds (Malkov and Yashunin, "Efficient and robust
# approximate nearest neighbor search using hierarchical navigable small world graphs", 2018), by
# FAISS. The vectors are kept in 16 bits a value.


NEIGHBOURS = 32
"""Links of a vector; twice as many in the lowest layer."""
_BUILD_WIDTH = 100
_SEARCH_WIDTH = 256
"""Candidates that a search follows, at least: more find more of the nearest, and take longer."""
_MOST_WIDTH = 4096
_COPIED_AT_ONCE = 16 << 20

Vectors = NDArray[np.float32]


def import_faiss() -> Any:
    """Return FAISS."""
    with warnings.catch_warnings():
        # Its SWIG wrapper defines types without __module__, which Python 3.12 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        import faiss

    return faiss


class Flat:
    """Vectors that are all compared.

    Parameters
    ----------
    vectors
        The first ones ``[n, dim]``.
    """

    def __init__(self, vectors: Vectors) -> None:
        self._faiss = import_faiss()
        self._index: Any = self._faiss.IndexFlatIP(vectors.shape[1])
        self._storage = self._index
        self.add(vectors)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dim(self) -> int:
        """The vectors' length."""
        return int(self._index.d)

    @property
    def size_bytes(self) -> int:
        """Memory of the vectors."""
        return int(len(self) * self._storage.code_size)

    def add(self, vectors: Vectors) -> None:
        """Add vectors ``[n, dim]``; their places follow those of the present ones."""
        if len(vectors):
            self._index.add(np.ascontiguousarray(vectors, np.float32))

    def vectors_at(self, places: NDArray[np.int64]) -> Vectors:
        """Return the vectors ``[n, dim]`` at some places."""
        found: Vectors = self._storage.reconstruct_batch(places)
        return found

    @property
    def vectors(self) -> Vectors:
        """All vectors ``[n, dim]``."""
        found: Vectors = self._storage.reconstruct_n(0, len(self))
        return found

    def to_bytes(self) -> bytes:
        """Return all vectors as bytes."""
        return self.vectors.astype("<f4", copy=False).tobytes()

    def compare(
        self, vector: Vectors, count: int, allowed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], Vectors]:
        """Return places and inner products of the nearest vectors, the best first.

        Parameters
        ----------
        vector
            What to look for ``[1, dim]``.
        count
            How many to find.
        allowed
            Which places may be found ``[n]``; all of them are compared.
        """
        options = None
        if not allowed.all():
            options = self._faiss.SearchParameters(sel=self._of(allowed))
        return _found(self._storage.search(vector, count, params=options))

    def _of(self, allowed: NDArray[np.bool_]) -> Any:
        return self._faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def _found(result: tuple[Any, Any]) -> tuple[NDArray[np.int64], Vectors]:
    """Return places and inner products without the places that FAISS could not fill."""
    scores, places = result
    is_found = places[0] >= 0
    return places[0][is_found], scores[0][is_found]


class Graph(Flat):
    """Vectors with links to their neighbours, in 16 bits a value. They can be blotted out.

    Parameters
    ----------
    dim
        The vectors' length.
    """

    def __init__(self, dim: int) -> None:
        self._faiss = import_faiss()
        kind = self._faiss.ScalarQuantizer.QT_fp16
        metric = self._faiss.METRIC_INNER_PRODUCT
        self._use(self._faiss.IndexHNSWSQ(dim, kind, NEIGHBOURS, metric))
        self._index.hnsw.efConstruction = _BUILD_WIDTH

    @classmethod
    def from_bytes(cls, content: bytes | memoryview) -> Graph:
        """Return the graph that `to_bytes` wrote; the caller has checked that it is unchanged."""
        graph = cls.__new__(cls)
        graph._faiss = import_faiss()
        at = 0

        def read(size: int) -> bytes:
            nonlocal at
            part = bytes(content[at : at + size])
            at += len(part)
            return part

        # FAISS's own reader of bytes copies all of them once more: seven times as slow.
        reader = graph._faiss.PyCallbackIOReader(read, _COPIED_AT_ONCE)
        graph._use(graph._faiss.read_index(reader))
        return graph

    def to_bytes(self) -> bytes:
        """Return the whole graph as bytes."""
        stream = io.BytesIO()
        writer = self._faiss.PyCallbackIOWriter(stream.write, _COPIED_AT_ONCE)
        self._faiss.write_index(self._index, writer)
        return stream.getvalue()

    @property
    def size_bytes(self) -> int:
        """Memory of vectors and links."""
        hnsw = self._index.hnsw
        links = 4 * (hnsw.neighbors.size() + hnsw.levels.size()) + 8 * hnsw.offsets.size()
        return int(links) + super().size_bytes

    def search(
        self, vector: Vectors, count: int, allowed: NDArray[np.bool_], num_allowed: int
    ) -> tuple[NDArray[np.int64], Vectors]:
        """Return places and inner products of nearest vectors, the best first.

        Parameters
        ----------
        vector
            What to look for ``[1, dim]``.
        count
            How many to find; a search may find fewer.
        allowed
            Which places may be found ``[n]``.
        num_allowed
            How many those are. The fewer, the more candidates are followed.
        """
        # The search goes by way of other vectors too, so that they take part of its candidates.
        width = max(_SEARCH_WIDTH, count) * len(self) / num_allowed
        options = self._faiss.SearchParametersHNSW(
            efSearch=min(int(width), max(_MOST_WIDTH, count)), sel=self._of(allowed)
        )
        return _found(self._index.search(vector, count, params=options))

    def blot_out(self, places: NDArray[np.int64], is_gone: NDArray[np.bool_]) -> None:
        """Overwrite vectors with a neighbour's: searches still pass there, nothing of them stays.

        Parameters
        ----------
        places
            Which ones.
        is_gone
            Places whose vectors are no neighbours to take ``[n]``: these, and others before.
        """
        faiss, hnsw = self._faiss, self._index.hnsw
        size = self._storage.code_size
        codes = faiss.rev_swig_ptr(self._storage.codes.data(), len(self) * size)
        codes = codes.reshape(len(self), size)
        links = faiss.rev_swig_ptr(hnsw.neighbors.data(), hnsw.neighbors.size())
        offsets = faiss.rev_swig_ptr(hnsw.offsets.data(), hnsw.offsets.size())
        for place in places.tolist():
            begin = int(offsets[place])
            near = links[begin : begin + 2 * NEIGHBOURS]
            near = near[near >= 0]
            near = near[~is_gone[near]]
            codes[place] = codes[near[0]] if len(near) else 0

    def _use(self, index: Any) -> None:
        self._index = index
        self._storage = self._faiss.downcast_index(index.storage)


logger = logging.getLogger("kvrag")

_VERSION = 5  # of the cache
_MOST_GONE = 0.2  # share of the vectors in a graph at which writers make it again
_BATCH = 1_000  # vectors that join a graph while searches wait

Rows = NDArray[np.int64]
Marks = NDArray[np.uint64]


class VectorIndex:
    """The vectors of one state of the catalog. Safe to use from several threads.

    Parameters
    ----------
    of
        The digest of the catalog's contents that they belong to (`Catalog.version`).
    rows, marks
        Row and mark (`kvrag.ingest.schema.vector_mark`) of each vector's chunk ``[n]``.
    body
        The vectors.
    is_gone
        Which vectors are of removed chunks ``[n]``; None means none.

    Attributes
    ----------
    num_gone
        How many that are.
    """

    def __init__(
        self,
        of: bytes,
        rows: Rows,
        marks: Marks,
        body: Flat,
        is_gone: NDArray[np.bool_] | None = None,
    ) -> None:
        self.of = of
        self.rows = rows
        self.marks = marks
        self.body = body
        self.is_gone = np.zeros(len(rows), bool) if is_gone is None else is_gone
        self.num_gone = int(self.is_gone.sum())
        self._latest: tuple[Rows | None, NDArray[np.bool_]] = None, self.is_gone
        # Only a graph is ever altered.
        is_graph = isinstance(body, Graph)
        self._using = threading.Lock() if is_graph else contextlib.nullcontext()

    @classmethod
    def read(cls, catalog: Catalog, dim: int) -> VectorIndex:
        """Return the vectors of the current catalog, all to be compared."""
        read = catalog.vectors(dim)
        return cls(read.of, read.rows, read.marks, Flat(read.vectors))

    @property
    def size_bytes(self) -> int:
        """Memory of the vectors, their rows, and the graph's links."""
        return self.body.size_bytes + cachefile.ROW_BYTES * len(self.rows)

    def search(
        self, vector: Vectors, k: int, wanted: Rows | None = None
    ) -> list[tuple[int, float]]:
        """Return the `k` nearest chunks, best first: row number, inner product of the best vector.

        Parameters
        ----------
        vector
            The vector ``[dim]``; its length only scales the scores.
        wanted
            Rows of the chunks that may be found; None means all.
        """
        vector = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
        if vector.shape[1] != self.body.dim:
            raise IndexMismatchError(
                f"the index holds vectors of {self.body.dim} dimensions, the question's has "
                f"{vector.shape[1]}: use the embedding the index was made with"
            )
        with self._using:
            allowed = ~self.is_gone
            if wanted is not None:
                allowed &= self._of(wanted)
            num_allowed = int(allowed.sum())
            count = 2 * k
            while num_allowed:
                count = min(count, num_allowed)
                best: dict[int, float] = {}
                places, scores = self._nearest(vector, count, allowed, num_allowed)
                for row, score in zip(self.rows[places].tolist(), scores.tolist(), strict=True):
                    best.setdefault(row, score)
                # A chunk may have many vectors.
                if len(best) >= k or count == num_allowed or len(places) < count:
                    # Equal scores appear in the order of indexing, on every machine.
                    return sorted(best.items(), key=lambda hit: (-hit[1], hit[0]))[:k]
                count *= 2
        return []

    def update(self, catalog: Catalog) -> VectorIndex:
        """Return the vectors of the current catalog: these, changed, or others read again."""
        num_noted = catalog.num_noted
        read = catalog.vectors(self.body.dim, self.marks)
        if catalog.num_noted > num_noted:
            return VectorIndex.read(catalog, self.body.dim)
        stays = np.isin(self.marks, read.present)
        if not isinstance(self.body, Graph):
            body = Flat(np.concatenate([self.body.vectors[stays], read.vectors]))
            rows = np.concatenate([self.rows[stays], read.rows])
            marks = np.concatenate([self.marks[stays], read.marks])
            return VectorIndex(read.of, rows, marks, body)
        self._drop(self.body, ~stays & ~self.is_gone)
        self._join(self.body, read.rows, read.marks, read.vectors)
        self.of = read.of
        return self

    def tidied(self, catalog: Catalog) -> VectorIndex:
        """Return the vectors as a graph if they are many, and without removed ones if those are."""
        body = self.body
        if len(self.rows) - self.num_gone <= cachefile.GRAPH_FROM:
            return self if not isinstance(body, Graph) else VectorIndex.read(catalog, body.dim)
        if isinstance(body, Graph) and self.num_gone <= _MOST_GONE * len(self.rows):
            return self
        places = np.flatnonzero(~self.is_gone)
        graph = Graph(body.dim)
        for first in range(0, len(places), _BATCH):
            graph.add(body.vectors_at(places[first : first + _BATCH]))
        return VectorIndex(self.of, self.rows[places], self.marks[places], graph)

    # -- private -----------------------------------------------------------------------------

    def _nearest(
        self, vector: Vectors, count: int, allowed: NDArray[np.bool_], num_allowed: int
    ) -> tuple[Rows, Vectors]:
        if isinstance(self.body, Graph) and num_allowed > cachefile.GRAPH_FROM:
            return self.body.search(vector, count, allowed, num_allowed)
        return self.body.compare(vector, count, allowed)

    def _of(self, wanted: Rows) -> NDArray[np.bool_]:
        """Return which vectors are of some chunks ``[n]``; the latest answer is kept."""
        asked, found = self._latest
        if asked is not wanted or len(found) != len(self.rows):
            found = np.isin(self.rows, wanted)
            self._latest = wanted, found
        return found

    def _drop(self, graph: Graph, is_gone: NDArray[np.bool_]) -> None:
        with self._using:
            self.is_gone = self.is_gone | is_gone
            self.num_gone = int(self.is_gone.sum())
            graph.blot_out(np.flatnonzero(is_gone), self.is_gone)

    def _join(self, graph: Graph, rows: Rows, marks: Marks, vectors: Vectors) -> None:
        for first in range(0, len(rows), _BATCH):
            some = slice(first, first + _BATCH)
            with self._using:
                graph.add(vectors[some])
                self.rows = np.concatenate([self.rows, rows[some]])
                self.marks = np.concatenate([self.marks, marks[some]])
                self.is_gone = np.concatenate([self.is_gone, np.zeros(len(rows[some]), bool)])


class CurrentVectors:
    """The vectors of an index, in the current state of its catalog.

    Parameters
    ----------
    folder, catalog, dim
        The index's folder, its catalog, and the length of its vectors.
    """

    def __init__(self, catalog: Catalog, dim: int) -> None:
        self._catalog = catalog
        self._dim = dim
        self._refreshing = threading.Lock()
        self._found: VectorIndex | None = None
        # The generation whose damaged vectors were left out: a repair may change nothing else.
        self._damaged: int | None = None

    def get(self) -> VectorIndex:
        """Return the vectors; reads the cache or the catalog if necessary.

        Rewrites an invalid cache, if the folder allows it. Makes no graph: that takes a millisecond
        for each vector, which is the writers' to spend (`refresh`).
        """
        with self._refreshing:
            found, num_noted = self._found, self._catalog.num_noted
            generation, of = self._catalog.version()
            if found is None:
                found = self._loaded()
            elif found.of != of or self._damaged not in (None, generation):
                found = found.update(self._catalog)
            else:
                return found
            self._damaged = generation if self._catalog.num_noted > num_noted else None
            self._found = found
            return found

    def forget(self) -> None:
        """Read the vectors again when they are next needed: the catalog's file was replaced."""
        with self._refreshing:
            self._found = None

    def refresh(self, cached: bytes | None) -> None:
        """Bring a graph and its cache up to date, or make them (`Storage.refresh_vectors`).

        `cached` is the digest of the contents that the cache is of; None if there is none.
        """
        catalog = self._catalog
        num_noted = catalog.num_noted
        present = self.get()
        with self._refreshing:
            tidied = present.tidied(catalog)
            if tidied is present and cached == catalog.version()[1]:
                return
            if catalog.num_noted == num_noted and tidied.of:
                _keep(catalog, tidied)
            self._found = tidied

    def _loaded(self) -> VectorIndex:
        catalog = self._catalog
        if catalog.cipher_key is not None:
            return VectorIndex.read(catalog, self._dim)
        cached = _kept(catalog, self._dim)
        if cached is not None and cached.of == catalog.version()[1]:
            return cached
        num_noted = catalog.num_noted
        found = cached.update(catalog) if cached else VectorIndex.read(catalog, self._dim)
        # Damaged vectors are left out, and counted, each time.
        if catalog.num_noted == num_noted and found.of:
            _keep(catalog, found)
        if not isinstance(found.body, Graph) and len(found.rows) > cachefile.GRAPH_FROM:
            logger.info("%s: no graph of its vectors yet; 'kvrag gc' makes it", catalog.path.parent)
        return found


def _keep(catalog: Catalog, found: VectorIndex) -> None:
    # Rows of removed chunks are written as their complements.
    rows = np.where(found.is_gone, ~found.rows, found.rows).astype("<i8").tobytes()
    said = {
        "version": _VERSION,
        "dim": found.body.dim,
        "is_graph": isinstance(found.body, Graph),
        "memory_bytes": found.size_bytes,
        "of": found.of.hex(),
    }
    marks = found.marks.astype("<u8").tobytes()
    cachefile.keep(catalog, VECTORS_NAME, said, rows, marks, found.body.to_bytes())


def _kept(catalog: Catalog, dim: int) -> VectorIndex | None:
    found = cachefile.kept(catalog, VECTORS_NAME, _VERSION)
    if found is None or found[0]["dim"] != dim:
        return None
    said, (rows, marks, body) = found
    numbers = np.frombuffer(rows, "<i8").astype(np.int64)
    is_gone = numbers < 0
    return VectorIndex(
        bytes.fromhex(said["of"]),
        np.where(is_gone, ~numbers, numbers),
        np.frombuffer(marks, "<u8").astype(np.uint64),
        Graph.from_bytes(body)
        if said["is_graph"]
        else Flat(np.frombuffer(body, "<f4").astype(np.float32).reshape(-1, dim)),
        is_gone,
    )
