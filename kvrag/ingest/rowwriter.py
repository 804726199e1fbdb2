"""Writes of the catalog's rows, each with its seal, and of the state that sums them up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvrag.chunk import Chunk, ChunkKey
from kvrag.ingest.rows import ChunkRow, FileState, pack_contexts, pack_ids, pack_json
from kvrag.ingest.schema import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    KEYS,
    StoredDocument,
    joined,
    write_state,
)
from kvrag.ingest.soundrows import NOT_WRITING, SoundRows

_LARGEST_ROW = 1 << 52


class RowWriter(SoundRows):
    """The part of `Catalog` that writes rows."""

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write everything or nothing; the state is updated in the same transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            # The new generation must be one that no reader has seen.
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
            self._state_now = NOT_WRITING

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
        """Forget the state of all files, so that each is read again."""
        self._connection.execute("DELETE FROM files")
        self._state_now.num_files = self._state_now.files = 0

    def _write_document(self, document: StoredDocument) -> None:
        """Rewrite a document's row; its chunks stay."""
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
        """Remove a document and all chunks that name it, even those its row does not list."""
        self._forget_file_of(source)
        self._connection.execute("DELETE FROM chunks WHERE source = ?", (source,))
        for (seal,) in self._connection.execute(
            "DELETE FROM documents WHERE source = ? RETURNING seal", (source,)
        ).fetchall():
            self._state_now.count_document(seal, -1)

    def _forget_file_of(self, source: str) -> None:
        """Make the next ingestion read a changed document's file again."""
        for (path,) in self._connection.execute(
            "SELECT file FROM documents WHERE source = ?", (source,)
        ).fetchall():
            if path is not None:
                self._drop_file(path)

    def _chunks_of(self, source: str) -> tuple[int, bytes]:
        """Return the number and the seal of a document's current chunks."""
        seals = [
            joined(*parts)
            for parts in self._rows(
                f"SELECT seal, vector_seal, {KEYS} FROM chunks WHERE source = ? ORDER BY ordinal",
                (source,),
            )
        ]
        return len(seals), self._seals.whole(seals)

    def _next_row(self) -> int:
        # Rows with higher numbers are not ours.
        numbers = self._connection.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = 'chunks' AND seq < :last "
            "UNION ALL SELECT MAX(row) FROM chunks WHERE row < :last",
            {"last": _LARGEST_ROW},
        ).fetchall()
        return 1 + max((row for (row,) in numbers if isinstance(row, int)), default=0)

    def _put_document(
        self, source: str, file: str | None, digest: str, metadata: str, rows: Sequence[ChunkRow]
    ) -> None:
        """Write a document with its chunks in place of the stored ones."""
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
        # Rows of these chunks that a damaged source has attached to another document.
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
        """Record a chunk's contexts and the names of its KV."""
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
