"""The catalog's tables, and the checksums of their rows.

Every row that answers depend on carries a checksum, in its column ``seal``, which is compared
whenever the row is read. A document's row has the checksum of its chunks' checksums, so that a
missing chunk is noticed. The state's row holds the number of documents and files, and the sums of
their checksums.

A checksum finds accidents, and rows of other indexes. It proves nothing about who wrote a row:
``index.json``, beside the catalog, holds all that it depends on. (In an encrypted catalog, the
key authenticates the pages.)

A new column has its place here, in `SCHEMA`, and in the row's type in `kvrag.ingest.rows`, whose
functions pack and unpack it; it needs a new `SCHEMA_VERSION`.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.errors import IndexFormatError
from kvrag.ingest.rows import FileState, PackedChunk, StoredDocument, unpack_chunk

FILE_NAME = "catalog.sqlite"
SCHEMA_VERSION = 3
APPLICATION_ID = 0x6B765247  # "kvRG"
NO_GENERATION = -1

CHECKSUM_BYTES = 16
_MAX_SUM = 1 << (8 * CHECKSUM_BYTES)

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
NAMES = re.findall(r"CREATE (?:TABLE|INDEX) (\w+)", SCHEMA)

# What each checksum covers, in the order of the row as it is read.
_COVERED = {
    "state": ("generation", "num_documents", "documents", "num_files", "files"),
    "file": tuple(one.name for one in fields(FileState)),
    "document": StoredDocument._fields,
    "chunk": PackedChunk._fields,
    "vector": ("row", "chunk_id", "embedding"),
}
# Integers, texts, bytes, and whether a value may be missing.
_KINDS: dict[str, tuple[str, bool]] = {
    name: (kind, not must)
    for name, kind, must in re.findall(
        r"^    (\w+) (INTEGER|TEXT|BLOB)( NOT NULL| PRIMARY KEY)?", SCHEMA, re.MULTILINE
    )
}
STATE_COLUMNS, FILE_COLUMNS, DOCUMENT_COLUMNS, CHUNK_COLUMNS = (
    ", ".join([*_COVERED[name], "seal"]) for name in ("state", "file", "document", "chunk")
)
VECTOR_COLUMNS = ", ".join([*_COVERED["vector"], "vector_seal"])
# The names of a chunk's KV, in the order of its contexts; the chunk's own row holds the first.
KEYS = (
    "kv_key || COALESCE((SELECT group_concat(' ' || kv_key, '') FROM (SELECT kv_key FROM "
    "other_keys WHERE other_keys.row = chunks.row ORDER BY place)), '')"
)
ALL_CHUNK_COLUMNS = f"{CHUNK_COLUMNS}, {KEYS}, embedding, vector_seal"
# Reads of no row that need all columns.
NO_ROWS = (
    f"SELECT {ALL_CHUNK_COLUMNS} FROM chunks LIMIT 0",
    f"SELECT {DOCUMENT_COLUMNS} FROM documents LIMIT 0",
    f"SELECT {FILE_COLUMNS} FROM files LIMIT 0",
    "SELECT row, place, kv_key FROM other_keys LIMIT 0",
    f"SELECT {STATE_COLUMNS} FROM state LIMIT 0",
)
# A chunk's number of tokens, 0 if it is not that of its token ids: it may be any value.
NUM_TOKENS = (
    "(CASE WHEN typeof(token_ids) = 'blob' AND typeof(num_tokens) = 'integer' "
    "AND LENGTH(token_ids) = 4 * num_tokens THEN num_tokens ELSE 0 END)"
)
# The errors for a row with a value of another type; such a row is damaged.
_NO_VALUES = (AttributeError, TypeError, ValueError, struct.error)


def checksum_key(tenant_salt: bytes, index_id: str = "") -> bytes:
    """Return what an index's checksums begin with: rows of another index have other ones."""
    said = index_id.encode()
    return hashlib.blake2b(said, key=tenant_salt, person=b"kvrag seals", digest_size=32).digest()


class Checksums:
    """Makes and compares the checksums of one index: BLAKE2b of 16 bytes, another for each table.

    Parameters
    ----------
    key
        What they begin with (`checksum_key`).
    """

    def __init__(self, key: bytes) -> None:
        self._started = {
            name: hashlib.blake2b(
                digest_size=CHECKSUM_BYTES, key=key, person=b"kvrag " + name.encode()
            )
            for name in (*_COVERED, "whole", "words")
        }
        self._kinds = {
            name: [_KINDS[column] for column in covered] for name, covered in _COVERED.items()
        }

    def of(self, name: str, values: Sequence[Any]) -> bytes:
        """Return the checksum of a row: ``state``, ``file``, ``document``, ``chunk``, ``vector``.

        The values are those that the checksum covers, in order. Raises an error of their types.
        """
        numbers, is_there, texts, contents = [], [], [], []
        for (kind, may_lack), value in zip(self._kinds[name], values, strict=True):
            if kind == "INTEGER":
                numbers.append(value)
            elif kind == "BLOB":
                contents.append(value)
            else:
                if may_lack:
                    is_there.append(value is not None)
                    value = "" if value is None else value
                texts.append(str.encode(value))
        # Each kind in the row's order.
        parts = [*texts, *contents]
        numbers += [*is_there, *map(len, parts)]
        return self._digest(name, struct.pack(f"<{len(numbers)}q", *numbers), b"".join(parts))

    def is_right(self, name: str, row: Sequence[Any]) -> bool:
        """Return whether a row, whose last value is its checksum, is what was written."""
        try:
            return bool(row[-1] == self.of(name, row[:-1]))
        except _NO_VALUES:
            return False

    def whole(self, parts: Iterable[bytes], name: str = "whole") -> bytes:
        """Return the checksum of a sequence of bytes; ``words`` has others than ``whole``."""
        parts = list(parts)
        lengths = list(map(len, parts)) * 2  # as they were first written
        return self._digest(name, struct.pack(f"<{len(lengths)}q", *lengths), b"".join(parts))

    def _digest(self, name: str, numbers: bytes, content: bytes) -> bytes:
        digest = self._started[name].copy()
        # The lengths come first, so that no two rows flatten to the same bytes.
        digest.update(numbers)
        digest.update(content)
        return bytes(digest.digest())


@dataclass
class State:
    """The content of the state's row.

    Attributes
    ----------
    generation
        Number of transactions that have changed the catalog.
    num_documents, documents, num_files, files
        Number of rows in each table, and the sums of their checksums.
    """

    generation: int
    num_documents: int = 0
    documents: int = 0
    num_files: int = 0
    files: int = 0

    def count_document(self, checksum: object, by: int) -> None:
        """Add (1) or subtract (-1) a document's row."""
        self.num_documents += by
        self.documents = (self.documents + by * _number(checksum)) % _MAX_SUM

    def count_file(self, checksum: object, by: int) -> None:
        """Add (1) or subtract (-1) a file's row."""
        self.num_files += by
        self.files = (self.files + by * _number(checksum)) % _MAX_SUM

    def tell_gone(self, checksum: object) -> None:
        """Change the documents' sum, which damage made wrong, so that caches leave out a chunk."""
        self.documents = (self.documents + _number(checksum)) % _MAX_SUM

    @property
    def version(self) -> tuple[int, bytes]:
        """The generation, and a digest of the documents' contents."""
        return self.generation, self.documents.to_bytes(CHECKSUM_BYTES, "little")

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> State:
        """Return the state that a sound row holds."""
        generation, num_documents, documents, num_files, files = row[:5]
        return cls(generation, num_documents, _number(documents), num_files, _number(files))

    def write(self, connection: sqlite3.Connection, checksums: Checksums) -> None:
        """Write the state's row."""
        generation, documents = self.version
        files = self.files.to_bytes(CHECKSUM_BYTES, "little")
        values = (generation, self.num_documents, documents, self.num_files, files)
        connection.execute("DELETE FROM state")
        connection.execute(
            "INSERT INTO state VALUES (?, ?, ?, ?, ?, ?)", (*values, checksums.of("state", values))
        )


def _number(checksum: object) -> int:
    """Return a checksum as the number that the state sums; 0 if it is none."""
    is_one = isinstance(checksum, bytes) and len(checksum) == CHECKSUM_BYTES
    return int.from_bytes(cast("bytes", checksum), "little") if is_one else 0


def joined(checksum: object, vector_checksum: object, keys: object) -> bytes:
    """Return a chunk's contribution to the checksum in its document's row."""
    parts = (checksum, vector_checksum, keys.encode() if isinstance(keys, str) else keys)
    return b"".join(one for one in parts if isinstance(one, bytes))


def sound_chunk(row: Sequence[Any], checksums: Checksums, path: Path) -> Chunk:
    """Return the chunk of a row (`CHUNK_COLUMNS`). Raises IndexFormatError, which names `path`."""
    packed = PackedChunk(*row[:-1])
    place = f"chunk {shown(packed.chunk_id)} of {shown(packed.source)}"
    if not checksums.is_right("chunk", row):
        raise damaged(path, f"{place} is not what was written")
    try:
        return unpack_chunk(packed)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"{place}: {error}") from error


def damaged(path: Path, what: str) -> IndexFormatError:
    """Return the error for a row of the catalog that is not what was written."""
    return IndexFormatError(
        f"{path} is damaged ({what}); run 'kvrag verify --repair', or ingest its document again"
    )
