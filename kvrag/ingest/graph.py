"""A graph of neighbouring vectors: finds the nearest of very many without comparing all.

Source: hierarchical navigable small worlds (Malkov and Yashunin, "Efficient and robust approximate
nearest neighbor search using hierarchical navigable small world graphs", 2018), by FAISS. The
vectors are kept in 16 bits a value.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
