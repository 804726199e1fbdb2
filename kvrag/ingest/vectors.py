"""Nearest chunks by inner product: FAISS over the catalog's vectors, with a cache on disk.

The cache saves reading every row of the catalog when an index is opened. It is never trusted: a
cache with another catalog version, length or seal is rebuilt. An encrypted catalog has none.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag.errors import IndexMismatchError, StoreError
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import VECTORS_NAME as FILE_NAME
from kvrag.ingest.config import write_atomically
from kvrag.ingest.schema import NO_GENERATION
from kvrag.regularfile import open_regular

_MAGIC = b"KVRAGVEC"
_HEADER = struct.Struct("<8sIIQq16s16s")  # magic, version, dim, count, generation, documents, seal
_VERSION = 2

CatalogVersion = tuple[int, bytes]
"""Generation of a catalog, and a digest of its documents' contents (`Catalog.version`)."""


class VectorIndex:
    """The vectors of one generation of the catalog.

    Attributes
    ----------
    generation
        The generation of the catalog that they belong to.
    """

    def __init__(
        self, version: CatalogVersion, rows: NDArray[np.int64], vectors: NDArray[np.float32]
    ) -> None:
        self.generation = version[0]
        self._rows = rows
        self._dim = vectors.shape[1]
        self._flat = _import_faiss().IndexFlatIP(self._dim)
        self._most_windows = 0
        if len(rows):
            self._flat.add(vectors)
            self._most_windows = int(np.unique(rows, return_counts=True)[1].max())

    @classmethod
    def load(cls, folder: Path, catalog: Catalog, dim: int) -> VectorIndex:
        """Return the vectors of the current catalog, from the cache if it is valid.

        Rewrites an invalid cache, if the folder allows it.
        """
        if catalog.is_encrypted:
            return cls.refresh(catalog, dim)
        cached = _read(folder / FILE_NAME, catalog, dim)
        if cached is not None:
            return cls(*cached)
        num_noted = catalog.num_noted
        read = catalog.vectors(dim)
        # Damaged vectors are left out, and counted, each time.
        if catalog.num_noted == num_noted and read[0][0] != NO_GENERATION:
            with contextlib.suppress(StoreError):
                _write(folder / FILE_NAME, catalog, *read)
        return cls(*read)

    @classmethod
    def refresh(cls, catalog: Catalog, dim: int) -> VectorIndex:
        """Return the vectors of the current catalog, read from it."""
        return cls(*catalog.vectors(dim))

    def search(self, vector: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        """Return the `k` nearest chunks, best first: row number, inner product of the best vector.

        Parameters
        ----------
        vector
            The vector ``[dim]``; its length only scales the scores.
        """
        vector = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
        if vector.shape[1] != self._dim:
            raise IndexMismatchError(
                f"the index holds vectors of {self._dim} dimensions, the question's has "
                f"{vector.shape[1]}: use the embedding the index was made with"
            )
        # This many vectors belong to at least `k` chunks.
        count = min(k * self._most_windows, len(self._rows))
        if count < 1:
            return []
        scores, places = self._flat.search(vector, count)
        best: dict[int, float] = {}
        for place, score in zip(places[0], scores[0], strict=True):
            if place >= 0:
                best.setdefault(int(self._rows[place]), float(score))
        # Equal scores appear in the order of indexing, on every machine.
        return sorted(best.items(), key=lambda hit: (-hit[1], hit[0]))[:k]


def _import_faiss() -> Any:
    with warnings.catch_warnings():
        # Its SWIG wrapper defines types without __module__, which Python 3.12 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        import faiss

    return faiss


def _write(
    path: Path,
    catalog: Catalog,
    version: CatalogVersion,
    rows: NDArray[np.int64],
    vectors: NDArray[np.float32],
) -> None:
    body = rows.astype("<i8").tobytes() + vectors.astype("<f4").tobytes()
    said = (_MAGIC, _VERSION, vectors.shape[1], len(rows), *version)
    write_atomically(path, _HEADER.pack(*said, _seal(catalog, said, body)) + body)


def _read(
    path: Path, catalog: Catalog, dim: int
) -> tuple[CatalogVersion, NDArray[np.int64], NDArray[np.float32]] | None:
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError:
        return None
    if len(content) < _HEADER.size:
        return None
    *said, seal = _HEADER.unpack_from(content)
    count = said[3]
    version = catalog.version()
    body = memoryview(content)[_HEADER.size :]
    if (
        said != [_MAGIC, _VERSION, dim, count, *version]
        or len(body) != count * (8 + 4 * dim)
        or _seal(catalog, said, body) != seal
    ):
        return None
    rows = np.frombuffer(body[: 8 * count], dtype="<i8").astype(np.int64)
    vectors = np.frombuffer(body[8 * count :], dtype="<f4").astype(np.float32)
    return version, rows, vectors.reshape(count, dim)


def _seal(catalog: Catalog, said: Sequence[Any], body: bytes | memoryview) -> bytes:
    """Return the catalog's seal of a cache, which covers a faster digest of the vectors."""
    return catalog.seal(_HEADER.pack(*said, xxhash.xxh3_128_digest(body)))
