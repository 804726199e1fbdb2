"""The writes of one transaction of the catalog: rows with checksums, summed up in the state."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from kvrag.chunk import Chunk
from kvrag.ingest.contexts import SIMILAR, encoded_behind
from kvrag.ingest.schema import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    FORGOTTEN,
    KEYS,
    Change,
    Checksums,
    ChunkRow,
    Encoding,
    FileState,
    Heads,
    PackedChunk,
    State,
    StoredDocument,
    joined,
    pack_chunk,
    pack_json,
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
    encoding
        How the index encodes its chunks; None writes what is sound already.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        checksums: Checksums,
        path: Path,
        state: State,
        encoding: Encoding | None,
    ) -> None:
        self._connection = connection
        self._checksums = checksums
        self._path = path
        self.state = state
        self._encoding = encoding
        # With context ``similar``: sources and packed token ids of chunks that went, and of those
        # that came, and ids of the latter whose contexts nothing vouches for.
        self._gone: set[tuple[str, bytes]] = set()
        self._come: set[tuple[str, bytes]] = set()
        self._doubted: set[str] = set()
        self._is_text_unknown = False  # of a chunk that went

    def write(self, change: Change) -> int:
        """Write a change; return the single chunks removed."""
        num_removed = sum(map(self.drop_chunk, change.remove_chunks))
        for path in change.forget_files:
            self.drop_file(path)
        for source in change.remove:
            self.drop_document(source)
        for source, file, digest, metadata, chunks in change.put:
            if self._is_similar:
                self._doubt(chunks, change.after)
            self.put_document(source, file, digest, pack_json(metadata), chunks)
        for one in change.put_files:
            self.put_file(one)
        if self._is_similar:
            self._give_all(change.encode)
            self._forget(change)
        return num_removed

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
            if self._is_similar:
                self._come.add((source, values.token_ids))
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
        decode = self._connection.text_factory
        self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            chunks = self._connection.execute(
                f"DELETE FROM chunks WHERE source = ? RETURNING {CHUNK_COLUMNS}", (source,)
            ).fetchall()
        finally:
            self._connection.text_factory = decode
        self._note_gone(source, chunks)
        before = self.state.documents
        for (checksum,) in self._connection.execute(
            "DELETE FROM documents WHERE source = ? RETURNING seal", (source,)
        ).fetchall():
            self.state.count_document(checksum, -1)
        if self.state.documents == before:  # its row is lost, or damaged
            for *_, checksum in chunks:
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

    def drop_chunk(self, chunk_id: str) -> int:
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
        self._note_gone(source, [one for one in (rows[0], *later) if one not in sound])
        behind = (sound_chunk(one, self._checksums, self._path) for one in sound)
        assert self._encoding is not None
        for chunk in list(encoded_behind(ordinal, behind, self._encoding.context)):
            self._give(replace(chunk, contexts=((),)))
        # It no longer matches its digest: adding it again restores it.
        self._sum_up(source, rows[0][-1], is_whole=False)
        return len(gone)

    def _sum_up(self, source: str, checksum: bytes, *, is_whole: bool = True) -> None:
        """Let a document's row say which chunks it has now; drop it if it has none.

        The checksum is that of a chunk that has changed.
        """
        parts = [
            joined(*part)
            for part in self._connection.execute(
                f"SELECT seal, vector_seal, {KEYS} FROM chunks WHERE source = ? ORDER BY ordinal",
                (source,),
            ).fetchall()
        ]
        if not parts:
            self.drop_document(source)
            return
        if not is_whole:
            self._forget_file_of(source)
        whole = self._checksums.whole(parts)
        before = self.state.documents
        for row in self._connection.execute(
            f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE source = ?", (source,)
        ).fetchall():
            if self._checksums.is_right("document", row):
                one = StoredDocument(*row[:-1])._replace(num_chunks=len(parts), chunks=whole)
                self._write_document(one if is_whole else one._replace(digest=""))
        if self.state.documents == before:  # its row is lost, or damaged
            self.state.tell_gone(checksum)

    def _give(self, chunk: Chunk, *, forgets: bool = False) -> None:
        """Record that a stored chunk has other contexts, or lost them; `_sum_up` must follow."""
        assert self._encoding is not None
        ((row,),) = self._connection.execute(
            "SELECT row FROM chunks WHERE chunk_id = ?", (chunk.chunk_id,)
        ).fetchall()
        values = pack_chunk(row, chunk)
        if forgets:
            values = values._replace(contexts=FORGOTTEN)
        first, *others = (self._encoding.key_of(one).digest for one in chunk.encodings())
        self._connection.execute(
            "UPDATE chunks SET contexts = ?, kv_key = ?, seal = ? WHERE row = ?",
            (values.contexts, first, self._checksums.of("chunk", values), row),
        )
        self._connection.execute("DELETE FROM other_keys WHERE row = ?", (row,))
        self._connection.executemany(
            "INSERT INTO other_keys VALUES (?, ?, ?)",
            [(row, place, key) for place, key in enumerate(others, 1)],
        )

    # -- what was encoded after text that is gone (context ``similar``) -----------------------

    @property
    def _is_similar(self) -> bool:
        return self._encoding is not None and self._encoding.context.name == SIMILAR

    def _note_gone(self, source: str, rows: Sequence[Sequence[Any]]) -> None:
        """Note chunks that went, by their rows. A damaged one does not say what its text was."""
        if self._is_similar:
            self._gone.update((source, PackedChunk(*row[:-1]).token_ids) for row in rows)
            if not all(self._checksums.is_right("chunk", row) for row in rows):
                self._is_text_unknown = True

    def _doubt(self, rows: Sequence[ChunkRow], after: Mapping[str, tuple[str, ...]]) -> None:
        """Note the chunks to write whose contexts were kept, and are those of no chunk any more."""
        for row in rows:
            if row.chunk.contexts[0] and row.chunk.chunk_id not in after:
                select = "SELECT 1 FROM chunks WHERE kv_key = ?"
                if not self._connection.execute(select, (row.keys[0].digest,)).fetchall():
                    self._doubted.add(row.chunk.chunk_id)

    def _forget(self, change: Change) -> None:
        """Take their context from the chunks that were encoded after text that is gone."""
        forgetful = self._doubted
        standing = set(chain.from_iterable(change.after.values()))
        missing = standing - self._present(standing)
        forgetful |= {one for one, before in change.after.items() if missing.intersection(before)}
        if gone := self._gone - self._come:
            heads = Heads(ids for _, ids in gone)
            forgetful |= {
                chunk_id
                for chunk_id, contexts in self._connection.execute(
                    "SELECT chunk_id, contexts FROM chunks WHERE length(contexts) > 0"
                )
                if self._is_text_unknown or heads.are_in(contexts)
            }
        self._give_all(dict.fromkeys(sorted(forgetful), ((),)), forgets=True)

    def _present(self, chunk_ids: Iterable[str]) -> set[str]:
        """Return those of some chunks that are there."""
        select = "SELECT chunk_id FROM chunks WHERE chunk_id = ?"
        found = (self._connection.execute(select, (one,)).fetchone() for one in chunk_ids)
        return {one for (one,) in filter(None, found)}

    def _give_all(
        self, contexts: Mapping[str, tuple[tuple[int, ...], ...]], *, forgets: bool = False
    ) -> None:
        """Give sound chunks other contexts, by id."""
        changed: dict[str, bytes] = {}
        for chunk_id, given in contexts.items():
            for row in self._connection.execute(
                f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE chunk_id = ?", (chunk_id,)
            ).fetchall():
                if self._checksums.is_right("chunk", row):
                    chunk = sound_chunk(row, self._checksums, self._path)
                    self._give(replace(chunk, contexts=given), forgets=forgets)
                    changed[chunk.source] = row[-1]
        for source, checksum in changed.items():
            self._sum_up(source, checksum)


def _marks(columns: str) -> str:
    """Return a parameter for each column."""
    return ", ".join("?" * len(columns.split(", ")))
