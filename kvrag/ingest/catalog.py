"""The catalog: documents and chunks in one SQLite file.

The catalog holds everything except the KV itself. The other files in the index folder (the caches
of vectors and words) can be rebuilt from it. Each change is one transaction that increases the
generation by one: a reader compares generations to find out whether its copy is stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey, chunk_id_of
from kvrag.errors import IndexFormatError
from kvrag.ingest import CATALOG_NAME as FILE_NAME
from kvrag.ingest import schema as s
from kvrag.ingest.catalogfile import CatalogFile, checked, counted_state
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import SIMILAR, encoded_behind
from kvrag.ingest.schema import SCHEMA_VERSION
from kvrag.ingest.words import WordIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# -- the writes of one transaction: rows with checksums, summed up in the state ------------------

_LARGEST_ROW = 1 << 52


class RowWriter:
    """Writes rows in an open transaction.

    Parameters
    ----------
    catalog
        The catalog's file.
    state
        The state before; it follows what is written.
    config
        The settings of the index, which say how it encodes its chunks; None writes what is sound
        already.
    """

    def __init__(self, catalog: CatalogFile, state: s.State, config: IndexConfig | None) -> None:
        self._connection = catalog._connection
        self._checksums = catalog.checksums
        self._path = catalog.path
        self.state = state
        self._config = config
        self._is_similar = config is not None and config.context == SIMILAR
        # With context ``similar``: sources and packed token ids of chunks that went, and of those
        # that came, and ids of the latter whose contexts nothing vouches for.
        self._gone: set[tuple[str, bytes]] = set()
        self._come: set[tuple[str, bytes]] = set()
        self._doubted: set[str] = set()
        self._is_text_unknown = False  # of a chunk that went

    def _all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()

    def _insert(self, table: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
        marks = ", ".join("?" * len(columns.split(", ")))
        self._connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)

    def write(self, change: s.Change) -> int:
        """Write a change; return the single chunks removed."""
        num_removed = sum(map(self.drop_chunk, change.remove_chunks))
        for path in change.forget_files:
            self.drop_file(path)
        for source in change.remove:
            self.drop_document(source)
        for source, file, digest, metadata, chunks in change.put:
            if self._is_similar:
                self._doubt(chunks, change.after)
            self.put_document(source, file, digest, s.pack_json(metadata), chunks)
        for one in change.put_files:
            self.drop_file(one.path)
            checksum = self._checksums.of("file", astuple(one))
            self._insert("files", s.FILE_COLUMNS, [(*astuple(one), checksum)])
            self.state.count_file(checksum, 1)
        if self._is_similar:
            self._give_all(change.encode)
            self._forget(change)
        return num_removed

    def drop_file(self, path: str) -> None:
        for (checksum,) in self._all("DELETE FROM files WHERE path = ? RETURNING seal", path):
            self.state.count_file(checksum, -1)

    def put_document(
        self, source: str, file: str | None, digest: str, metadata: str, rows: Sequence[s.ChunkRow]
    ) -> None:
        """Write a document with its chunks in place of the stored ones."""
        self.drop_document(source)
        chunks: list[tuple[Any, ...]] = []
        other_keys: list[tuple[int, int, str]] = []
        parts = []
        for number, row in enumerate(rows, self._next_row()):
            values = s.pack_chunk(number, row.chunk)
            checksum = self._checksums.of("chunk", values)
            vector = row.embedding.astype("<f4").tobytes()
            vector_checksum = self._checksums.of("vector", (number, row.chunk.chunk_id, vector))
            keys = [key.digest for key in row.keys]
            chunks.append((*values, checksum, keys[0], vector, vector_checksum))
            other_keys += [(number, place, key) for place, key in enumerate(keys[1:], 1)]
            parts.append(s.joined(checksum, vector_checksum, " ".join(keys)))
            if self._is_similar:
                self._come.add((source, values.token_ids))
        # Rows of these chunks that a damaged source has attached to another document.
        self._connection.executemany(
            "DELETE FROM chunks WHERE chunk_id = ?", ((values[1],) for values in chunks)
        )
        whole = self._checksums.whole(parts)
        document = s.StoredDocument(source, file, digest, metadata, len(chunks), whole)
        checksum = self._checksums.of("document", document)
        self._insert("documents", s.DOCUMENT_COLUMNS, [(*document, checksum)])
        self.state.count_document(checksum, 1)
        self._insert("chunks", f"{s.CHUNK_COLUMNS}, kv_key, embedding, vector_seal", chunks)
        self._insert("other_keys", "row, place, kv_key", other_keys)

    def drop_document(self, source: str) -> None:
        """Remove a document and all chunks that name it, even those its row does not list."""
        self._forget_file_of(source)
        delete = f"DELETE FROM chunks WHERE source = ? RETURNING {s.CHUNK_COLUMNS}"
        chunks = self._all(delete, source)
        self._note_gone(source, chunks)
        before = self.state.documents
        delete = "DELETE FROM documents WHERE source = ? RETURNING seal"
        for (checksum,) in self._all(delete, source):
            self.state.count_document(checksum, -1)
        if self.state.documents == before:  # its row is lost, or damaged
            for *_, checksum in chunks:
                self.state.tell_gone(checksum)

    def _forget_file_of(self, source: str) -> None:
        """Make the next ingestion read a changed document's file again."""
        for (path,) in self._all("SELECT file FROM documents WHERE source = ?", source):
            if path is not None:
                self.drop_file(path)

    def _next_row(self) -> int:
        # Rows with higher numbers are not ours.
        numbers = self._all(
            "SELECT seq FROM sqlite_sequence WHERE name = 'chunks' AND seq < ?1 "
            "UNION ALL SELECT MAX(row) FROM chunks WHERE row < ?1",
            _LARGEST_ROW,
        )
        return 1 + max((row for (row,) in numbers if isinstance(row, int)), default=0)

    def drop_chunk(self, chunk_id: str) -> int:
        """Remove a chunk, and its document if it was the last one; return how many are gone.

        Chunks that were encoded after it lose their contexts: from then on they use the KV of the
        chunk alone, if the store has it.
        """
        select = f"SELECT {s.CHUNK_COLUMNS} FROM chunks WHERE"
        rows = self._all(f"{select} chunk_id = ?", chunk_id)
        if not rows:
            return 0
        # A damaged row does not say which chunks follow it: remove every trace of it.
        removed = s.sound_chunk(rows[0], self._checksums, self._path)
        source, ordinal = removed.source, removed.ordinal
        later = self._all(f"{select} source = ? AND ordinal > ? ORDER BY ordinal", source, ordinal)
        sound = [one for one in later if self._checksums.is_right("chunk", one)]
        gone = [one for one in (rows[0], *later) if one not in sound]
        self._connection.executemany("DELETE FROM chunks WHERE row = ?", [one[:1] for one in gone])
        self._note_gone(source, gone)
        behind = (s.sound_chunk(one, self._checksums, self._path) for one in sound)
        assert self._config is not None
        for chunk in list(encoded_behind(ordinal, behind, self._config.chunk_context)):
            self._give(replace(chunk, contexts=((),)))
        # It no longer matches its digest: adding it again restores it.
        self._sum_up(source, rows[0][-1], is_whole=False)
        return len(gone)

    def _sum_up(self, source: str, checksum: bytes, *, is_whole: bool = True) -> None:
        """Let a document's row say which chunks it has now; drop it if it has none.

        The checksum is that of a chunk that has changed.
        """
        select = f"SELECT seal, vector_seal, {s.KEYS} FROM chunks WHERE source = ? ORDER BY ordinal"
        parts = [s.joined(*part) for part in self._all(select, source)]
        if not parts:
            self.drop_document(source)
            return
        if not is_whole:
            self._forget_file_of(source)
        whole = self._checksums.whole(parts)
        for row in self._all(
            f"SELECT {s.DOCUMENT_COLUMNS} FROM documents WHERE source = ?", source
        ):
            if self._checksums.is_right("document", row):
                one = s.StoredDocument(*row[:-1])._replace(num_chunks=len(parts), chunks=whole)
                one = one if is_whole else one._replace(digest="")
                new = self._checksums.of("document", one)
                self._connection.execute(
                    "UPDATE documents SET digest = ?, num_chunks = ?, chunks = ?, seal = ? "
                    "WHERE source = ?",
                    (one.digest, one.num_chunks, whole, new, source),
                )
                self.state.count_document(row[-1], -1)
                self.state.count_document(new, 1)
                return
        self.state.tell_gone(checksum)  # its row is lost, or damaged

    def _give(self, chunk: Chunk, *, forgets: bool = False) -> None:
        """Record that a stored chunk has other contexts, or lost them; `_sum_up` must follow."""
        assert self._config is not None
        ((row,),) = self._all("SELECT row FROM chunks WHERE chunk_id = ?", chunk.chunk_id)
        values = s.pack_chunk(row, chunk)
        if forgets:
            values = values._replace(contexts=s.FORGOTTEN)
        first, *others = (self._config.key_of(one).digest for one in chunk.encodings())
        self._connection.execute(
            "UPDATE chunks SET contexts = ?, kv_key = ?, seal = ? WHERE row = ?",
            (values.contexts, first, self._checksums.of("chunk", values), row),
        )
        self._connection.execute("DELETE FROM other_keys WHERE row = ?", (row,))
        names = [(row, place, key) for place, key in enumerate(others, 1)]
        self._insert("other_keys", "row, place, kv_key", names)

    # -- what was encoded after text that is gone (context ``similar``) -----------------------

    def _note_gone(self, source: str, rows: Sequence[Sequence[Any]]) -> None:
        """Note chunks that went, by their rows. A damaged one does not say what its text was."""
        if self._is_similar:
            self._gone.update((source, s.PackedChunk(*row[:-1]).token_ids) for row in rows)
            if not all(self._checksums.is_right("chunk", row) for row in rows):
                self._is_text_unknown = True

    def _doubt(self, rows: Sequence[s.ChunkRow], after: Mapping[str, tuple[str, ...]]) -> None:
        """Note the chunks to write whose contexts were kept, and are those of no chunk any more."""
        for row in rows:
            is_kept = row.chunk.contexts[0] and row.chunk.chunk_id not in after
            select = "SELECT 1 FROM chunks WHERE kv_key = ?"
            if is_kept and not self._all(select, row.keys[0].digest):
                self._doubted.add(row.chunk.chunk_id)

    def _forget(self, change: s.Change) -> None:
        """Take their context from the chunks that were encoded after text that is gone."""
        forgetful = self._doubted
        select = "SELECT 1 FROM chunks WHERE chunk_id = ?"
        standing = set(chain.from_iterable(change.after.values()))
        missing = {one for one in standing if not self._all(select, one)}
        forgetful |= {one for one, before in change.after.items() if missing.intersection(before)}
        if gone := self._gone - self._come:
            heads = s.Heads(ids for _, ids in gone)
            encoded = "SELECT chunk_id, contexts FROM chunks WHERE length(contexts) > 0"
            forgetful |= {
                chunk_id
                for chunk_id, contexts in self._connection.execute(encoded)  # of any number
                if self._is_text_unknown or heads.are_in(contexts)
            }
        self._give_all(dict.fromkeys(sorted(forgetful), ((),)), forgets=True)

    def _give_all(
        self, contexts: Mapping[str, tuple[tuple[int, ...], ...]], *, forgets: bool = False
    ) -> None:
        """Give sound chunks other contexts, by id."""
        changed: dict[str, bytes] = {}
        select = f"SELECT {s.CHUNK_COLUMNS} FROM chunks WHERE chunk_id = ?"
        for chunk_id, given in contexts.items():
            for row in self._all(select, chunk_id):
                if self._checksums.is_right("chunk", row):
                    chunk = s.sound_chunk(row, self._checksums, self._path)
                    self._give(replace(chunk, contexts=given), forgets=forgets)
                    changed[chunk.source] = row[-1]
        for source, checksum in changed.items():
            self._sum_up(source, checksum)


# -- the catalog ---------------------------------------------------------------------------------

_SAMPLE = 100
_HAS_KEY = "(kv_key = :key OR row IN (SELECT row FROM other_keys WHERE kv_key = :key))"


class Stored:
    """All rows of a catalog, sound or not."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    @checked
    def has_sound_tables(self) -> bool:
        """Return whether all rows of documents and files are present and unchanged.

        Chunks are not checked here: a document's are checked when it is added again.
        """
        state = self._catalog.state()
        if state is None or state != counted_state(self._catalog, state.generation):
            return False
        for table in ("documents", "files"):  # and their indexes
            if self._catalog.rows(f"PRAGMA integrity_check({table})") != [("ok",)]:
                return False
        return all(is_right for _, is_right in (*self.documents(), *self.files()))

    @checked
    def is_foreign(self) -> bool:
        """Return whether the catalog has rows, and another index wrote them.

        Damage does not look like this: it leaves the state's row, or some other row, as it was.
        """
        if self._catalog.state() is not None:
            return False
        found = [
            self._catalog.checksums.is_right(name, row)
            for name, columns in (
                ("chunk", s.CHUNK_COLUMNS),
                ("document", s.DOCUMENT_COLUMNS),
                ("file", s.FILE_COLUMNS),
            )
            for row in self._catalog.rows(f"SELECT {columns} FROM {name}s LIMIT {_SAMPLE}")
        ]
        return bool(found) and not any(found)

    def state(self) -> tuple[s.State | None, s.State]:
        """Return the state, None if its row is damaged, and what it must be for the other rows."""
        state = self._catalog.state()
        return state, counted_state(self._catalog, 0 if state is None else state.generation)

    def rows(self, *, is_alone: bool = False) -> dict[Any, list[int]]:
        """Return the numbers of the readable chunk rows by source, in order.

        With `is_alone`, those of chunks without a context.
        """
        found: dict[Any, list[int]] = {}
        for row, source, length in self._catalog.scan("row, source, length(contexts)"):
            if not is_alone or length in (0, len(s.FORGOTTEN)):
                found.setdefault(source, []).append(row)
        return found

    def chunks(self, rows: Sequence[int] | None = None) -> Iterator[s.StoredChunk]:
        """Yield what the readable chunk rows hold, all of them or some."""
        catalog, columns = self._catalog, s.ALL_CHUNK_COLUMNS
        checksums = catalog.checksums
        found = catalog.scan(columns) if rows is None else catalog.select_in(columns, "row", rows)
        for *values, keys, embedding, vector_checksum in found:
            vector = (*values[:2], embedding, vector_checksum)
            chunk: Chunk | None = None
            with contextlib.suppress(IndexFormatError):
                chunk = s.sound_chunk(values, checksums, catalog.path)
            yield s.StoredChunk(
                packed=s.PackedChunk(*values[:-1]),
                keys=keys,
                chunk=chunk,
                checksums=s.joined(values[-1], vector_checksum, ""),
                embedding=embedding if checksums.is_right("vector", vector) else None,
            )

    def documents(self, sources: Iterable[Any] = ()) -> list[tuple[s.StoredDocument, bool]]:
        """Return the readable documents, and whether each row is what was written.

        Documents with the given sources are found even if the table cannot be read in order.
        """
        select = f"SELECT {s.DOCUMENT_COLUMNS} FROM documents"
        rows = {row[0]: row for row in self._catalog.readable(select)}
        for source in sources:
            if source not in rows:
                for row in self._catalog.rows(f"{select} WHERE source = ?", (source,)):
                    rows[source] = row
        return [
            (s.StoredDocument(*row[:-1]), self._catalog.checksums.is_right("document", row))
            for row in rows.values()
        ]

    def files(self) -> list[tuple[s.FileState, bool]]:
        """Return the readable states of files, and whether each row is what was written."""
        rows = self._catalog.readable(f"SELECT {s.FILE_COLUMNS} FROM files")
        return [
            (s.FileState(*row[:-1]), self._catalog.checksums.is_right("file", row)) for row in rows
        ]

    @checked
    def keys(self) -> dict[str, int]:
        """Return the names of all KV that chunks refer to, each with its number of tokens.

        The number is 0 where it is damaged.
        """
        names = f"SELECT kv_key, {s.NUM_TOKENS} FROM chunks"
        others = (
            f"SELECT o.kv_key, {s.NUM_TOKENS} FROM other_keys o JOIN chunks ON chunks.row = o.row"
        )
        return dict([*self._catalog.rows(names), *self._catalog.rows(others)])

    @checked
    def places_of_key(self, key: ChunkKey) -> list[tuple[str, str, int]]:
        """Return id, source and ordinal of the chunks that share one record."""
        return self._catalog.rows(
            f"SELECT chunk_id, source, ordinal FROM chunks WHERE {_HAS_KEY} ORDER BY row",
            {"key": key.digest},
        )

    @checked
    def chunk_with(self, key: ChunkKey) -> Chunk:
        """Return a sound chunk whose KV has a given name, with only the context of that KV;
        `audit` has found one.
        """
        catalog = self._catalog
        for row in catalog.rows(
            f"SELECT {s.CHUNK_COLUMNS} FROM chunks WHERE {_HAS_KEY} ORDER BY row",
            {"key": key.digest},
        ):
            if catalog.checksums.is_right("chunk", row):
                for one in s.sound_chunk(row, catalog.checksums, catalog.path).encodings():
                    if catalog.key_of(one) == key:
                        return one
        raise s.damaged(self._catalog.path, f"no chunk has the KV {key}")

    @checked
    def num_vectors(self, dim: int) -> int:
        """Return how many vectors the chunks have, a vector for each window of their texts."""
        counted = self._catalog.rows("SELECT SUM(LENGTH(embedding) / ?) FROM chunks", (4 * dim,))
        return counted[0][0] if counted and isinstance(counted[0][0], int) else 0


__all__ = ["FILE_NAME", "SCHEMA_VERSION", "Catalog", "Documents", "Texts"]

_KEPT_BYTES = 2 << 20  # of rows whose chunks stay in memory, which take about ten times as much
# Whether a chunk is found by its id and by the names of its KV: indexes may be damaged too.
_IS_FOUND = (
    "(SELECT c.row FROM chunks c INDEXED BY sqlite_autoindex_chunks_1 "
    "WHERE c.chunk_id = chunks.chunk_id) = row "
    "AND EXISTS (SELECT 1 FROM chunks c INDEXED BY chunks_by_key "
    "WHERE c.kv_key = chunks.kv_key AND c.row = chunks.row) "
    "AND NOT EXISTS (SELECT 1 FROM other_keys o WHERE o.row = chunks.row AND NOT EXISTS "
    "(SELECT 1 FROM other_keys p INDEXED BY other_keys_by_key "
    "WHERE p.kv_key = o.kv_key AND p.row = o.row AND p.place = o.place))"
)


class Catalog(CatalogFile):
    """Documents and chunks of one index. Safe to use from several threads.

    Methods never return damaged rows: they leave them out and call `on_damage`.

    Parameters
    ----------
    path
        The catalog's file; it must exist (see `Catalog.create`).
    checksum_key
        What the rows' checksums begin with (`kvrag.ingest.schema.checksum_key`).
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
    config
        The settings of the index, which say how it encodes its chunks.
    documents
        Which documents there are, and the files that they were read from.
    texts
        The chunks' texts and tokens, to compare prompts with.
    words
        The index of the chunks' words and fields.
    stored
        All rows, sound or not, for upkeep.
    """

    config: IndexConfig | None = None

    def __init__(
        self, path: Path, *, checksum_key: bytes = b"", cipher_key: bytes | None = None
    ) -> None:
        super().__init__(path, checksum_key=checksum_key, cipher_key=cipher_key)
        self.documents = Documents(self)
        self.texts = Texts(self)
        self.words = WordIndex(self)
        self.stored = Stored(self)
        self._kept: dict[str, tuple[Chunk, int]] = {}
        self._kept_for: object = None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self.words.close()
            super().close()

    def use_next(self, cipher_key: bytes | None) -> None:
        """Continue with the file at `next_path`, whose key may be another, the same, or none."""
        with self._lock:
            self.words.discard()  # first: no text of an encrypted catalog may stay readable
            super().use_next(cipher_key)

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name that a chunk's KV must have, the first of several."""
        assert self.config is not None
        return self.config.key_of(chunk)

    def chunks(self, chunk_ids: Sequence[str]) -> list[Chunk]:
        """Return chunks in the order of the ids; skips unknown and damaged chunks."""
        found = self.find_chunks(chunk_ids)
        return [chunk for chunk_id in chunk_ids if (chunk := found.get(chunk_id)) is not None]

    @checked
    def find_chunks(self, chunk_ids: Iterable[str]) -> dict[str, Chunk | None]:
        """Return chunks by id; None for a damaged chunk. Leaves out unknown ids.

        Do not change them: until somebody writes to the catalog, they are read once.
        """
        wanted, kept = list(dict.fromkeys(chunk_ids)), self._kept_chunks()
        found: dict[str, Chunk | None] = {one: kept[one][0] for one in wanted if one in kept}
        read: dict[str, tuple[Chunk, int]] = {}
        missing = [one for one in wanted if one not in kept]
        for values in self.select_in(s.CHUNK_COLUMNS, "chunk_id", missing):
            found[values[1]] = chunk = self._sound_chunk(values)
            if chunk is not None:
                size = sum(len(value) for value in values if isinstance(value, str | bytes))
                read[values[1]] = chunk, size
        num_bytes = sum(size for _, size in read.values())
        if num_bytes + sum(size for _, size in kept.values()) > _KEPT_BYTES:
            kept.clear()
        if num_bytes <= _KEPT_BYTES:
            kept |= read
        return found

    def _kept_chunks(self) -> dict[str, tuple[Chunk, int]]:
        """Return the chunks that were read since the last write, of whatever connection, and the
        sizes of their rows.
        """
        version = self.rows("PRAGMA data_version")
        if self._connection.in_transaction or not version:
            return {}
        now = self._connection, version, self._connection.total_changes
        if now != self._kept_for:
            self._kept, self._kept_for = {}, now
        return self._kept

    @checked
    def chunks_at(self, rows: Sequence[int]) -> dict[int, Chunk]:
        """Return chunks by row number; leaves out unknown and damaged chunks."""
        found = {
            values[0]: self._sound_chunk(values)
            for values in self.select_in(s.CHUNK_COLUMNS, "row", rows)
        }
        return {row: chunk for row, chunk in found.items() if chunk is not None}

    @checked
    def sample(self, most: int) -> list[Chunk]:
        """Return chunks from all over the index, in order of their rows."""
        found = self.rows("SELECT min(row), max(row) FROM chunks")
        if not found or found[0][0] is None:
            return []
        first, last = found[0]
        step = -(-(last + 1 - first) // most)
        # Most of the numbers may be gone: a chunk that is replaced gets another.
        where = "SELECT row FROM chunks WHERE row >= ? ORDER BY row LIMIT 1"
        asked = [self.rows(where, (begin,)) for begin in range(first, last + 1, step)]
        chunks = self.chunks_at([*{row for one in asked for (row,) in one}])
        return [chunks[row] for row in sorted(chunks)]

    @checked
    def chunk_and_keys(self, chunk_id: str) -> tuple[Chunk, list[str]] | None:
        """Return a chunk and the recorded names of its KV, or None if the chunk is unknown.

        A damaged row may record fewer names than the chunk has contexts, or more.

        Raises
        ------
        IndexFormatError
            When the chunk differs from what was written.
        """
        where = f"SELECT {s.CHUNK_COLUMNS}, {s.KEYS} FROM chunks WHERE chunk_id = ?"
        for *row, keys in self.rows(where, (chunk_id,)):
            return s.sound_chunk(row, self.checksums, self.path), str(keys).split(" ")
        return None

    @checked
    def chunk_ids_of(self, source: str) -> list[str]:
        """Return the ids of a document's chunks, in order."""
        rows = self.rows("SELECT chunk_id FROM chunks WHERE source = ? ORDER BY ordinal", (source,))
        return [chunk_id for (chunk_id,) in rows if isinstance(chunk_id, str)]

    @checked
    def vectors(self, dim: int, known: NDArray[np.uint64] | None = None) -> s.VectorRows:
        """Return the vectors of the chunks, in order of row number.

        Leaves out vectors that differ from what was written.

        Parameters
        ----------
        known
            Marks of chunks whose vectors are not wanted ``[m]``; None wants all.
        """
        import numpy as np

        with self.snapshot():
            present, num_rows = np.empty(0, np.uint64), 0
            found = self.scan(s.VECTOR_COLUMNS)
            if known is not None:
                rows, present = self.texts.marks()
                num_rows = len(rows)
                new = np.sort(rows[~np.isin(present, known)])
                found = self.select_in(s.VECTOR_COLUMNS, "row", new.tolist())
            owners: list[tuple[int, int, int]] = []
            vectors: list[NDArray[np.float32]] = [np.empty((0, dim), np.float32)]
            for values in found:
                num_rows += known is None
                sound = self.checksums.is_right("vector", values)
                num, rest = divmod(len(values[2]), 4 * dim) if sound else (0, 0)
                if num and not rest:
                    owners.append((values[0], s.vector_mark(*values[:2]), num))
                    vectors.append(np.frombuffer(values[2], dtype="<f4").reshape(num, dim))
                else:
                    self.note(f"the vector of chunk {values[0]} is not what was written")
            expected = self.rows("SELECT ifnull(sum(num_chunks), 0) FROM documents")
            if expected and expected[0][0] != num_rows:
                # Or a cache of what is left would count as that of all, once they are back.
                self.note(f"{num_rows} chunks are there, documents have {expected[0][0]}")
            counts = [num for *_, num in owners]
            return s.VectorRows(
                self.version()[1],
                present,
                np.repeat(np.array([row for row, *_ in owners], np.int64), counts),
                np.repeat(np.array([mark for _, mark, _ in owners], np.uint64), counts),
                np.concatenate(vectors, dtype=np.float32),
            )

    @checked
    def write(self, change: s.Change) -> int:
        """Write a whole change to this file, or nothing; return the single chunks removed.

        `Storage.apply` writes it to the log of a shared index instead.

        Raises
        ------
        StoreError
            When the disk refuses the write; the catalog is then unchanged.
        IndexFormatError
            When a single chunk to remove differs from what was written.
        """
        with self._transaction() as state:
            return RowWriter(self, state, self.config).write(change)

    def _sound_chunk(self, values: Sequence[Any]) -> Chunk | None:
        """Return the chunk of a row, or None and a note of the damage."""
        if self.checksums.is_right("chunk", values):
            return s.sound_chunk(values, self.checksums, self.path)
        self.note(f"chunk {shown(values[1])} of {shown(values[2])} is not what was written")
        return None


class Documents:
    """Which documents a catalog has, and the files that they were read from."""

    def __init__(self, catalog: CatalogFile) -> None:
        self._catalog = catalog

    @checked
    def file(self, path: str) -> s.FileState | None:
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
        return self._digests("WHERE file = ?", (path,))

    @checked
    def file_of(self, source: str) -> str | None:
        """Return the file that a document was read from; None if it was given, or is unknown."""
        documents = self._sound_documents("WHERE source = ?", (source,))
        return documents[0].file if documents else None

    @checked
    def digest_of(self, source: str) -> str | None:
        """Return a document's digest, "" if it is damaged, or None if it is not indexed."""
        return self._digests("WHERE source = ?", (source,)).get(source)

    @checked
    def digests(self) -> dict[str, str]:
        """Return all documents' digests by source, "" for a damaged one (as `digest_of`)."""
        return self._digests("ORDER BY source")

    def _digests(self, where: str, values: Sequence[Any] = ()) -> dict[str, str]:
        documents = self._sound_documents(where, values)
        return {one.source: one.digest if self._is_whole(one) else "" for one in documents}

    @checked
    def listed(self, bytes_per_token: int, *, with_others: bool) -> list[s.DocumentRow]:
        """Return all documents with sound rows, ordered by source.

        `with_others` says whether all records of a chunk count, or only the first.
        """
        others = "(SELECT COUNT(*) FROM other_keys o WHERE o.row = chunks.row)"
        numbers = {
            source: counts
            for source, *counts in self._catalog.rows(
                f"SELECT source, COUNT(row), SUM({s.NUM_TOKENS}), SUM({s.NUM_TOKENS} "
                f"* (1 + {others if with_others else 0})) FROM chunks GROUP BY source"
            )
        }
        found = []
        for one in self._sound_documents("ORDER BY source"):
            chunks, tokens, stored = numbers.get(one.source, (0, 0, 0))
            metadata = s.unpack_json(one.metadata)
            found.append(
                s.DocumentRow(
                    one.source, one.file, chunks, tokens, stored * bytes_per_token, metadata
                )
            )
        return found

    @checked
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of documents, chunks and tokens."""
        documents = self._catalog.rows("SELECT COUNT(*) FROM documents") or [(0,)]
        chunks = self._catalog.rows(
            f"SELECT COUNT(*), COALESCE(SUM({s.NUM_TOKENS}), 0), "
            f"COALESCE(SUM({s.NUM_TOKENS} IS NOT num_tokens), 0) FROM chunks"
        ) or [(0, 0, 0)]
        num_chunks, num_tokens, num_damaged = chunks[0]
        if num_damaged:
            self._catalog.note(f"{num_damaged:,} chunks do not say how many tokens they have")
        return documents[0][0], num_chunks, num_tokens

    @checked
    def distrusted(self) -> list[str]:
        """Return the documents that are incomplete, or not known to be complete."""
        return [one.source for one in self._sound_documents("WHERE digest = '' ORDER BY source")]

    def _sound_documents(self, where: str, values: Sequence[Any] = ()) -> list[s.StoredDocument]:
        """Return the documents with sound rows; damage in the others is noted."""
        return [s.StoredDocument(*row) for row in self._sound("document", where, values)]

    def _sound_files(self, where: str, values: Sequence[Any] = ()) -> list[s.FileState]:
        """Return the file states with sound rows; damage in the others is noted."""
        return [s.FileState(*row) for row in self._sound("file", where, values)]

    def _sound(self, name: str, where: str, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
        columns = {"document": s.DOCUMENT_COLUMNS, "file": s.FILE_COLUMNS}[name]
        for row in self._catalog.rows(f"SELECT {columns} FROM {name}s {where}", values):
            if self._catalog.checksums.is_right(name, row):
                yield row[:-1]
            else:
                self._catalog.note(f"the entry of {name} {shown(row[0])} is not what was written")

    def _is_whole(self, document: s.StoredDocument) -> bool:
        """Return whether all chunks of a document are present and unchanged; note it if not."""
        is_right = self._catalog.checksums.is_right
        rows = self._catalog.rows(
            f"SELECT {s.ALL_CHUNK_COLUMNS}, {_IS_FOUND} FROM chunks "
            # By row, so that the table is compared and not its index.
            "NOT INDEXED WHERE row IN (SELECT row FROM chunks WHERE source = ?) ORDER BY ordinal",
            (document.source,),
        )
        parts = []
        for *chunk, keys, embedding, vector_checksum, found in rows:
            vector = (*chunk[:2], embedding, vector_checksum)
            if found and is_right("chunk", chunk) and is_right("vector", vector):
                parts.append(s.joined(chunk[-1], vector_checksum, keys))
        expected = document.num_chunks, document.num_chunks, document.chunks
        if (len(rows), len(parts), self._catalog.checksums.whole(parts)) == expected:
            return True
        source = shown(document.source)
        self._catalog.note(f"the chunks of document {source} are not what was written")
        return False


class Texts:
    """Texts and tokens of a catalog's chunks, to compare prompts with.

    What `each_text` gives is what was indexed. Everything else may be damaged: use it only to
    compare, and read the chunk before you use it.
    """

    def __init__(self, catalog: CatalogFile) -> None:
        self._catalog = catalog

    @checked
    def text_of(self, chunk_id: str) -> str | None:
        """Return a chunk's text, or None if the chunk is unknown or holds no text."""
        found = self._catalog.rows("SELECT text FROM chunks WHERE chunk_id = ?", (chunk_id,))
        return next((text for (text,) in found if isinstance(text, str)), None)

    @checked
    def each_text(
        self,
        use: Callable[[str, str], None],
        known: Collection[str] = (),
        forget: Callable[[str], None] = lambda _: None,
    ) -> tuple[int, bytes]:
        """Call `use` with the id and text of each chunk in turn; return the version.

        Leaves out chunks whose text differs from what was indexed.

        Parameters
        ----------
        known
            Ids of chunks whose texts are not wanted: an id says which text it is.
        forget
            Called with each of these ids that is gone.
        """
        columns = "row, chunk_id, source, ordinal, text"
        with self._catalog.snapshot():
            found = self._catalog.scan(columns)
            if known:
                # By the index of ids, which is far smaller than the table.
                places = self._catalog.rows("SELECT chunk_id, row FROM chunks ORDER BY chunk_id")
                rows = sorted(row for chunk_id, row in places if chunk_id not in known)
                found = self._catalog.select_in(columns, "row", rows)
                for gone in set(known).difference(chunk_id for chunk_id, _ in places):
                    forget(gone)
            for row, chunk_id, source, ordinal, text in found:
                if _is_named(chunk_id, source, ordinal, text):
                    use(chunk_id, text)
                else:
                    self._catalog.note(f"the text of chunk {row} is not what was written")
            return self._catalog.version()

    @checked
    def each_head(
        self, num_tokens: int, use: Callable[[str, bytes, int], None]
    ) -> tuple[int, bytes]:
        """Call `use` with each chunk's id, its first token ids and its number of tokens.

        The token ids are packed as in the row (`kvrag.ingest.schema.pack_ids`), at most
        `num_tokens` of them. Returns the version.
        """
        with self._catalog.snapshot():
            for row, chunk_id, head, length in self._catalog.scan(
                f"row, chunk_id, substr(token_ids, 1, {4 * num_tokens}), num_tokens"
            ):
                if isinstance(head, bytes) and isinstance(length, int):
                    use(chunk_id, head, length)
                else:
                    self._catalog.note(f"the tokens of chunk {row} are not what was written")
            return self._catalog.version()

    @checked
    def tokens_behind(self, row: int, most: int) -> list[tuple[int, bytes]]:
        """Return row number and token ids of the next chunks after a row, at most `most`.

        The token ids are packed as in the row (`kvrag.ingest.schema.pack_ids`).
        """
        found = self._catalog.rows(
            "SELECT row, token_ids FROM chunks WHERE row > ? ORDER BY row LIMIT ?", (row, most)
        )
        return [(number, ids if isinstance(ids, bytes) else b"") for number, ids in found]

    @checked
    def token_ids_of(self, rows: Sequence[int], chunk_ids: Sequence[str]) -> dict[str, bytes]:
        """Return token ids as `tokens_behind` does, by chunk id; leaves out unknown chunks."""
        columns = "chunk_id, token_ids"
        found = [
            *self._catalog.select_in(columns, "row", rows),
            *self._catalog.select_in(columns, "chunk_id", chunk_ids),
        ]
        return {
            chunk_id: ids
            for chunk_id, ids in found
            if isinstance(chunk_id, str) and isinstance(ids, bytes)
        }

    @checked
    def marks(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return row numbers and marks (`vector_mark`) of all chunks ``[m]``."""
        import numpy as np

        # By the index of ids, which is far smaller than the table.
        places = self._catalog.rows("SELECT row, chunk_id FROM chunks ORDER BY chunk_id")
        rows = np.fromiter((row for row, _ in places), np.int64, len(places))
        marks = np.fromiter((s.vector_mark(*one) for one in places), np.uint64, len(places))
        return rows, marks


def _is_named(chunk_id: object, source: object, ordinal: object, text: object) -> bool:
    """Return whether a chunk's id matches its text and place."""
    is_typed = isinstance(text, str) and isinstance(source, str) and isinstance(ordinal, int)
    return is_typed and chunk_id == chunk_id_of(source, ordinal, text)  # type: ignore[arg-type]
