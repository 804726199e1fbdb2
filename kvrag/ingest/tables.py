"""The catalog's tables: opening, reading and writing rows that are sealed.

Every row from which an answer is made carries a seal (`kvrag.ingest.seals`) that is compared
whenever the row is read. A document's row seals the seals of its chunks, so that none can go
missing; the state's row has the number of documents and files, and the sum of their seals.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, StoreError
from kvrag.ingest import words
from kvrag.ingest.connection import (
    FileStamp,
    catalog_error,
    connect,
    file_stamp,
    is_damage,
    put_in_place,
)
from kvrag.ingest.rows import ChunkRow, FileState, pack_contexts, pack_ids, pack_json, unpack_chunk
from kvrag.ingest.seals import SEAL_BYTES, Seals
from kvrag.sqlitefile import library, unlock

FILE_NAME = "catalog.sqlite"
SCHEMA_VERSION = 3
APPLICATION_ID = 0x6B765247  # "kvRG"
NO_GENERATION = -1

_LARGEST_ROW = 1 << 52
_BATCH = 500  # below SQLite's limit on parameters of one statement
_MAX_TRIES = 8  # of a read during which somebody else wrote
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
# The names of a chunk's KV, in the order of its contexts; the first stands in its own row.
KEYS = (
    "kv_key || COALESCE((SELECT group_concat(' ' || kv_key, '') FROM (SELECT kv_key FROM "
    "other_keys WHERE other_keys.row = chunks.row ORDER BY place)), '')"
)


# Whether a chunk is found by its id and the names of its KV: indexes may be damaged too.
_IS_FOUND = (
    "(SELECT c.row FROM chunks c INDEXED BY sqlite_autoindex_chunks_1 "
    "WHERE c.chunk_id = chunks.chunk_id) = row "
    "AND EXISTS (SELECT 1 FROM chunks c INDEXED BY chunks_by_key "
    "WHERE c.kv_key = chunks.kv_key AND c.row = chunks.row) "
    "AND NOT EXISTS (SELECT 1 FROM other_keys o WHERE o.row = chunks.row AND NOT EXISTS "
    "(SELECT 1 FROM other_keys p INDEXED BY other_keys_by_key "
    "WHERE p.kv_key = o.kv_key AND p.row = o.row AND p.place = o.place))"
)


class StoredDocument(NamedTuple):
    """A document's row; `chunks` seals the seals and names of KV of its chunks, in order."""

    source: str
    file: str | None
    digest: str
    metadata: str
    num_chunks: int
    chunks: bytes


@dataclass
class State:
    """What the state's row says.

    Attributes
    ----------
    generation
        How many transactions have changed the catalog.
    num_documents, documents, num_files, files
        How many rows there are of each, and the sum of their seals.
    """

    generation: int
    num_documents: int = 0
    documents: int = 0
    num_files: int = 0
    files: int = 0

    def count_document(self, seal: object, by: int) -> None:
        """Count a document's row in (1) or out (-1)."""
        self.num_documents += by
        self.documents = (self.documents + by * _number(seal)) % _MAX_SUM

    def count_file(self, seal: object, by: int) -> None:
        """Count a file's row in (1) or out (-1)."""
        self.num_files += by
        self.files = (self.files + by * _number(seal)) % _MAX_SUM


_NOT_WRITING = State(0)


def _number(seal: object) -> int:
    is_seal = isinstance(seal, bytes) and len(seal) == SEAL_BYTES
    return int.from_bytes(cast("bytes", seal), "little") if is_seal else 0


_T = TypeVar("_T", bound="CatalogTables")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """Hold the connection during a method, keep it up to date, and name SQLite's errors."""

    @functools.wraps(method)
    def call(self: _T, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            try:
                self._reopen_if_changed()
                for _ in range(_MAX_TRIES):
                    try:
                        result = method(self, *args, **kwargs)
                    except (self._sql.Error, IndexFormatError):
                        # What was read may have been half old and half new.
                        if not self._reopen_if_changed():
                            raise
                    else:
                        if not self._reopen_if_changed():
                            return result
            except self._sql.Error as error:
                raise catalog_error(self.path, error) from error
            raise StoreError(f"{self.path} changes faster than it can be read; try again later")

    return cast("Callable[Concatenate[_T, _P], _R]", call)


class CatalogTables:
    """The part of `Catalog` that knows its tables. Safe to use from several threads.

    Attributes
    ----------
    path
        The file.
    on_damage
        Told of every row that is left out because it is not what was written.
    num_noted
        How many it was told of.
    """

    def __init__(
        self, path: Path, *, seal_key: bytes = b"", cipher_key: bytes | None = None
    ) -> None:
        self.path = path
        self.on_damage: Callable[[str], None] = lambda _: None
        self.num_noted = 0
        self._lock = threading.RLock()
        self._seals = Seals(seal_key)
        self._cipher_key = cipher_key
        self._sql = library(cipher_key)
        self._words = self._word_index()
        self._state_now = _NOT_WRITING
        self._connection: sqlite3.Connection
        self._stamp: FileStamp | None
        self._inode: int | None
        if not path.is_file():
            raise IndexFormatError(
                f"{path} is missing: the index is incomplete; ingest its documents again"
            )
        try:
            self._connect()
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        except (self._sql.Error, OSError) as error:
            raise catalog_error(path, error) from error
        self.is_old = (application, version) == (APPLICATION_ID, 2)
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION) and not self.is_old:
            self._connection.close()
            raise IndexFormatError(
                f"{path} is not a catalog of this version of kvrag: expected schema "
                f"{SCHEMA_VERSION}, found application {application:#x} schema {version}; "
                "ingest into a new folder"
            )

    @classmethod
    def create(
        cls: type[_T], path: Path, *, seal_key: bytes = b"", cipher_key: bytes | None = None
    ) -> _T:
        """Make an empty catalog; an unfinished one left by a killed process is replaced."""
        sql = library(cipher_key)
        try:
            for name in (*(path.name + end for end in ("", "-wal", "-shm")), words.FILE_NAME):
                path.with_name(name).unlink(missing_ok=True)
            connection = sql.connect(path, isolation_level=None)
            try:
                unlock(connection, cipher_key)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN;{SCHEMA}COMMIT;")
                write_state(connection, Seals(seal_key), State(0))
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                connection.close()
        except (sql.Error, OSError) as error:
            raise catalog_error(path, error) from error
        return cls(path, seal_key=seal_key, cipher_key=cipher_key)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._words.close()
            self._connection.close()
            self._stamp = None
            self._inode = None

    def _word_index(self) -> words.WordIndex:
        path = self.path.with_name(words.FILE_NAME)
        return words.WordIndex(path, self._seals, self._cipher_key)

    def seal(self, content: bytes) -> bytes:
        """Seal what is kept beside the catalog."""
        return self._seals.whole([content])

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is encrypted."""
        return self._cipher_key is not None

    def _reopen_if_changed(self) -> bool:
        """Open the file again if this connection cannot see what others have written to it."""
        if self._connection.in_transaction:
            return False
        if self._stamp is None:
            # Another file is in its place: somebody has encrypted it.
            with contextlib.suppress(OSError):
                if self._inode not in (None, self.path.stat().st_ino):
                    self._reopen()
                    return True
            return False
        if self._stamp == file_stamp(self.path):
            return False
        self._reopen()
        return True

    def _reopen(self) -> None:
        try:
            self._connect()
        except OSError as error:
            raise catalog_error(self.path, error) from error
        except self._sql.DatabaseError as error:
            if not is_damage(error):
                raise
            raise IndexFormatError(
                f"{self.path} was replaced by another file while it was open (encrypted, perhaps, "
                "or moved to another key); open the index again"
            ) from error

    def _connect(self) -> None:
        """Open the file, and close what was open before: not until then, so as to try again."""
        inode = self.path.stat().st_ino
        former = getattr(self, "_connection", None)
        self._connection, self._stamp = connect(self.path, self._cipher_key)
        self._inode = inode
        if former is not None:
            former.close()

    # -- reading -----------------------------------------------------------------------------

    def _note(self, what: str) -> None:
        self.num_noted += 1
        self.on_damage(f"{self.path}: {what}")

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return rows; none where they cannot be read, which is noted."""
        try:
            return self._connection.execute(statement, values).fetchall()
        except self._sql.DatabaseError as error:
            if self._go_on(error):
                return self._rows(statement, values)
            return []

    def _go_on(self, error: sqlite3.DatabaseError) -> bool:
        """Note an error that tells of damage, and make the connection usable again; raise others.

        After a page that is not authentic SQLCipher refuses all the others. What is no UTF-8 is
        from now on another text instead of an error, and its seal tells: True says to try again.
        """
        if not is_damage(error):
            raise error
        if "Could not decode" in str(error) and self._connection.text_factory is str:
            self._connection.text_factory = _decoded
            return True
        self._note(str(error))
        if self._cipher_key is not None and self._state_now is _NOT_WRITING:
            self._connect()
        return False

    def _select_in(
        self, columns: str, column: str, values: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the chunks' rows that have one of some values; those that can be read."""
        for begin in range(0, len(values), _BATCH):
            batch = values[begin : begin + _BATCH]
            marks = ",".join("?" * len(batch))
            statement = f"SELECT {columns} FROM chunks WHERE {column} IN "
            try:
                yield from self._connection.execute(f"{statement}({marks})", batch).fetchall()
            except self._sql.DatabaseError as error:
                self._go_on(error)
                for value in batch:
                    yield from self._rows(f"{statement}(?)", (value,))

    def _scan(self, columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield all rows of the chunks that can be read, in order; `columns` begin with row."""
        last = -1
        try:
            for values in self._connection.execute(f"SELECT {columns} FROM chunks ORDER BY row"):
                last = values[0]
                yield values
        except self._sql.DatabaseError as error:
            self._go_on(error)
            yield from self._select_in(columns, "row", self._rows_behind(last))

    def _rows_behind(self, last: int) -> Sequence[int]:
        """Return the numbers of the rows behind one from which on the table cannot be walked."""
        found = self._rows(
            "SELECT row FROM chunks INDEXED BY chunks_by_source WHERE row > ? ORDER BY row", (last,)
        )
        if found:
            return [row for (row,) in found]
        highest = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'")
        number = highest[0][0] if highest and isinstance(highest[0][0], int) else 0
        return range(last + 1, min(number, last + 10_000_000) + 1)

    def _is_sound(self, values: Sequence[Any]) -> bool:
        """Say whether a chunk's row (`CHUNK_COLUMNS`) is what was written."""
        return self._seals.is_right(values[10], self._seals.chunk, values[:10])

    def _is_vector_sound(self, values: Sequence[Any]) -> bool:
        """Say whether a chunk's vector (`VECTOR_COLUMNS`) is what was written."""
        return self._seals.is_right(values[3], self._seals.vector, values[:3])

    def _chunk(self, values: Sequence[Any]) -> Chunk:
        """Return the chunk of a row (`CHUNK_COLUMNS`). Raises IndexFormatError."""
        _, chunk_id, source, ordinal, text, ids, starts, _, metadata, contexts, _ = values
        if not self._is_sound(values):
            raise self._damaged(f"chunk {chunk_id!r} of {source!r} is not what was written")
        try:
            return unpack_chunk((chunk_id, text, ids, starts, source, ordinal, metadata, contexts))
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"chunk {chunk_id!r} of {source!r}: {error}") from error

    def _sound_chunk(self, values: Sequence[Any]) -> Chunk | None:
        """Return the chunk of a row; None where it is damaged, which is noted."""
        if self._is_sound(values):
            return self._chunk(values)
        self._note(f"chunk {values[1]!r} of {values[2]!r} is not what was written")
        return None

    def _sound_documents(self, where: str, values: Sequence[Any] = ()) -> list[StoredDocument]:
        """Return the documents whose rows are sound; the others are noted."""
        found = []
        for *row, seal in self._rows(f"SELECT {DOCUMENT_COLUMNS} FROM documents {where}", values):
            if self._seals.is_right(seal, self._seals.document, row):
                found.append(StoredDocument(*row))
            else:
                self._note(f"the entry of document {row[0]!r} is not what was written")
        return found

    def _sound_files(self, where: str, values: Sequence[Any] = ()) -> list[FileState]:
        """Return the states of files whose rows are sound; the others are noted."""
        found = []
        for *row, seal in self._rows(f"SELECT {FILE_COLUMNS} FROM files {where}", values):
            if self._seals.is_right(seal, self._seals.file, row):
                found.append(FileState(*row))
            else:
                self._note(f"the entry of file {row[0]!r} is not what was written")
        return found

    def _is_whole(self, document: StoredDocument) -> bool:
        """Say whether all chunks of a document are there, as they were written."""
        if not self._has_its_chunks(document):
            self._note(f"the chunks of document {document.source!r} are not what was written")
            return False
        return True

    def _has_its_chunks(self, document: StoredDocument) -> bool:
        seals = []
        for values in self._rows(
            f"SELECT {CHUNK_COLUMNS}, embedding, vector_seal, {KEYS}, {_IS_FOUND} FROM chunks "
            # By row, so that what is compared is the table's and not its index's.
            "NOT INDEXED WHERE row IN (SELECT row FROM chunks WHERE source = ?) ORDER BY ordinal",
            (document.source,),
        ):
            *chunk, embedding, vector_seal, keys, found = values
            if not found:
                return False
            if not self._is_sound(chunk) or not self._is_vector_sound(
                (*chunk[:2], embedding, vector_seal)
            ):
                return False
            seals.append(joined(chunk[10], vector_seal, keys))
        return (len(seals), self._seals.whole(seals)) == (document.num_chunks, document.chunks)

    def _state(self) -> State | None:
        """Return the state, or None where its row is damaged or missing."""
        rows = self._rows(
            "SELECT generation, num_documents, documents, num_files, files, seal FROM state"
        )
        if len(rows) == 1 and self._seals.is_right(rows[0][5], self._seals.state, rows[0][:5]):
            generation, num_documents, documents, num_files, files, _ = rows[0]
            return State(generation, num_documents, _number(documents), num_files, _number(files))
        return None

    def _counted(self, generation: int) -> State:
        """Return the state by the rows that there are."""
        state = State(generation)
        for (seal,) in self._rows("SELECT seal FROM documents"):
            state.count_document(seal, 1)
        for (seal,) in self._rows("SELECT seal FROM files"):
            state.count_file(seal, 1)
        return state

    # -- writing -----------------------------------------------------------------------------

    def write_copy(self, path: Path, cipher_key: bytes | None) -> None:
        """Write all of the catalog into a new file, under another key or none.

        Raises
        ------
        ParameterError
            When SQLCipher is not installed.
        StoreError
            When the folder refuses it.
        """
        sql = library(cipher_key or self._cipher_key)
        path.unlink(missing_ok=True)
        with self._lock:
            try:
                connection = sql.connect(self.path, isolation_level=None)
                try:
                    unlock(connection, self._cipher_key)
                    key = "" if cipher_key is None else f"x'{cipher_key.hex()}'"
                    connection.execute("ATTACH DATABASE ? AS fresh KEY ?", (str(path), key))
                    connection.execute("SELECT sqlcipher_export('fresh')").fetchall()
                    connection.execute(f"PRAGMA fresh.application_id = {APPLICATION_ID}")
                    connection.execute(f"PRAGMA fresh.user_version = {SCHEMA_VERSION}")
                    connection.execute("PRAGMA fresh.journal_mode = WAL")
                finally:
                    connection.close()
            except sql.Error as error:
                raise catalog_error(path, error) from error

    def use_next(self, cipher_key: bytes | None) -> None:
        """Go on with the file at `next_path`, which is under another key, the same or none."""
        with self._lock:
            with contextlib.suppress(self._sql.DatabaseError):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()
            self._words.discard()  # before: no text of an encrypted catalog may stay readable
            put_in_place(self.path)
            self._cipher_key = cipher_key
            self._sql = library(cipher_key)
            self._words = self._word_index()
            try:
                self._connect()
            except (self._sql.Error, OSError) as error:
                raise catalog_error(self.path, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write whole or not at all; the state goes with what is written."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            # A new generation must be none that a reader has seen.
            self._state_now = self._state() or self._counted(time.time_ns())
            yield
            self._state_now.generation += 1
            write_state(self._connection, self._seals, self._state_now)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._state_now = _NOT_WRITING

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Let several reads see one generation, whatever others write meanwhile."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            # Nothing was written; damage that was met has been noted already.
            with contextlib.suppress(self._sql.Error):
                self._connection.execute("ROLLBACK")

    def _put_file(self, state: FileState) -> None:
        self._drop_file(state.path)
        values = (
            state.path,
            state.digest,
            state.size_bytes,
            state.mtime_ns,
            state.inode,
            state.ctime_ns,
        )
        seal = self._seals.file(values)
        self._connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, seal))
        self._state_now.count_file(seal, 1)

    def _drop_file(self, path: str) -> None:
        for (seal,) in self._connection.execute(
            "DELETE FROM files WHERE path = ? RETURNING seal", (path,)
        ).fetchall():
            self._state_now.count_file(seal, -1)

    def _drop_all_files(self) -> None:
        """Let every file be read again."""
        self._connection.execute("DELETE FROM files")
        self._state_now.num_files = self._state_now.files = 0

    def _write_document(self, document: StoredDocument) -> None:
        """Write a document's row anew; its chunks stay."""
        seal = self._seals.document(document)
        for (old,) in self._connection.execute(
            "SELECT seal FROM documents WHERE source = ?", (document.source,)
        ).fetchall():
            self._state_now.count_document(old, -1)
        names = ["source", "file", "digest", "metadata", "num_chunks", "chunks", "seal"]
        updates = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        self._connection.execute(
            f"INSERT INTO documents ({DOCUMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) "
            f"ON CONFLICT (source) DO UPDATE SET {updates}",
            (*document, seal),
        )
        self._state_now.count_document(seal, 1)

    def _drop_document(self, source: str) -> None:
        """Remove a document with its chunks, those included of which it knows nothing."""
        self._forget_file_of(source)
        self._connection.execute("DELETE FROM chunks WHERE source = ?", (source,))
        for (seal,) in self._connection.execute(
            "DELETE FROM documents WHERE source = ? RETURNING seal", (source,)
        ).fetchall():
            self._state_now.count_document(seal, -1)

    def _forget_file_of(self, source: str) -> None:
        """Make the next ingestion read the file again of which a document is changed."""
        for (path,) in self._connection.execute(
            "SELECT file FROM documents WHERE source = ?", (source,)
        ).fetchall():
            if path is not None:
                self._drop_file(path)

    def _chunks_of(self, source: str) -> tuple[int, bytes]:
        """Return the number and the seal of the chunks that a document has now."""
        seals = [
            joined(*parts)
            for parts in self._rows(
                f"SELECT seal, vector_seal, {KEYS} FROM chunks WHERE source = ? ORDER BY ordinal",
                (source,),
            )
        ]
        return len(seals), self._seals.whole(seals)

    def _next_row(self) -> int:
        # What is numbered higher was not numbered by us.
        numbers = self._connection.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = 'chunks' AND seq < ?1 "
            "UNION ALL SELECT MAX(row) FROM chunks WHERE row < ?1",
            (_LARGEST_ROW,),
        ).fetchall()
        return 1 + max((row for (row,) in numbers if isinstance(row, int)), default=0)

    def _put_document(
        self, source: str, file: str | None, digest: str, metadata: str, rows: Sequence[ChunkRow]
    ) -> None:
        """Write a document with its chunks, in place of what there is of it."""
        self._drop_document(source)
        chunks: list[tuple[Any, ...]] = []
        other_keys: list[tuple[int, int, str]] = []
        for number, row in enumerate(rows, self._next_row()):
            chunk = row.chunk
            values = (
                number,
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
            vector = row.embedding.astype("<f4").tobytes()
            vector_seal = self._seals.vector((number, chunk.chunk_id, vector))
            seal = self._seals.chunk(values)
            chunks.append((*values, seal, row.keys[0].digest, vector, vector_seal))
            other_keys += [(number, i, key.digest) for i, key in enumerate(row.keys[1:], 1)]
        # Rows of these chunks that stand where a damaged source has put them.
        self._connection.executemany(
            "DELETE FROM chunks WHERE chunk_id = ?", ((values[1],) for values in chunks)
        )
        whole = self._seals.whole(
            joined(values[10], values[13], " ".join(key.digest for key in row.keys))
            for values, row in zip(chunks, rows, strict=True)
        )
        self._write_document(StoredDocument(source, file, digest, metadata, len(chunks), whole))
        self._connection.executemany(
            f"INSERT INTO chunks ({CHUNK_COLUMNS}, kv_key, embedding, vector_seal) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            chunks,
        )
        self._connection.executemany("INSERT INTO other_keys VALUES (?, ?, ?)", other_keys)

    def _write_contexts(self, chunk: Chunk, keys: Sequence[ChunkKey]) -> None:
        """Note what a chunk is encoded behind, and the names of its KV."""
        ((row, *values),) = self._connection.execute(
            f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE chunk_id = ?", (chunk.chunk_id,)
        ).fetchall()
        contexts = pack_contexts(chunk.contexts)
        seal = self._seals.chunk((row, *values[:8], contexts))
        self._connection.execute(
            "UPDATE chunks SET contexts = ?, kv_key = ?, seal = ? WHERE row = ?",
            (contexts, keys[0].digest, seal, row),
        )
        self._connection.execute("DELETE FROM other_keys WHERE row = ?", (row,))
        self._connection.executemany(
            "INSERT INTO other_keys VALUES (?, ?, ?)",
            [(row, place, key.digest) for place, key in enumerate(keys[1:], 1)],
        )

    # -- what the rows hold ------------------------------------------------------------------

    def _damaged(self, what: str) -> IndexFormatError:
        return IndexFormatError(
            f"{self.path} is damaged ({what}); run 'kvrag verify --repair', or ingest its "
            "document again"
        )


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")


def joined(seal: object, vector_seal: object, keys: object) -> bytes:
    """Return what a document's row seals of one of its chunks."""
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
