"""The vectors of an index: held for its searches, with a cache on disk.

The cache saves reading every row of the catalog when an index is opened, and making the graph. It
is never trusted: a cache with another length or seal is made again, one of an earlier version of
the catalog is brought up to date. An encrypted catalog has none, and no graph.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from kvrag.ingest.graph import Flat, Graph
from kvrag.ingest.schema import NO_GENERATION
from kvrag.ingest.vectorheader import HEADER, MAGIC, VERSION
from kvrag.ingest.vectors import CatalogVersion, VectorIndex
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
        # Versions whose vectors are those of the last one.
        self._alike: list[CatalogVersion] = []

    def get(self) -> VectorIndex:
        """Return the vectors; reads the cache or the catalog if necessary.

        Rewrites an invalid cache, if the folder allows it. Makes no graph: that takes a millisecond
        for each vector, which is the writers' to spend (`refresh`).
        """
        with self._refreshing:
            if self._found is None:
                self._found = self._loaded()
            elif self._found.version != self._catalog.version():
                self._found = self._found.update(self._catalog)
            return self._found

    def keep(self, former: CatalogVersion) -> None:
        """Note that since a version of the catalog, only its generation has changed."""
        now = self._catalog.version()
        if now[1] != former[1] or NO_GENERATION in (now[0], former[0]):
            return
        with self._refreshing:
            earlier = self._alike if self._alike[-1:] == [former] else [former]
            self._alike = [*earlier, now]
            if self._found is not None and self._found.version == former:
                self._found.version = now

    def refresh(self, cached: tuple[int, bytes] | None) -> None:
        """Bring a graph and its cache up to date, or make them (`Storage.refresh_vectors`).

        `cached` is the version of the catalog that the cache is from; None if there is none.
        """
        catalog = self._catalog
        num_noted = catalog.num_noted
        present = self.get()
        with self._refreshing:
            tidied = present.tidied(catalog)
            if tidied is present and (cached == catalog.version() or self._taken_over(cached)):
                return
            if catalog.num_noted == num_noted:
                self._write(tidied)
            self._found = tidied

    def _loaded(self) -> VectorIndex:
        catalog = self._catalog
        if catalog.cipher_key is not None:
            return VectorIndex.read(catalog, self._dim)
        cached = _read(self._path, catalog, self._dim)
        if cached is not None and cached.version == catalog.version():
            return cached
        if cached is not None and self._taken_over(cached.version):
            cached.version = catalog.version()
            return cached
        num_noted = catalog.num_noted
        found = cached.update(catalog) if cached else VectorIndex.read(catalog, self._dim)
        # Damaged vectors are left out, and counted, each time.
        if catalog.num_noted == num_noted and found.generation != NO_GENERATION:
            self._write(found)
        if not isinstance(found.body, Graph) and len(found.rows) > vectorheader.GRAPH_FROM:
            logger.info("%s: no graph of its vectors yet; 'kvrag gc' makes it", self._path.parent)
        return found

    def _taken_over(self, former: CatalogVersion | None) -> bool:
        """Stamp a version's cache as that of now if the vectors are the same; return whether so."""
        version = self._catalog.version()
        if self._alike[-1:] != [version] or former not in self._alike:
            return False
        with contextlib.suppress(OSError):
            _stamp(self._path, self._catalog, former, version)
        return True

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
    digest = _digest(rows, body)
    write_atomically(path, HEADER.pack(*said, digest, _seal(catalog, said, digest)), rows, body)


def _stamp(
    path: Path, catalog: Catalog, former: CatalogVersion | None, version: CatalogVersion
) -> None:
    """Write a later version into the header of a sound cache of a former one."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        header = os.pread(descriptor, HEADER.size, 0)
        if len(header) < HEADER.size:
            return
        *said, digest, seal = HEADER.unpack(header)
        # Another process may have replaced the cache.
        if tuple(said[-2:]) == former and seal == _seal(catalog, said, digest):
            said[-2:] = version
            # If only a part of it is written, the seal does not fit: the cache is made again.
            os.pwrite(descriptor, HEADER.pack(*said, digest, _seal(catalog, said, digest)), 0)
    finally:
        os.close(descriptor)


def _read(path: Path, catalog: Catalog, dim: int) -> VectorIndex | None:
    try:
        with open_regular(path) as file:
            content = memoryview(file.read())
    except OSError:
        return None
    if len(content) < HEADER.size:
        return None
    *said, digest, seal = HEADER.unpack_from(content)
    magic, version, found_dim, is_graph, count, _, *of = said
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
        return VectorIndex((of[0], of[1]), numbers, marks, Graph.from_bytes(body), is_gone)
    flat = Flat(np.frombuffer(body, "<f4").astype(np.float32).reshape(count, dim))
    return VectorIndex((of[0], of[1]), numbers, marks, flat, is_gone)


def _seal(catalog: Catalog, said: Sequence[Any], digest: bytes) -> bytes:
    return catalog.checksum(HEADER.pack(*said, digest, b""))


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
