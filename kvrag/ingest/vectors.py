"""Nearest chunks by inner product: the vectors of a catalog, compared all or by a graph.

Above `GRAPH_FROM` vectors, writers make a graph (`kvrag.ingest.graph`). New vectors join it, and
those of removed chunks are left out of what it finds, so that no change makes it again.

A cache on disk saves reading every row of the catalog when an index is opened, and making the
graph. It is never trusted: one with another length or seal is made again, one of other contents of
the catalog is brought up to date. An encrypted catalog has none, and no graph.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag.errors import IndexMismatchError, StoreError
from kvrag.ingest import vectorheader
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import VECTORS_NAME, write_atomically
from kvrag.ingest.graph import Flat, Graph
from kvrag.ingest.vectorheader import HEADER, MAGIC, VERSION
from kvrag.regularfile import open_regular

logger = logging.getLogger("kvrag")

_MOST_GONE = 0.2  # share of the vectors in a graph at which writers make it again
_BATCH = 1_000  # vectors that join a graph while searches wait

Rows = NDArray[np.int64]
Marks = NDArray[np.uint64]
Vectors = NDArray[np.float32]


class VectorIndex:
    """The vectors of one state of the catalog. Safe to use from several threads.

    Parameters
    ----------
    of
        The digest of the catalog's contents that they belong to (`Catalog.version`).
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
            return VectorIndex(read.of, rows, marks, body)
        self._drop(self.body, ~stays & ~self.is_gone)
        self._join(self.body, read.rows, read.marks, read.vectors)
        self.of = read.of
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
        return VectorIndex(self.of, self.rows[places], self.marks[places], graph)

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


class CurrentVectors:
    """The vectors of an index, in the current state of its catalog.

    Parameters
    ----------
    folder, catalog, dim
        The index's folder, its catalog, and the length of its vectors.
    """

    def __init__(self, folder: Path, catalog: Catalog, dim: int) -> None:
        self._path = folder / VECTORS_NAME
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
                self._write(tidied)
            self._found = tidied

    def _loaded(self) -> VectorIndex:
        catalog = self._catalog
        if catalog.cipher_key is not None:
            return VectorIndex.read(catalog, self._dim)
        cached = _read(self._path, catalog, self._dim)
        if cached is not None and cached.of == catalog.version()[1]:
            return cached
        num_noted = catalog.num_noted
        found = cached.update(catalog) if cached else VectorIndex.read(catalog, self._dim)
        # Damaged vectors are left out, and counted, each time.
        if catalog.num_noted == num_noted and found.of:
            self._write(found)
        if not isinstance(found.body, Graph) and len(found.rows) > vectorheader.GRAPH_FROM:
            logger.info("%s: no graph of its vectors yet; 'kvrag gc' makes it", self._path.parent)
        return found

    def _write(self, found: VectorIndex) -> None:
        with contextlib.suppress(StoreError):
            _write(self._path, self._catalog, found)


def _write(path: Path, catalog: Catalog, found: VectorIndex) -> None:
    # Rows of removed chunks are written as their complements.
    rows = np.where(found.is_gone, ~found.rows, found.rows).astype("<i8").tobytes()
    rows += found.marks.astype("<u8").tobytes()
    is_graph = isinstance(found.body, Graph)
    body = found.body.to_bytes()
    said = (
        MAGIC,
        VERSION,
        found.body.dim,
        is_graph,
        len(found.rows),
        found.size_bytes,
        0,
        found.of,
    )
    digest = _digest(rows, body)
    write_atomically(path, HEADER.pack(*said, digest, _seal(catalog, said, digest)), rows, body)


def _read(path: Path, catalog: Catalog, dim: int) -> VectorIndex | None:
    try:
        with open_regular(path) as file:
            content = memoryview(file.read())
    except OSError:
        return None
    if len(content) < HEADER.size:
        return None
    *said, digest, seal = HEADER.unpack_from(content)
    magic, version, found_dim, is_graph, count, _, _, of = said
    rows, body = content[HEADER.size :][: 16 * count], content[HEADER.size + 16 * count :]
    if (
        (magic, version, found_dim) != (MAGIC, VERSION, dim)
        or len(rows) != 16 * count
        or (not is_graph and len(body) != 4 * dim * count)
        or _seal(catalog, said, digest) != seal
        or _digest(rows, body) != digest
    ):
        return None
    numbers = np.frombuffer(rows[: 8 * count], "<i8").astype(np.int64)
    marks = np.frombuffer(rows[8 * count :], "<u8").astype(np.uint64)
    is_gone = numbers < 0
    numbers = np.where(is_gone, ~numbers, numbers)
    if is_graph:
        return VectorIndex(of, numbers, marks, Graph.from_bytes(body), is_gone)
    flat = Flat(np.frombuffer(body, "<f4").astype(np.float32).reshape(count, dim))
    return VectorIndex(of, numbers, marks, flat, is_gone)


def _seal(catalog: Catalog, said: Sequence[Any], digest: bytes) -> bytes:
    return catalog.checksum(HEADER.pack(*said, digest, b""))


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
