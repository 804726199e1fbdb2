"""The catalog: documents and chunks in one SQLite file.

Everything but the KV itself is here, so whatever else lies in the index folder (the vectors'
cache) can be made again from it. Each change is one transaction that raises the generation by
one; readers compare generations to see that what they hold is old.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, StoreError
from kvrag.ingest import words
from kvrag.ingest.connection import catalog_error, connect, file_stamp
from kvrag.ingest.rows import (
    Change,
    ChunkRow,
    DocumentRow,
    FileState,
    pack_contexts,
    pack_ids,
    pack_json,
    unpack_chunk,
    unpack_json,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILE_NAME = "catalog.sqlite"
SCHEMA_VERSION = 2
_APPLICATION_ID = 0x6B765247  # "kvRG"
_BATCH = 500  # below SQLite's limit on parameters of one statement
_MAX_TRIES = 8  # of a read during which somebody else wrote

_SCHEMA = """
CREATE TABLE state (generation INTEGER NOT NULL);
INSERT INTO state VALUES (0);
CREATE TABLE files (
    path TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE documents (
    source TEXT PRIMARY KEY,
    file TEXT,
    digest TEXT NOT NULL,
    metadata TEXT NOT NULL
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
    contexts BLOB NOT NULL
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

_CHUNK_COLUMNS = "chunk_id, text, token_ids, token_starts, source, ordinal, metadata, contexts"
# The names of a chunk's KV, in the order of its contexts; the first stands in its own row.
_KEYS = (
    "kv_key || COALESCE((SELECT group_concat(' ' || kv_key, '') FROM (SELECT kv_key FROM "
    "other_keys WHERE other_keys.row = chunks.row ORDER BY place)), '')"
)
_HAS_KEY = "(kv_key = ?1 OR row IN (SELECT row FROM other_keys WHERE kv_key = ?1))"


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _checked(
    method: Callable[Concatenate[Catalog, _P], _R],
) -> Callable[Concatenate[Catalog, _P], _R]:
    """Hold the connection during a method, keep it up to date, and name SQLite's errors."""

    @functools.wraps(method)
    def call(self: Catalog, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            try:
                self._reopen_if_changed()
                for _ in range(_MAX_TRIES):
                    try:
                        result = method(self, *args, **kwargs)
                    except (sqlite3.Error, IndexFormatError):
                        # What was read may have been half old and half new.
                        if not self._reopen_if_changed():
                            raise
                    else:
                        if not self._reopen_if_changed():
                            return result
            except sqlite3.Error as error:
                raise catalog_error(self.path, error) from error
            raise StoreError(f"{self.path} changes faster than it can be read; try again later")

    return cast("Callable[Concatenate[Catalog, _P], _R]", call)


class Catalog:
    """Documents and chunks of one index. Safe to use from several threads.

    Parameters
    ----------
    path
        The file; it must exist (see `Catalog.create`).

    Raises
    ------
    IndexFormatError
        When it is missing, damaged, or of another schema.
    StoreError
        When it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        if not path.is_file():
            raise IndexFormatError(f"{path} is missing: the index is incomplete; ingest again")
        try:
            self._connection, self._stamp = connect(path)
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            raise catalog_error(path, error) from error
        if (application, version) != (_APPLICATION_ID, SCHEMA_VERSION):
            self._connection.close()
            raise IndexFormatError(
                f"{path} is not a catalog of this version of kvrag: expected schema "
                f"{SCHEMA_VERSION}, found application {application:#x} schema {version}; "
                "ingest into a new folder"
            )

    @classmethod
    def create(cls, path: Path) -> Catalog:
        """Make an empty catalog; an unfinished one left by a killed process is replaced."""
        try:
            for leftover in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
                leftover.unlink(missing_ok=True)
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
                words.create(connection)
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise catalog_error(path, error) from error
        return cls(path)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
            self._stamp = None

    def _reopen_if_changed(self) -> bool:
        """Open the file again if this connection cannot see what others have written to it."""
        if self._stamp is None or self._connection.in_transaction:
            return False
        if self._stamp == file_stamp(self.path):
            return False
        self._connection.close()
        self._connection, self._stamp = connect(self.path)
        return True

    # -- reading -----------------------------------------------------------------------------

    @_checked
    def generation(self) -> int:
        """Return how many transactions have changed the catalog."""
        row = self._connection.execute("SELECT generation FROM state").fetchone()
        if row is None or not isinstance(row[0], int):
            raise self._damaged("its generation is missing")
        return row[0]

    @_checked
    def file(self, path: str) -> FileState | None:
        """Return the state in which a file was last read, if it was."""
        row = self._connection.execute(
            "SELECT path, digest, size_bytes, mtime_ns FROM files WHERE path = ?", (path,)
        ).fetchone()
        return FileState(*row) if row else None

    @_checked
    def files_under(self, folder: str) -> list[str]:
        """Return the known files at any depth under a folder."""
        start = folder.rstrip("/") + "/"
        rows = self._connection.execute(
            "SELECT path FROM files WHERE substr(path, 1, ?1) = ?2 UNION "
            "SELECT file FROM documents WHERE substr(file, 1, ?1) = ?2",
            (len(start), start),
        )
        return sorted(path for (path,) in rows)

    @_checked
    def documents_of_file(self, path: str) -> dict[str, str]:
        """Return source and digest of the documents read from a file."""
        return dict(
            self._connection.execute("SELECT source, digest FROM documents WHERE file = ?", (path,))
        )

    @_checked
    def digest_of(self, source: str) -> str | None:
        """Return a document's digest, or None when it is not indexed."""
        row = self._connection.execute(
            "SELECT digest FROM documents WHERE source = ?", (source,)
        ).fetchone()
        return row[0] if row else None

    @_checked
    def documents(self, bytes_per_token: int) -> list[DocumentRow]:
        """Return all documents, by source."""
        rows = self._connection.execute(
            "SELECT d.source, COUNT(c.row), COALESCE(SUM(c.num_tokens), 0), COALESCE(SUM("
            "c.num_tokens * (1 + (SELECT COUNT(*) FROM other_keys o WHERE o.row = c.row))), 0), "
            "d.metadata FROM documents d LEFT JOIN chunks c ON c.source = d.source "
            "GROUP BY d.source ORDER BY d.source"
        )
        return [
            DocumentRow(
                source, chunks, tokens, stored * bytes_per_token, self._document_json(metadata)
            )
            for source, chunks, tokens, stored, metadata in rows
        ]

    @_checked
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of documents, chunks and tokens."""
        (documents,) = self._connection.execute("SELECT COUNT(*) FROM documents").fetchone()
        chunks, tokens = self._connection.execute(
            "SELECT COUNT(*), COALESCE(SUM(num_tokens), 0) FROM chunks"
        ).fetchone()
        return documents, chunks, tokens

    @_checked
    def chunks(self, chunk_ids: Sequence[str]) -> list[Chunk]:
        """Return chunks in the order of the ids; ids that are not known are skipped."""
        found = {
            row[0]: self._chunk(row)
            for row in self._select_in(_CHUNK_COLUMNS, "chunk_id", list(dict.fromkeys(chunk_ids)))
        }
        return [found[chunk_id] for chunk_id in chunk_ids if chunk_id in found]

    @_checked
    def chunks_at(self, rows: Sequence[int]) -> dict[int, Chunk]:
        """Return chunks by row number."""
        return {
            row[0]: self._chunk(row[1:])
            for row in self._select_in(f"row, {_CHUNK_COLUMNS}", "row", list(rows))
        }

    @_checked
    def search_words(self, question: str, k: int) -> list[tuple[int, float]]:
        """Return row number and score of the `k` best chunks by words (`kvrag.ingest.words`)."""
        return words.search(self._connection, question, k)

    @_checked
    def check_words(self, *, repair: bool) -> str:
        """Return what is wrong with the index of words, "" for nothing; `repair` mends it."""
        found = words.damage(self._connection)
        if found and repair:
            words.rebuild(self._connection)
            return ""
        return found

    @_checked
    def text_of(self, chunk_id: str) -> str | None:
        """Return a chunk's text, or None when it is not known."""
        row = self._connection.execute(
            "SELECT text FROM chunks WHERE chunk_id = ?", (chunk_id,)
        ).fetchone()
        return self._text(*row) if row else None

    @_checked
    def chunk_and_keys(self, chunk_id: str) -> tuple[Chunk, list[str]] | None:
        """Return a chunk and the names of its KV as they are noted, or None when it is not known.

        A row that is damaged may note fewer names than the chunk has contexts, or more.
        """
        row = self._connection.execute(
            f"SELECT {_CHUNK_COLUMNS}, {_KEYS} FROM chunks WHERE chunk_id = ?", (chunk_id,)
        ).fetchone()
        return (self._chunk(row[:-1]), str(row[-1]).split(" ")) if row else None

    @_checked
    def chunk_ids_of(self, source: str) -> list[str]:
        """Return the chunks of a document, in order."""
        rows = self._connection.execute(
            "SELECT chunk_id FROM chunks WHERE source = ? ORDER BY ordinal", (source,)
        )
        return [chunk_id for (chunk_id,) in rows]

    @_checked
    def each_text(self, use: Callable[[str, str], None]) -> int:
        """Call `use` with id and text of every chunk, one at a time; return the generation."""
        with self._snapshot():
            for chunk_id, text in self._connection.execute(
                "SELECT chunk_id, text FROM chunks ORDER BY row"
            ):
                use(chunk_id, self._text(text))
            return self.generation()

    @_checked
    def each_head(self, num_tokens: int, use: Callable[[str, bytes, int], None]) -> int:
        """Call `use` for every chunk with its id, its first token ids and how many it has.

        The token ids come as the row holds them (`kvrag.ingest.rows.pack_ids`), `num_tokens` of
        them or fewer. Returns the generation.
        """
        with self._snapshot():
            for chunk_id, head, length in self._connection.execute(
                "SELECT chunk_id, substr(token_ids, 1, ?), num_tokens FROM chunks ORDER BY row",
                (4 * num_tokens,),
            ):
                if not isinstance(head, bytes) or not isinstance(length, int):
                    raise self._damaged(f"the tokens of chunk {chunk_id!r}")
                use(chunk_id, head, length)
            return self.generation()

    @_checked
    def vectors(self, dim: int) -> tuple[int, NDArray[np.int64], NDArray[np.float32]]:
        """Return the generation, the row numbers ``[n]`` and vectors ``[n, dim]`` of all chunks."""
        import numpy as np

        with self._snapshot():
            (count,) = self._connection.execute("SELECT COUNT(*) FROM chunks").fetchone()
            rows = np.empty(count, dtype=np.int64)
            vectors = np.empty((count, dim), dtype=np.float32)
            for place, (row, blob) in enumerate(
                self._connection.execute("SELECT row, embedding FROM chunks ORDER BY row")
            ):
                if not isinstance(blob, bytes) or len(blob) != 4 * dim:
                    raise self._damaged(f"a vector is not of {4 * dim} bytes")
                rows[place] = row
                vectors[place] = np.frombuffer(blob, dtype="<f4")
            return self.generation(), rows, vectors

    @_checked
    def keys(self) -> dict[str, int]:
        """Return the names of all KV that chunks refer to, each with its number of tokens."""
        return dict(
            self._connection.execute(
                "SELECT kv_key, num_tokens FROM chunks UNION SELECT o.kv_key, c.num_tokens "
                "FROM other_keys o JOIN chunks c ON c.row = o.row"
            )
        )

    @_checked
    def audit(
        self, key_of: Callable[[Chunk], ChunkKey]
    ) -> tuple[dict[ChunkKey, int], dict[str, str]]:
        """Hold every chunk's row against itself.

        Parameters
        ----------
        key_of
            Returns the name a chunk's KV must have, of those it has the first.

        Returns
        -------
        needed, unsound
            The KV of the sound chunks with its number of tokens; and by id what is wrong with
            the others.
        """
        needed: dict[ChunkKey, int] = {}
        unsound: dict[str, str] = {}
        with self._snapshot():
            for *row, stored, num_tokens in self._connection.execute(
                f"SELECT {_CHUNK_COLUMNS}, {_KEYS}, num_tokens FROM chunks ORDER BY row"
            ):
                try:
                    chunk = self._chunk(row)
                except IndexFormatError as error:
                    unsound[row[0]] = str(error)
                    continue
                keys = [key_of(one) for one in chunk.encodings()]
                expected = " ".join(key.digest for key in keys)
                if (stored, num_tokens) == (expected, len(chunk.token_ids)):
                    needed.update(dict.fromkeys(keys, num_tokens))
                else:
                    unsound[chunk.chunk_id] = (
                        f"{chunk.source}, chunk {chunk.ordinal}: names the KV {stored!r} of "
                        f"{num_tokens!r} tokens, expected {expected} of {len(chunk.token_ids)}"
                    )
        return needed, unsound

    @_checked
    def places_of_key(self, key: ChunkKey) -> list[tuple[str, str, int]]:
        """Return id, source and ordinal of the chunks that share one record."""
        return self._connection.execute(
            f"SELECT chunk_id, source, ordinal FROM chunks WHERE {_HAS_KEY} ORDER BY row",
            (key.digest,),
        ).fetchall()

    @_checked
    def chunk_with(self, key: ChunkKey, key_of: Callable[[Chunk], ChunkKey]) -> Chunk:
        """Return a sound chunk whose KV has a certain name, with the context of that KV alone;
        `audit` has found one.
        """
        for row in self._connection.execute(
            f"SELECT {_CHUNK_COLUMNS} FROM chunks WHERE {_HAS_KEY} ORDER BY row", (key.digest,)
        ):
            with contextlib.suppress(IndexFormatError):
                for one in self._chunk(row).encodings():
                    if key_of(one) == key:
                        return one
        raise self._damaged(f"no chunk has the KV {key}")

    @_checked
    def damage(self) -> list[str]:
        """Return what SQLite's own check finds wrong with the file; empty when it is sound."""
        try:
            rows = self._connection.execute("PRAGMA quick_check(10)").fetchall()
        except sqlite3.DatabaseError as error:  # too damaged even to be checked
            return [str(error)]
        return [text for (text,) in rows if text != "ok"]

    # -- writing -----------------------------------------------------------------------------

    @_checked
    def apply(self, change: Change) -> None:
        """Write a change whole or not at all.

        Raises
        ------
        StoreError
            When the medium refuses; the catalog is then as before.
        """
        with self._transaction():
            for path in change.forget_files:
                self._connection.execute("DELETE FROM files WHERE path = ?", (path,))
            for source in change.remove:
                self._drop_document(source)
            for source, file, digest, metadata, rows in change.put:
                self._drop_document(source)
                self._connection.execute(
                    "INSERT INTO documents VALUES (?, ?, ?, ?)",
                    (source, file, digest, pack_json(metadata)),
                )
                self._put_chunks(rows)
            for state in change.put_files:
                self._connection.execute(
                    "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
                    (state.path, state.digest, state.size_bytes, state.mtime_ns),
                )
            self._connection.execute("UPDATE state SET generation = generation + 1")

    @_checked
    def remove_chunks(
        self,
        chunk_ids: Iterable[str],
        encoded_behind: Callable[[int, Iterator[Chunk]], Iterator[Chunk]],
        key_of: Callable[[Chunk], ChunkKey],
    ) -> int:
        """Remove single chunks, and documents of which none is left; return how many.

        Chunks that were encoded behind one of them forget their contexts: from then on their KV is
        that of the chunk alone, wherever the store has it.

        Parameters
        ----------
        encoded_behind
            Yields those of the chunks behind a place of a document whose context reaches it.
        key_of
            Returns the name that a chunk's KV must have.
        """
        num_removed = 0
        with self._transaction():
            for chunk_id in chunk_ids:
                row = self._connection.execute(
                    "DELETE FROM chunks WHERE chunk_id = ? RETURNING source, ordinal", (chunk_id,)
                ).fetchone()
                if row is None:
                    continue
                num_removed += 1
                source, ordinal = row
                later = map(
                    self._chunk,
                    self._connection.execute(
                        f"SELECT {_CHUNK_COLUMNS} FROM chunks WHERE source = ? AND ordinal > ? "
                        "ORDER BY ordinal",
                        (source, ordinal),
                    ),
                )
                for chunk in list(encoded_behind(ordinal, later)):
                    self._forget_contexts(chunk.chunk_id, key_of(replace(chunk, contexts=((),))))
                if self._connection.execute(
                    "SELECT 1 FROM chunks WHERE source = ? LIMIT 1", (source,)
                ).fetchone():
                    self._distrust(source)
                else:
                    self._drop_document(source)
            self._connection.execute("UPDATE state SET generation = generation + 1")
        return num_removed

    def _forget_contexts(self, chunk_id: str, key: ChunkKey) -> None:
        """Note a chunk as encoded alone, under the name that its KV then has."""
        self._connection.execute(
            "DELETE FROM other_keys WHERE row = (SELECT row FROM chunks WHERE chunk_id = ?)",
            (chunk_id,),
        )
        self._connection.execute(
            "UPDATE chunks SET contexts = ?, kv_key = ? WHERE chunk_id = ?",
            (pack_contexts(((),)), key.digest, chunk_id),
        )

    @_checked
    def distrust(self, chunk_ids: Iterable[str]) -> None:
        """Let the next ingestion write the documents of some chunks anew."""
        with self._transaction():
            for chunk_id in chunk_ids:
                row = self._connection.execute(
                    "SELECT source FROM chunks WHERE chunk_id = ?", (chunk_id,)
                ).fetchone()
                if row is not None:
                    self._distrust(row[0])

    def _distrust(self, source: str) -> None:
        """Note that a document is no longer what its digest says: adding it again mends it."""
        self._forget_file_of(source)
        self._connection.execute("UPDATE documents SET digest = '' WHERE source = ?", (source,))

    def _drop_document(self, source: str) -> None:
        self._forget_file_of(source)
        self._connection.execute("DELETE FROM documents WHERE source = ?", (source,))

    def _forget_file_of(self, source: str) -> None:
        """Make the next ingestion read the file again of which a document is changed."""
        self._connection.execute(
            "DELETE FROM files WHERE path = (SELECT file FROM documents WHERE source = ?)",
            (source,),
        )

    def _put_chunks(self, rows: list[ChunkRow]) -> None:
        self._connection.executemany(
            "INSERT INTO chunks (chunk_id, source, ordinal, text, token_ids, token_starts, "
            "num_tokens, kv_key, embedding, metadata, contexts) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    row.chunk.chunk_id,
                    row.chunk.source,
                    row.chunk.ordinal,
                    row.chunk.text,
                    pack_ids(row.chunk.token_ids),
                    pack_ids(row.chunk.token_starts),
                    len(row.chunk.token_ids),
                    row.keys[0].digest,
                    row.embedding.astype("<f4").tobytes(),
                    pack_json(row.chunk.metadata),
                    pack_contexts(row.chunk.contexts),
                )
                for row in rows
            ),
        )
        self._connection.executemany(
            "INSERT INTO other_keys SELECT row, ?, ? FROM chunks WHERE chunk_id = ?",
            (
                (place, key.digest, row.chunk.chunk_id)
                for row in rows
                for place, key in enumerate(row.keys[1:], 1)
            ),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Let several reads see one generation, whatever others write meanwhile."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("COMMIT")

    def _select_in(self, columns: str, column: str, values: list[Any]) -> Iterator[tuple[Any, ...]]:
        for begin in range(0, len(values), _BATCH):
            batch = values[begin : begin + _BATCH]
            marks = ",".join("?" * len(batch))
            yield from self._connection.execute(
                f"SELECT {columns} FROM chunks WHERE {column} IN ({marks})", batch
            )

    # -- what the rows hold ------------------------------------------------------------------

    def _chunk(self, row: Sequence[Any]) -> Chunk:
        try:
            return unpack_chunk(row)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"chunk {row[0]!r} of {row[4]!r}: {error}") from error

    def _document_json(self, metadata: Any) -> dict[str, Any]:
        try:
            return unpack_json(metadata)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"metadata of a document: {error}") from error

    def _text(self, text: Any) -> str:
        if not isinstance(text, str):
            raise self._damaged("a chunk's text is no text")
        return text

    def _damaged(self, what: str) -> IndexFormatError:
        return IndexFormatError(
            f"{self.path} is damaged ({what}); run 'kvrag verify --repair' and ingest again, or "
            "ingest into a new folder"
        )
