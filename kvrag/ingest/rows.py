"""What the catalog holds and what is written to it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import Chunk, ChunkKey


@dataclass(frozen=True)
class FileState:
    """A file as it was when it was last read whole."""

    path: str
    digest: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class DocumentRow:
    """One indexed document.

    Attributes
    ----------
    source
        Its absolute path (``path#row`` for rows of a table) or the id it was given.
    num_chunks, num_tokens
        How many it was cut into.
    size_bytes
        Uncompressed bytes of its KV. Documents that share chunks share records.
    metadata
        Plain JSON values.
    """

    source: str
    num_chunks: int
    num_tokens: int
    size_bytes: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class ChunkRow:
    """One chunk to be written, with the name of its KV and its vector ``[dim]``."""

    chunk: Chunk
    key: ChunkKey
    embedding: NDArray[np.float32]


@dataclass
class Change:
    """What one transaction writes, in this order.

    Attributes
    ----------
    forget_files, put_files
        Files whose state is no longer, or from now on, known.
    remove
        Sources of documents to remove with their chunks.
    put
        ``(source, file, digest, metadata, rows)`` of documents to write; they replace those of
        the same source.
    """

    forget_files: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    put: list[tuple[str, str | None, str, Mapping[str, Any], list[ChunkRow]]] = field(
        default_factory=list
    )
    put_files: list[FileState] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.forget_files or self.remove or self.put or self.put_files)
