"""What the cache of an index's vectors says of itself, without the vectors."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrag.ingest.config import VECTORS_NAME
from kvrag.regularfile import open_regular

GRAPH_FROM = 50_000
"""With more vectors than this, a graph finds the nearest ones."""

MAGIC = b"KVRAGVEC"
VERSION = 3
HEADER = struct.Struct("<8sIIQQQq16s16s")
"""Magic, version, dim, is a graph, count, memory, generation, documents, seal."""


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
    """

    num_vectors: int = 0
    memory_bytes: int = 0
    is_graph: bool = False


def vector_stats(folder: Path) -> VectorStats:
    """Return what the cache in an index's folder says; zeros if there is none."""
    said = read_header(folder / VECTORS_NAME)
    return VectorStats() if said is None else VectorStats(said[4], said[5], bool(said[3]))


def read_header(path: Path) -> list[Any] | None:
    """Return the fields of a cache's header; None if there is none of this version."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        content = file.read(HEADER.size)
        if len(content) == HEADER.size:
            said = list(HEADER.unpack(content))
            return said if said[:2] == [MAGIC, VERSION] else None
    return None
