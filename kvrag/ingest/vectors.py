"""Nearest chunks by inner product: the vectors of a catalog, compared all or by a graph.

Above `GRAPH_FROM` vectors, writers make a graph (`kvrag.ingest.graph`). New vectors join it, and
those of removed chunks are left out of what it finds, so that no change makes it again.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
from numpy.typing import NDArray

from kvrag.errors import IndexMismatchError
from kvrag.ingest import vectorheader
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.graph import Flat, Graph

_MOST_GONE = 0.2  # share of the vectors in a graph at which writers make it again
_BATCH = 1_000  # vectors that join a graph while searches wait

CatalogVersion = tuple[int, bytes]
"""Generation of a catalog, and a digest of its documents' contents (`Catalog.version`)."""

Rows = NDArray[np.int64]
Marks = NDArray[np.uint64]
Vectors = NDArray[np.float32]


class VectorIndex:
    """The vectors of one generation of the catalog. Safe to use from several threads.

    Parameters
    ----------
    version
        The catalog's version that they belong to.
    rows, marks
        Row and mark (`kvrag.ingest.rows.vector_mark`) of each vector's chunk ``[n]``.
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
        version: CatalogVersion,
        rows: Rows,
        marks: Marks,
        body: Flat,
        is_gone: NDArray[np.bool_] | None = None,
    ) -> None:
        self.version = version
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
        return cls(read.version, read.rows, read.marks, Flat(read.vectors))

    @property
    def generation(self) -> int:
        """The generation of the catalog that the vectors belong to."""
        return self.version[0]

    @property
    def size_bytes(self) -> int:
        """Memory of the vectors, their rows, and the graph's links."""
        return self.body.size_bytes + vectorheader.ROW_BYTES * len(self.rows)

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
            return VectorIndex(read.version, rows, marks, body)
        self._drop(self.body, ~stays & ~self.is_gone)
        self._join(self.body, read.rows, read.marks, read.vectors)
        self.version = read.version
        return self

    def tidied(self, catalog: Catalog) -> VectorIndex:
        """Return the vectors as a graph if they are many, and without removed ones if those are."""
        body = self.body
        if len(self.rows) - self.num_gone <= vectorheader.GRAPH_FROM:
            return self if not isinstance(body, Graph) else VectorIndex.read(catalog, body.dim)
        if isinstance(body, Graph) and self.num_gone <= _MOST_GONE * len(self.rows):
            return self
        places = np.flatnonzero(~self.is_gone)
        graph = Graph(body.dim)
        for first in range(0, len(places), _BATCH):
            graph.add(body.vectors_at(places[first : first + _BATCH]))
        return VectorIndex(self.version, self.rows[places], self.marks[places], graph)

    # -- private -----------------------------------------------------------------------------

    def _nearest(
        self, vector: Vectors, count: int, allowed: NDArray[np.bool_], num_allowed: int
    ) -> tuple[Rows, Vectors]:
        if isinstance(self.body, Graph) and num_allowed > vectorheader.GRAPH_FROM:
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
