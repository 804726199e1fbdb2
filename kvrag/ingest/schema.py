"""The catalog's tables and the meaning of their rows.

Every row that answers depend on carries a seal (`kvrag.ingest.seals`), which is checked whenever
the row is read. A document's row seals the seals of its chunks, so that a missing chunk is noticed.
The state's row holds the number of documents and files, and the sums of their seals.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvrag.ingest.seals import SEAL_BYTES, Seals

FILE_NAME = "catalog.sqlite"
SCHEMA_VERSION = 3
APPLICATION_ID = 0x6B765247  # "kvRG"
NO_GENERATION = -1

_MAX_SUM = 1 << (8 * SEAL_BYTES)

SCHEMA = """
CREATE TABLE state (
    generation INTEGER NOT NULL,
    num_documents INTEGER NOT NULL,
    documents BLOB NOT NULL,
    num_files INTEGER NOT NULL,
    files BLOB NOT NULL,
    seal BLOB NOT NULL
);
CREATE TABLE files (
    path TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    seal BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE documents (
    source TEXT PRIMARY KEY,
    file TEXT,
    digest TEXT NOT NULL,
    metadata TEXT NOT NULL,
    num_chunks INTEGER NOT NULL,
    chunks BLOB NOT NULL,
    seal BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX documents_by_file ON documents (file);
CREATE TABLE chunks (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk_id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL REFERENCES documents (source) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    token_starts BLOB NOT NULL,
    num_tokens INTEGER NOT NULL,
    kv_key TEXT NOT NULL,
    embedding BLOB NOT NULL,
    metadata TEXT NOT NULL,
    contexts BLOB NOT NULL,
    seal BLOB NOT NULL,
    vector_seal BLOB NOT NULL
);
CREATE TABLE other_keys (
    row INTEGER NOT NULL REFERENCES chunks (row) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    kv_key TEXT NOT NULL,
    PRIMARY KEY (row, place)
) WITHOUT ROWID;
CREATE INDEX other_keys_by_key ON other_keys (kv_key);
CREATE INDEX chunks_by_source ON chunks (source, ordinal);
CREATE INDEX chunks_by_key ON chunks (kv_key);
"""

FILE_COLUMNS = "path, digest, size_bytes, mtime_ns, inode, ctime_ns, seal"
DOCUMENT_COLUMNS = "source, file, digest, metadata, num_chunks, chunks, seal"
CHUNK_COLUMNS = (
    "row, chunk_id, source, ordinal, text, token_ids, token_starts, num_tokens, metadata, "
    "contexts, seal"
)
VECTOR_COLUMNS = "row, chunk_id, embedding, vector_seal"
# The names of a chunk's KV, in the order of its contexts; the chunk's own row holds the first.
KEYS = (
    "kv_key || COALESCE((SELECT group_concat(' ' || kv_key, '') FROM (SELECT kv_key FROM "
    "other_keys WHERE other_keys.row = chunks.row ORDER BY place)), '')"
)


class StoredDocument(NamedTuple):
    """A document's row; `chunks` seals its chunks' seals and names of KV, in order."""

    source: str
    file: str | None
    digest: str
    metadata: str
    num_chunks: int
    chunks: bytes


@dataclass
class State:
    """The content of the state's row.

    Attributes
    ----------
    generation
        Number of transactions that have changed the catalog.
    num_documents, documents, num_files, files
        Number of rows in each table, and the sums of their seals.
    """

    generation: int
    num_documents: int = 0
    documents: int = 0
    num_files: int = 0
    files: int = 0

    def count_document(self, seal: object, by: int) -> None:
        """Add (1) or subtract (-1) a document's row."""
        self.num_documents += by
        self.documents = (self.documents + by * seal_number(seal)) % _MAX_SUM

    def count_file(self, seal: object, by: int) -> None:
        """Add (1) or subtract (-1) a file's row."""
        self.num_files += by
        self.files = (self.files + by * seal_number(seal)) % _MAX_SUM


def seal_number(seal: object) -> int:
    """Return a seal as the number that the state sums; 0 if it is not a seal."""
    is_seal = isinstance(seal, bytes) and len(seal) == SEAL_BYTES
    return int.from_bytes(cast("bytes", seal), "little") if is_seal else 0


def joined(seal: object, vector_seal: object, keys: object) -> bytes:
    """Return a chunk's contribution to the seal in its document's row."""
    parts = (seal, vector_seal, keys.encode() if isinstance(keys, str) else keys)
    return b"".join(one for one in parts if isinstance(one, bytes))


def write_state(connection: sqlite3.Connection, seals: Seals, state: State) -> None:
    """Write the state's row."""
    values = (
        state.generation,
        state.num_documents,
        state.documents.to_bytes(SEAL_BYTES, "little"),
        state.num_files,
        state.files.to_bytes(SEAL_BYTES, "little"),
    )
    connection.execute("DELETE FROM state")
    connection.execute(
        "INSERT INTO state VALUES (?, ?, ?, ?, ?, ?)", (*values, seals.state(values))
    )
