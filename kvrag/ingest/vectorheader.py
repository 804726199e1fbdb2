"""What the cache of an index's vectors says of itself, without the vectors."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path

from kvrag.ingest.config import VECTORS_NAME
from kvrag.regularfile import open_regular

GRAPH_FROM = 50_000
"""With more vectors than this, a graph finds the nearest ones."""

MAGIC = b"KVRAGVEC"
VERSION = 4
HEADER = struct.Struct("<8sIIQQQq16s16s16s")
"""Magic, version, dim, is a graph, count, memory, unused, documents, digest, seal."""

ROW_BYTES = 17
"""Memory of a vector beside its numbers: its row, its mark, and whether it is of a gone chunk."""


@dataclass(frozen=True)
class VectorStats:
    """What the cache of vectors says of itself.

    Attributes
    ----------
    num_vectors
        Number of vectors.
    memory_bytes
        Memory that they take in each process that searches.
    is_graph
        Whether a graph finds the nearest ones, or all are compared.
    of
        The digest of the contents that they are of (`Catalog.version`); None without a cache.
    """

    num_vectors: int = 0
    memory_bytes: int = 0
    is_graph: bool = False
    of: bytes | None = None


def vector_stats(folder: Path) -> VectorStats:
    """Return what the cache in an index's folder says; zeros if there is none of this version."""
    with contextlib.suppress(OSError), open_regular(folder / VECTORS_NAME) as file:
        content = file.read(HEADER.size)
        if len(content) == HEADER.size:
            magic, version, _, is_graph, count, memory, _, of, _, _ = HEADER.unpack(content)
            if (magic, version) == (MAGIC, VERSION):
                return VectorStats(count, memory, bool(is_graph), of)
    return VectorStats()
