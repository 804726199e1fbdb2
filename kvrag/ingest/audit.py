"""What the check of the catalog against its seals found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrag.chunk import ChunkKey


@dataclass
class Audit:
    """What is wrong with a catalog, row by row.

    Attributes
    ----------
    num_chunks
        Number of chunks, damaged ones included.
    num_documents
        Number of documents, damaged ones included.
    needed
        Names of the sound chunks' KV, each with its number of tokens.
    optional
        The same for their optional records (`Chunk.is_optional`), which the store may lack.
    structure
        What SQLite's own check (`damage`) found.
    chunks, vectors, names
        What is wrong with a chunk, its vector, or the names of its KV, by row number.
    documents
        What is wrong with a document's row, or which of its chunks are missing, by source.
    files
        What is wrong with a file's row, by path.
    others
        What is wrong with the state row, or with its record of the tables.
    """

    num_chunks: int = 0
    num_documents: int = 0
    needed: dict[ChunkKey, int] = field(default_factory=dict)
    optional: dict[ChunkKey, int] = field(default_factory=dict)
    structure: list[str] = field(default_factory=list)
    chunks: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return every problem as a line of text."""
        by_name = (self.chunks, self.vectors, self.names, self.documents, self.files)
        return [*self.structure, *self.others, *(text for one in by_name for text in one.values())]
