"""The catalog's tables, and the checksums of their rows.

Every row that answers depend on carries a checksum, in its column ``seal``, which is compared
whenever the row is read. A document's row has the checksum of its chunks' checksums, so that a
missing chunk is noticed. The state's row holds the number of documents and files, and the sums of
their checksums.

A checksum finds accidents, and rows of other indexes. It proves nothing about who wrote a row:
``index.json``, beside the catalog, holds all that it depends on. (In an encrypted catalog, the
key authenticates the pages.)

A new column has its place here, in `SCHEMA`, and in the row's type, whose functions
pack and unpack it; it needs a new `SCHEMA_VERSION`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import xxhash

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey, ContextIds
from kvrag.errors import IndexFormatError
from kvrag.ingest.contexts import LEAST_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


KeyOf = Callable[[Chunk], ChunkKey]
"""Returns the name that a chunk's KV must have, the first of several."""


@dataclass(frozen=True)
class FileState:
    """The state of a file when it was last read whole.

    Attributes
    ----------
    digest
        Digest of the file's content.
    size_bytes, mtime_ns, inode, ctime_ns
        The system's values for the file. A process that alters a file can restore its size and
        mtime, but not its ctime. 0 if not recorded, or too recent to distinguish changes.
    """

    path: str
    digest: str
    size_bytes: int
    mtime_ns: int
    inode: int = 0
    ctime_ns: int = 0


class StoredDocument(NamedTuple):
    """A document's row; `chunks` is the checksum of its chunks' (`joined`), in order."""

    source: str
    file: str | None
    digest: str
    metadata: str
    num_chunks: int
    chunks: bytes


class PackedChunk(NamedTuple):
    """A chunk as the values of its row, in the order of its checksum."""

    row: int
    chunk_id: str
    source: str
    ordinal: int
    text: str
    token_ids: bytes
    token_starts: bytes
    num_tokens: int
    metadata: str
    contexts: bytes


@dataclass(frozen=True)
class DocumentRow:
    """One indexed document.

    Attributes
    ----------
    source
        Its absolute path (``path#row`` for rows of a table) or its given id.
    file
        The path of the file that it was read from; None if it was given.
    num_chunks, num_tokens
        Number of its chunks, and of their tokens.
    size_bytes
        Size of its KV, uncompressed, without what prompts have made
        (`kvrag.ingest.on_demand`). Documents that share chunks share records.
    metadata
        The document's metadata as plain JSON values.
    """

    source: str
    file: str | None
    num_chunks: int
    num_tokens: int
    size_bytes: int
    metadata: Mapping[str, Any]

    @property
    def whole(self) -> str:
        """What it is a part of: its file, or for a given document the id before the last ``#``.

        A file's own name may have a ``#``, so the name of a document does not tell its file.
        """
        return self.file or self.source.rpartition("#")[0] or self.source


@dataclass(frozen=True)
class ChunkRow:
    """A chunk to write, with the names of its KV and its vectors ``[num_windows, dim]``.

    Attributes
    ----------
    keys
        The names of its KV, one for each of its contexts.
    """

    chunk: Chunk
    keys: Sequence[ChunkKey]
    embedding: NDArray[np.float32]


@dataclass(frozen=True)
class VectorRows:
    """Vectors as they were read from the catalog.

    Attributes
    ----------
    of
        The digest of the catalog's contents then.
    present
        Marks of all chunks ``[m]``; empty if all vectors were wanted.
    rows, marks
        Row number and mark (`vector_mark`) of each vector's chunk ``[n]``. A chunk has as many
        vectors as its text had windows.
    vectors
        ``[n, dim]``.
    """

    of: bytes
    present: NDArray[np.uint64]
    rows: NDArray[np.int64]
    marks: NDArray[np.uint64]
    vectors: NDArray[np.float32]


@dataclass(frozen=True)
class StoredChunk:
    """What a chunk's row holds, sound or not.

    Attributes
    ----------
    packed, keys
        As they are stored, of any type; `keys` are the names of its KV.
    chunk
        The chunk; None if the row is damaged.
    checksums
        What it contributes to its document's checksum, without the names of its KV.
    embedding
        Its vectors as bytes; None if they are damaged.
    """

    packed: PackedChunk
    keys: Any
    chunk: Chunk | None
    checksums: bytes
    embedding: bytes | None


@dataclass
class Change:
    """The writes of one transaction, in this order.

    Attributes
    ----------
    remove_chunks
        Ids of single chunks to remove. Documents that lose their last chunk go too. Not together
        with other writes.
    forget_files, put_files
        Files whose state is removed, and files whose state is written.
    remove
        Sources of documents to remove with their chunks.
    encode
        Other contexts of chunks, by id; a chunk that is gone stays so.
    after
        With context ``similar``, the chunks that precede each chunk of `put` and `encode`. A
        chunk gets no context if one of them is gone.
    put
        ``(source, file, digest, metadata, rows)`` for each document to write; it replaces the
        document with the same source.
    """

    forget_files: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    put: list[tuple[str, str | None, str, Mapping[str, Any], list[ChunkRow]]] = field(
        default_factory=list
    )
    put_files: list[FileState] = field(default_factory=list)
    remove_chunks: list[str] = field(default_factory=list)
    encode: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())


def vector_mark(row: int, chunk_id: object) -> int:
    """Return 64 bits that tell which text a row holds: a catalog put back may use rows again."""
    said = f"{row} {chunk_id}".encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(said)


def pack_ids(values: Sequence[int]) -> bytes:
    """Return token ids or offsets in a row's format."""
    return _little_endian(array("i", values)).tobytes()


FORGOTTEN = bytes(4)
"""A row's context of a chunk whose former one was deleted: a list of one empty context, where that
of a chunk that never had another is no list at all (`pack_contexts`). Both are read alike."""


def pack_contexts(contexts: Sequence[Sequence[int]]) -> bytes:
    """Return a chunk's contexts in a row's format, each after its length; usually empty."""
    if not any(contexts):
        return b""
    return b"".join(pack_ids((len(ids), *ids)) for ids in contexts)


class Heads:
    """Finds what was encoded after some texts.

    Parameters
    ----------
    texts
        Token ids of chunks, packed (`pack_ids`).
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        size = 4 * LEAST_TOKENS
        import numpy as np

        found = (one[:size] for one in texts if isinstance(one, bytes))  # damaged rows have others
        self._heads = {one for one in found if len(one) == size}
        first = [int.from_bytes(one[:8], "little") for one in self._heads]
        self._first = np.array(first, np.int64)

    def are_in(self, contexts: object) -> bool:
        """Return whether one of them, or the beginning of one, is in packed contexts."""
        import numpy as np

        if not self._heads or not isinstance(contexts, bytes):
            return False
        ids = np.frombuffer(contexts, "<i4", len(contexts) // 4).astype(np.int64)
        pairs = ids[:-1] | ids[1:] << 32
        starts = 4 * np.flatnonzero(np.isin(pairs, self._first))
        return any(contexts[at : at + 4 * LEAST_TOKENS] in self._heads for at in starts.tolist())


class Texts:
    """Says whether what chunks were encoded after (context ``similar``) is of known texts.

    Parameters
    ----------
    texts
        Token ids of chunks.
    separator
        Tokens after each of them.
    """

    def __init__(self, texts: Iterable[tuple[int, ...]], separator: tuple[int, ...]) -> None:
        self._separator = separator
        self._texts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for one in texts:
            self._texts.setdefault(one[:LEAST_TOKENS], []).append(one)

    def are_all_of(self, context: tuple[int, ...]) -> bool:
        """Return whether a context is put together from them; if in doubt, False."""
        at = 0
        while at < len(context):
            texts = self._texts.get(context[at : at + LEAST_TOKENS], [])
            ends = [
                end
                for one in texts
                if context[(end := at + self._num_equal(one, context[at:])) :][
                    : len(self._separator)
                ]
                == self._separator
                and (at == 0 or end == at + len(one))  # the first one alone may be cut
            ]
            if not ends:
                return False
            at = max(ends) + len(self._separator)
        return at == len(context)

    @staticmethod
    def _num_equal(text: tuple[int, ...], others: tuple[int, ...]) -> int:
        pairs = enumerate(zip(text, others, strict=False))
        different = (number for number, (one, other) in pairs if one != other)
        return next(different, min(len(text), len(others)))


def pack_json(values: Mapping[str, Any]) -> str:
    """Return metadata in a row's format."""
    return json.dumps(dict(values), ensure_ascii=False, allow_nan=False)


def unpack_json(text: Any) -> dict[str, Any]:
    """Return metadata from a row. Raises ValueError or TypeError if it is invalid."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"metadata is a {type(values).__name__}")
    return values


def pack_chunk(row: int, chunk: Chunk) -> PackedChunk:
    """Return a chunk as the values of its row."""
    return PackedChunk(
        row,
        chunk.chunk_id,
        chunk.source,
        chunk.ordinal,
        chunk.text,
        pack_ids(chunk.token_ids),
        pack_ids(chunk.token_starts),
        len(chunk.token_ids),
        pack_json(chunk.metadata),
        pack_contexts(chunk.contexts),
    )


def unpack_chunk(packed: PackedChunk) -> Chunk:
    """Return the chunk of a row.

    Raises
    ------
    ValueError, TypeError
        When the row differs from what was written.
    """
    text, source, ordinal = packed.text, packed.source, packed.ordinal
    ids, starts = tuple(_unpack_ids(packed.token_ids)), tuple(_unpack_ids(packed.token_starts))
    if not (isinstance(text, str) and isinstance(source, str) and isinstance(ordinal, int)):
        raise TypeError("text, source or place is of another type")
    if not 0 < len(ids) == len(starts):
        raise ValueError(f"{len(ids)} tokens with {len(starts)} offsets")
    if min(ids) < 0 or min(starts) < 0 or max(starts) > len(text):
        raise ValueError("a token or its offset is out of range")
    return Chunk(
        packed.chunk_id,
        text,
        ids,
        starts,
        source,
        ordinal,
        unpack_json(packed.metadata),
        _unpack_contexts(packed.contexts),
    )


def _unpack_ids(packed: bytes) -> list[int]:
    values = array("i")
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unpack_contexts(packed: bytes) -> tuple[tuple[int, ...], ...]:
    values = _unpack_ids(packed)
    if not values:
        return ((),)
    if min(values) < 0:
        raise ValueError("a context's token or length is below 0")
    contexts = []
    place = 0
    while place < len(values):
        end = place + 1 + values[place]
        if end > len(values):
            raise ValueError(f"a context of {values[place]} tokens has {len(values) - place - 1}")
        contexts.append(ContextIds(values[place + 1 : end]))
        place = end
    return tuple(contexts)


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
