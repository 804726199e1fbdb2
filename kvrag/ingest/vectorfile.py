"""The vectors of an index: held for its searches, with a cache on disk.

The cache saves reading every row of the catalog when an index is opened, and making the graph. It
is never trusted: a cache with another length or seal is made again, one of an earlier version of
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

from kvrag.errors import StoreError
from kvrag.ingest import vectorheader
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import VECTORS_NAME, write_atomically
from kvrag.ingest.graph import Graph
from kvrag.ingest.schema import NO_GENERATION
from kvrag.ingest.vectorheader import HEADER, MAGIC, VERSION
from kvrag.ingest.vectors import Flat, VectorIndex
from kvrag.regularfile import open_regular

logger = logging.getLogger("kvrag")


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

    def get(self) -> VectorIndex:
        """Return the vectors; reads the cache or the catalog if necessary.

        Rewrites an invalid cache, if the folder allows it. Makes no graph: that takes a millisecond
        for each vector, which is the writers' to spend (`refresh`).
        """
        with self._refreshing:
            if self._found is None:
                self._found = self._loaded()
            elif self._found.generation != self._catalog.generation():
                self._found = self._found.update(self._catalog)
            return self._found

    def refresh(self, cached: tuple[int, bytes] | None) -> None:
        """Bring a graph and its cache up to date, or make them (`Storage.refresh_vectors`).

        `cached` is the version of the catalog that the cache is from; None if there is none.
        """
        catalog = self._catalog
        num_noted = catalog.num_noted
        present = self.get()
        with self._refreshing:
            tidied = present.tidied(catalog)
            if tidied is present and cached == catalog.version():
                return
            if catalog.num_noted == num_noted:
                self._write(tidied)
            self._found = tidied

    def _loaded(self) -> VectorIndex:
        catalog = self._catalog
        if catalog.is_encrypted:
            return VectorIndex.read(catalog, self._dim)
        cached = _read(self._path, catalog, self._dim)
        if cached is not None and cached.version == catalog.version():
            return cached
        num_noted = catalog.num_noted
        found = cached.update(catalog) if cached else VectorIndex.read(catalog, self._dim)
        # Damaged vectors are left out, and counted, each time.
        if catalog.num_noted == num_noted and found.generation != NO_GENERATION:
            self._write(found)
        if isinstance(found.body, Flat) and len(found.rows) > vectorheader.GRAPH_FROM:
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
        *found.version,
    )
    write_atomically(path, HEADER.pack(*said, _seal(catalog, said, rows, body)), rows, body)


def _read(path: Path, catalog: Catalog, dim: int) -> VectorIndex | None:
    try:
        with open_regular(path) as file:
            content = memoryview(file.read())
    except OSError:
        return None
    if len(content) < HEADER.size:
        return None
    *said, seal = HEADER.unpack_from(content)
    magic, version, found_dim, is_graph, count, _, *of = said
    rows, body = content[HEADER.size :][: 16 * count], content[HEADER.size + 16 * count :]
    if (
        (magic, version, found_dim) != (MAGIC, VERSION, dim)
        or len(rows) != 16 * count
        or (not is_graph and len(body) != 4 * dim * count)
        or _seal(catalog, said, rows, body) != seal
    ):
        return None
    numbers = np.frombuffer(rows[: 8 * count], "<i8").astype(np.int64)
    marks = np.frombuffer(rows[8 * count :], "<u8").astype(np.uint64)
    is_gone = numbers < 0
    numbers = np.where(is_gone, ~numbers, numbers)
    if is_graph:
        return VectorIndex((of[0], of[1]), numbers, marks, Graph.from_bytes(body), is_gone)
    flat = Flat(np.frombuffer(body, "<f4").astype(np.float32).reshape(count, dim))
    return VectorIndex((of[0], of[1]), numbers, marks, flat, is_gone)


def _seal(catalog: Catalog, said: Sequence[Any], *parts: bytes | memoryview) -> bytes:
    """Return the catalog's seal of a cache, which covers a faster digest of the vectors."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return catalog.seal(HEADER.pack(*said, digest.digest()))
