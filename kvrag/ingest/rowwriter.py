"""The writes of one transaction of the catalog: rows with checksums, summed up in the state."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from kvrag.chunk import Chunk
from kvrag.ingest.contexts import encoded_behind
from kvrag.ingest.rows import ChunkRow, Encoding, FileState, KeyOf, pack_chunk
from kvrag.ingest.schema import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    KEYS,
    Checksums,
    State,
    StoredDocument,
    joined,
    sound_chunk,
)

_LARGEST_ROW = 1 << 52


class RowWriter:
    """Writes rows in an open transaction.

    Parameters
    ----------
    connection, checksums, path
        The catalog's connection, what makes its checksums, and its file, which errors name.
    state
        The state before; it follows what is written.
    """

    def __init__(
        self, connection: sqlite3.Connection, checksums: Checksums, path: Path, state: State
    ) -> None:
        self._connection = connection
        self._checksums = checksums
        self._path = path
        self.state = state

    def put_file(self, file: FileState) -> None:
        self.drop_file(file.path)
        values = astuple(file)
        checksum = self._checksums.of("file", values)
        self._connection.execute(
            f"INSERT INTO files ({FILE_COLUMNS}) VALUES ({_marks(FILE_COLUMNS)})",
            (*values, checksum),
        )
        self.state.count_file(checksum, 1)

    def drop_file(self, path: str) -> None:
        for (checksum,) in self._connection.execute(
            "DELETE FROM files WHERE path = ? RETURNING seal", (path,)
        ).fetchall():
            self.state.count_file(checksum, -1)

    def put_document(
        self,
        source: str,
        file: str | None,
        digest: str,
        metadata: str,
        rows: Sequence[ChunkRow],
    ) -> None:
        """Write a document with its chunks in place of the stored ones."""
        self.drop_document(source)
        chunks: list[tuple[Any, ...]] = []
        other_keys: list[tuple[int, int, str]] = []
        parts = []
        for number, row in enumerate(rows, self._next_row()):
            values = pack_chunk(number, row.chunk)
            checksum = self._checksums.of("chunk", values)
            vector = row.embedding.astype("<f4").tobytes()
            vector_checksum = self._checksums.of("vector", (number, row.chunk.chunk_id, vector))
            keys = [key.digest for key in row.keys]
            chunks.append((*values, checksum, keys[0], vector, vector_checksum))
            other_keys += [(number, place, key) for place, key in enumerate(keys[1:], 1)]
            parts.append(joined(checksum, vector_checksum, " ".join(keys)))
        # Rows of these chunks that a damaged source has attached to another document.
        self._connection.executemany(
            "DELETE FROM chunks WHERE chunk_id = ?", ((values[1],) for values in chunks)
        )
        whole = self._checksums.whole(parts)
        self._write_document(StoredDocument(source, file, digest, metadata, len(chunks), whole))
        columns = f"{CHUNK_COLUMNS}, kv_key, embedding, vector_seal"
        self._connection.executemany(
            f"INSERT INTO chunks ({columns}) VALUES ({_marks(columns)})", chunks
        )
        self._connection.executemany("INSERT INTO other_keys VALUES (?, ?, ?)", other_keys)

    def _write_document(self, document: StoredDocument) -> None:
        """Rewrite a document's row; its chunks stay."""
        for (old,) in self._connection.execute(
            "SELECT seal FROM documents WHERE source = ?", (document.source,)
        ).fetchall():
            self.state.count_document(old, -1)
        checksum = self._checksums.of("document", document)
        updates = ", ".join(f"{one} = excluded.{one}" for one in DOCUMENT_COLUMNS.split(", ")[1:])
        self._connection.execute(
            f"INSERT INTO documents ({DOCUMENT_COLUMNS}) VALUES ({_marks(DOCUMENT_COLUMNS)}) "
            f"ON CONFLICT (source) DO UPDATE SET {updates}",
            (*document, checksum),
        )
        self.state.count_document(checksum, 1)

    def drop_document(self, source: str) -> None:
        """Remove a document and all chunks that name it, even those its row does not list."""
        self._forget_file_of(source)
        chunks = self._connection.execute(
            "DELETE FROM chunks WHERE source = ? RETURNING seal", (source,)
        ).fetchall()
        before = self.state.documents
        for (checksum,) in self._connection.execute(
            "DELETE FROM documents WHERE source = ? RETURNING seal", (source,)
        ).fetchall():
            self.state.count_document(checksum, -1)
        if self.state.documents == before:  # its row is lost, or damaged
            for (checksum,) in chunks:
                self.state.tell_gone(checksum)

    def _forget_file_of(self, source: str) -> None:
        """Make the next ingestion read a changed document's file again."""
        for (path,) in self._connection.execute(
            "SELECT file FROM documents WHERE source = ?", (source,)
        ).fetchall():
            if path is not None:
                self.drop_file(path)

    def _next_row(self) -> int:
        # Rows with higher numbers are not ours.
        numbers = self._connection.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = 'chunks' AND seq < :last "
            "UNION ALL SELECT MAX(row) FROM chunks WHERE row < :last",
            {"last": _LARGEST_ROW},
        ).fetchall()
        return 1 + max((row for (row,) in numbers if isinstance(row, int)), default=0)

    def drop_chunk(self, chunk_id: str, encoding: Encoding) -> int:
        """Remove a chunk, and its document if it was the last one; return how many are gone.

        Chunks that were encoded after it lose their contexts: from then on they use the KV of the
        chunk alone, if the store has it.
        """
        select = f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE"
        rows = self._connection.execute(f"{select} chunk_id = ?", (chunk_id,)).fetchall()
        if not rows:
            return 0
        # A damaged row does not say which chunks follow it: remove every trace of it.
        removed = sound_chunk(rows[0], self._checksums, self._path)
        source, ordinal = removed.source, removed.ordinal
        later = self._connection.execute(
            f"{select} source = ? AND ordinal > ? ORDER BY ordinal", (source, ordinal)
        ).fetchall()
        sound = [one for one in later if self._checksums.is_right("chunk", one)]
        gone = [(one[0],) for one in (rows[0], *later) if one not in sound]
        self._connection.executemany("DELETE FROM chunks WHERE row = ?", gone)
        behind = (sound_chunk(one, self._checksums, self._path) for one in sound)
        for chunk in list(encoded_behind(ordinal, behind, encoding.context)):
            self._use_alone(replace(chunk, contexts=((),)), encoding.key_of)
        parts = [
            joined(*part)
            for part in self._connection.execute(
                f"SELECT seal, vector_seal, {KEYS} FROM chunks WHERE source = ? ORDER BY ordinal",
                (source,),
            ).fetchall()
        ]
        if not parts:
            self.drop_document(source)
            return len(gone)
        # It no longer matches its digest: adding it again restores it.
        self._forget_file_of(source)
        whole = self._checksums.whole(parts)
        before = self.state.documents
        for row in self._connection.execute(
            f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE source = ?", (source,)
        ).fetchall():
            if self._checksums.is_right("document", row):
                one = StoredDocument(*row[:-1])
                self._write_document(one._replace(digest="", num_chunks=len(parts), chunks=whole))
        if self.state.documents == before:  # its row is lost, or damaged
            self.state.tell_gone(rows[0][-1])
        return len(gone)

    def _use_alone(self, alone: Chunk, key_of: KeyOf) -> None:
        """Record that a chunk has the KV of the chunk alone, and no other."""
        ((row,),) = self._connection.execute(
            "SELECT row FROM chunks WHERE chunk_id = ?", (alone.chunk_id,)
        ).fetchall()
        values = pack_chunk(row, alone)
        self._connection.execute(
            "UPDATE chunks SET contexts = ?, kv_key = ?, seal = ? WHERE row = ?",
            (values[-1], key_of(alone).digest, self._checksums.of("chunk", values), row),
        )
        self._connection.execute("DELETE FROM other_keys WHERE row = ?", (row,))


def _marks(columns: str) -> str:
    """Return a parameter for each column."""
    return ", ".join("?" * len(columns.split(", ")))
