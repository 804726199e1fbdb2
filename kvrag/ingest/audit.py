"""What holding the catalog against its seals brought to light."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrag.chunk import ChunkKey


@dataclass
class Audit:
    """What is wrong with a catalog, row by row.

    Attributes
    ----------
    num_chunks
        There are, with those that are damaged.
    num_documents
        There were.
    needed
        The KV of the sound chunks, with its number of tokens.
    structure
        What SQLite's own check (`damage`) found.
    chunks, vectors, names
        By row number, what is wrong with a chunk, its vector, or the names of its KV.
    documents
        By source, what is wrong with a document's row, or which of its chunks are missing.
    files
        By path, what is wrong with what was noted of a file.
    others
        What is wrong with the state, and with what it says of the tables.
    """

    num_chunks: int = 0
    num_documents: int = 0
    needed: dict[ChunkKey, int] = field(default_factory=dict)
    structure: list[str] = field(default_factory=list)
    chunks: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All of it."""
        by_name = (self.chunks, self.vectors, self.names, self.documents, self.files)
        return [*self.structure, *self.others, *(text for one in by_name for text in one.values())]
