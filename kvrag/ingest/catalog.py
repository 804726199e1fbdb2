"""The catalog: documents and chunks in one SQLite file.

The catalog holds everything except the KV itself. The other files in the index folder (the caches
of vectors and words) can be rebuilt from it. Each change is one transaction that increases the
generation by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrag.chunk import Chunk, ChunkKey
from kvrag.ingest.catalogfile import checked
from kvrag.ingest.changelog import ChangeLog
from kvrag.ingest.mending import CatalogMending
from kvrag.ingest.rows import (
    Change,
    DocumentRow,
    FileState,
    KeyOf,
    pack_json,
    unpack_json,
)
from kvrag.ingest.schema import (
    CHUNK_COLUMNS,
    FILE_NAME,
    KEYS,
    SCHEMA_VERSION,
)
from kvrag.ingest.tablereads import TableReads
from kvrag.ingest.upgrading import CatalogUpgrade

if TYPE_CHECKING:
    from kvrag.ingest.filters import Filter

__all__ = ["FILE_NAME", "SCHEMA_VERSION", "Catalog"]

# A chunk's number of tokens, 0 if it is not that of its token ids: it may be any value.
_NUM_TOKENS = (
    "(CASE WHEN typeof(token_ids) = 'blob' AND typeof(num_tokens) = 'integer' "
    "AND LENGTH(token_ids) = 4 * num_tokens THEN num_tokens ELSE 0 END)"
)
_HAS_KEY = "(kv_key = :key OR row IN (SELECT row FROM other_keys WHERE kv_key = :key))"


class Catalog(TableReads, CatalogMending, CatalogUpgrade):
    """Documents and chunks of one index. Safe to use from several threads.

    Methods never return damaged rows: they leave them out and call `on_damage`.

    Parameters
    ----------
    path
        The catalog's file; it must exist (see `Catalog.create`).
    seal_key
        The key of the rows' seals (`kvrag.ingest.seals.seal_key`).
    cipher_key
        The 32-byte encryption key of the file; None if it is not encrypted.

    Raises
    ------
    IndexFormatError
        When the file is missing, damaged, or of another schema.
    StoreError
        When the file cannot be opened.

    Attributes
    ----------
    log
        Where changes go if this is the view of a shared index; None writes them to this file.
    """

    log: ChangeLog | None = None

    # -- reading -----------------------------------------------------------------------------

    @checked
    def file(self, path: str) -> FileState | None:
        """Return a file's state when it was last read, or None if it never was."""
        return next(iter(self._sound_files("WHERE path = ?", (path,))), None)

    @checked
    def files_under(self, folder: str) -> list[str]:
        """Return the known files at any depth under a folder."""
        start = folder.rstrip("/") + "/"
        where = "WHERE substr({}, 1, ?) = ?"
        values = (len(start), start)
        paths = {one.path for one in self._sound_files(where.format("path"), values)}
        documents = self._sound_documents(where.format("file"), values)
        return sorted(paths | {one.file for one in documents if one.file is not None})

    @checked
    def documents_of_file(self, path: str) -> dict[str, str]:
        """Return source and digest of a file's documents; "" as digest of a damaged one."""
        documents = self._sound_documents("WHERE file = ?", (path,))
        return {one.source: one.digest if self._is_whole(one) else "" for one in documents}

    @checked
    def file_of(self, source: str) -> str | None:
        """Return the file that a document was read from; None if it was given, or is unknown."""
        documents = self._sound_documents("WHERE source = ?", (source,))
        return documents[0].file if documents else None

    @checked
    def digest_of(self, source: str) -> str | None:
        """Return a document's digest, "" if it is damaged, or None if it is not indexed."""
        for one in self._sound_documents("WHERE source = ?", (source,)):
            return one.digest if self._is_whole(one) else ""
        return None

    @checked
    def digests(self) -> dict[str, str]:
        """Return all documents' digests by source, "" for a damaged one (as `digest_of`)."""
        return {
            one.source: one.digest if self._is_whole(one) else ""
            for one in self._sound_documents("ORDER BY source")
        }

    @checked
    def documents(self, bytes_per_token: int, *, with_others: bool) -> list[DocumentRow]:
        """Return all documents with sound rows, ordered by source.

        `with_others` says whether all records of a chunk count, or only the first.
        """
        others = "(SELECT COUNT(*) FROM other_keys o WHERE o.row = chunks.row)"
        numbers = {
            source: counts
            for source, *counts in self._rows(
                f"SELECT source, COUNT(row), SUM({_NUM_TOKENS}), SUM({_NUM_TOKENS} "
                f"* (1 + {others if with_others else 0})) FROM chunks GROUP BY source"
            )
        }
        found = []
        for one in self._sound_documents("ORDER BY source"):
            chunks, tokens, stored = numbers.get(one.source, (0, 0, 0))
            metadata = unpack_json(one.metadata)
            found.append(
                DocumentRow(
                    one.source, one.file, chunks, tokens, stored * bytes_per_token, metadata
                )
            )
        return found

    @checked
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of documents, chunks and tokens."""
        documents = self._rows("SELECT COUNT(*) FROM documents") or [(0,)]
        chunks = self._rows(
            f"SELECT COUNT(*), COALESCE(SUM({_NUM_TOKENS}), 0), "
            f"COALESCE(SUM({_NUM_TOKENS} IS NOT num_tokens), 0) FROM chunks"
        ) or [(0, 0, 0)]
        num_chunks, num_tokens, num_damaged = chunks[0]
        if num_damaged:
            self._note(f"{num_damaged:,} chunks do not say how many tokens they have")
        return documents[0][0], num_chunks, num_tokens

    @checked
    def chunks(self, chunk_ids: Sequence[str]) -> list[Chunk]:
        """Return chunks in the order of the ids; skips unknown and damaged chunks."""
        found = self.find_chunks(chunk_ids)
        return [chunk for chunk_id in chunk_ids if (chunk := found.get(chunk_id)) is not None]

    @checked
    def find_chunks(self, chunk_ids: Iterable[str]) -> dict[str, Chunk | None]:
        """Return chunks by id; None for a damaged chunk. Leaves out unknown ids."""
        wanted = list(dict.fromkeys(chunk_ids))
        return {
            values[1]: self._sound_chunk(values)
            for values in self._select_in(CHUNK_COLUMNS, "chunk_id", wanted)
        }

    @checked
    def chunks_at(self, rows: Sequence[int]) -> dict[int, Chunk]:
        """Return chunks by row number; leaves out unknown and damaged chunks."""
        found = {
            values[0]: self._sound_chunk(values)
            for values in self._select_in(CHUNK_COLUMNS, "row", rows)
        }
        return {row: chunk for row, chunk in found.items() if chunk is not None}

    @checked
    def search_words(
        self, question: str, k: int, wanted: Filter | None = None
    ) -> list[tuple[int, float]]:
        """Return row number and score of the `k` best chunks by words (`kvrag.ingest.words`)."""
        with self._snapshot():
            found = self._words.search(self, question, k, wanted)
        self._words.discard_if_older(self.mark())
        return found

    @checked
    def rows_of(self, wanted: Filter) -> list[int]:
        """Return the numbers of the chunk rows that a filter admits, ascending."""
        with self._snapshot():
            found = self._words.rows(self, wanted)
        self._words.discard_if_older(self.mark())
        return found

    @checked
    def check_words(self, *, repair: bool) -> str:
        """Return what is wrong with the index of words; `repair` removes a damaged one.

        The next search rebuilds it.
        """
        found = self._words.damage()
        if found and repair:
            self._words.discard()
        return found

    @checked
    def refresh_words(self) -> None:
        """Bring the index of words, if there is one, up to date with the catalog."""
        with self._snapshot():
            self._words.refresh(self)

    @checked
    def text_of(self, chunk_id: str) -> str | None:
        """Return a chunk's text, or None if the chunk is unknown or holds no text.

        The text may be damaged: use it only to compare, and read the chunk before you use it.
        """
        for (text,) in self._rows("SELECT text FROM chunks WHERE chunk_id = ?", (chunk_id,)):
            return text if isinstance(text, str) else None
        return None

    @checked
    def chunk_and_keys(self, chunk_id: str) -> tuple[Chunk, list[str]] | None:
        """Return a chunk and the recorded names of its KV, or None if the chunk is unknown.

        A damaged row may record fewer names than the chunk has contexts, or more.

        Raises
        ------
        IndexFormatError
            When the chunk differs from what was written.
        """
        where = f"SELECT {CHUNK_COLUMNS}, {KEYS} FROM chunks WHERE chunk_id = ?"
        for *row, keys in self._rows(where, (chunk_id,)):
            return self._chunk(row), str(keys).split(" ")
        return None

    @checked
    def chunk_ids_of(self, source: str) -> list[str]:
        """Return the ids of a document's chunks, in order."""
        rows = self._rows(
            "SELECT chunk_id FROM chunks WHERE source = ? ORDER BY ordinal", (source,)
        )
        return [chunk_id for (chunk_id,) in rows if isinstance(chunk_id, str)]

    @checked
    def keys(self) -> dict[str, int]:
        """Return the names of all KV that chunks refer to, each with its number of tokens.

        The number is 0 where it is damaged.
        """
        names = f"SELECT kv_key, {_NUM_TOKENS} FROM chunks"
        others = (
            f"SELECT o.kv_key, {_NUM_TOKENS} FROM other_keys o JOIN chunks ON chunks.row = o.row"
        )
        return dict([*self._rows(names), *self._rows(others)])

    @checked
    def places_of_key(self, key: ChunkKey) -> list[tuple[str, str, int]]:
        """Return id, source and ordinal of the chunks that share one record."""
        return self._rows(
            f"SELECT chunk_id, source, ordinal FROM chunks WHERE {_HAS_KEY} ORDER BY row",
            {"key": key.digest},
        )

    @checked
    def chunk_with(self, key: ChunkKey, key_of: KeyOf) -> Chunk:
        """Return a sound chunk whose KV has a given name, with only the context of that KV;
        `audit` has found one.
        """
        for row in self._rows(
            f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE {_HAS_KEY} ORDER BY row", {"key": key.digest}
        ):
            if self._is_sound(row):
                for one in self._chunk(row).encodings():
                    if key_of(one) == key:
                        return one
        raise self._damaged(f"no chunk has the KV {key}")

    # -- writing -----------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Write a whole change, or nothing.

        Raises
        ------
        StoreError
            When the disk refuses the write; the catalog is then unchanged.
        """
        if self.log is not None:
            self.log.commit(change)
        else:
            self.apply_here(change)

    @checked
    def apply_here(self, change: Change) -> None:
        """Write a change to this file, also if it is the view of a shared index."""
        with self._transaction():
            for path in change.forget_files:
                self._drop_file(path)
            for source in change.remove:
                self._drop_document(source)
            for source, file, digest, metadata, rows in change.put:
                self._put_document(source, file, digest, pack_json(metadata), rows)
            for state in change.put_files:
                self._put_file(state)

    def remove_chunks(
        self,
        chunk_ids: Iterable[str],
        encoded_behind: Callable[[int, Iterator[Chunk]], Iterator[Chunk]],
        key_of: KeyOf,
    ) -> int:
        """Remove single chunks, and documents that lose their last chunk; return how many.

        Chunks that were encoded after a removed one lose their contexts: from then on they use
        the KV of the chunk alone, if the store has it.

        Parameters
        ----------
        encoded_behind
            Yields the chunks after a given place of a document whose context reaches that place.
        key_of
            Returns the name that a chunk's KV must have.

        Raises
        ------
        IndexFormatError
            When a chunk to remove differs from what was written.
        """
        if self.log is not None:
            return self.log.drop(list(self.find_chunks(chunk_ids)))
        return self.remove_chunks_here(chunk_ids, encoded_behind, key_of)

    @checked
    def remove_chunks_here(
        self,
        chunk_ids: Iterable[str],
        encoded_behind: Callable[[int, Iterator[Chunk]], Iterator[Chunk]],
        key_of: KeyOf,
    ) -> int:
        """Remove chunks from this file, as `remove_chunks` does."""
        num_removed = 0
        with self._transaction():
            for chunk_id in chunk_ids:
                rows = self._connection.execute(
                    f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE chunk_id = ?", (chunk_id,)
                ).fetchall()
                if not rows:
                    continue
                # A damaged row does not say which chunks follow it: remove every trace of it.
                removed = self._chunk(rows[0])
                source, ordinal = removed.source, removed.ordinal
                later = self._connection.execute(
                    f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE source = ? AND ordinal > ? "
                    "ORDER BY ordinal",
                    (source, ordinal),
                ).fetchall()
                gone = [rows[0], *(one for one in later if not self._is_sound(one))]
                num_removed += len(gone)
                self._connection.executemany(
                    "DELETE FROM chunks WHERE row = ?", [(one[0],) for one in gone]
                )
                sound = (self._chunk(one) for one in later if self._is_sound(one))
                for chunk in list(encoded_behind(ordinal, sound)):
                    alone = replace(chunk, contexts=((),))
                    self._write_contexts(alone, [key_of(alone)])
                if self._connection.execute(
                    "SELECT 1 FROM chunks WHERE source = ? LIMIT 1", (source,)
                ).fetchone():
                    self._distrust(source)
                else:
                    self._drop_document(source)
        return num_removed
