"""The catalog: documents and chunks in one SQLite file.

The catalog holds everything except the KV itself. The other files in the index folder (the caches
of vectors and words) can be rebuilt from it. Each change is one transaction that increases the
generation by one: a reader compares generations to find out whether its copy is stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey, chunk_id_of
from kvrag.errors import IndexFormatError
from kvrag.ingest.catalogfile import CatalogFile, checked
from kvrag.ingest.filters import searched_fields
from kvrag.ingest.rows import (
    Change,
    DocumentRow,
    Encoding,
    FileState,
    KeyOf,
    StoredChunk,
    VectorRows,
    unpack_json,
    vector_mark,
)
from kvrag.ingest.rowwriter import RowWriter
from kvrag.ingest.schema import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    FILE_NAME,
    KEYS,
    NAMES,
    NO_GENERATION,
    SCHEMA_VERSION,
    STATE_COLUMNS,
    VECTOR_COLUMNS,
    State,
    StoredDocument,
    damaged,
    joined,
    sound_chunk,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvrag.ingest.filters import Filter

__all__ = ["FILE_NAME", "SCHEMA_VERSION", "Catalog"]

_SAMPLE = 100
_BATCH = 500  # below SQLite's limit on the parameters of a statement
_LARGEST_ROW = 1 << 52
_ALL_CHUNK_COLUMNS = f"{CHUNK_COLUMNS}, {KEYS}, embedding, vector_seal"
# Reads of no row that need all columns.
_NO_ROWS = (
    f"SELECT {_ALL_CHUNK_COLUMNS} FROM chunks LIMIT 0",
    f"SELECT {DOCUMENT_COLUMNS} FROM documents LIMIT 0",
    f"SELECT {FILE_COLUMNS} FROM files LIMIT 0",
    "SELECT row, place, kv_key FROM other_keys LIMIT 0",
    f"SELECT {STATE_COLUMNS} FROM state LIMIT 0",
)
# A chunk's number of tokens, 0 if it is not that of its token ids: it may be any value.
_NUM_TOKENS = (
    "(CASE WHEN typeof(token_ids) = 'blob' AND typeof(num_tokens) = 'integer' "
    "AND LENGTH(token_ids) = 4 * num_tokens THEN num_tokens ELSE 0 END)"
)
_HAS_KEY = "(kv_key = :key OR row IN (SELECT row FROM other_keys WHERE kv_key = :key))"
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
    encoding
        How the index encodes its chunks; needed to remove some, and to change them.
    """

    encoding: Encoding | None = None

    # -- documents and files -----------------------------------------------------------------

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
    def distrusted(self) -> list[str]:
        """Return the documents that are incomplete, or not known to be complete."""
        return [one.source for one in self._sound_documents("WHERE digest = '' ORDER BY source")]

    # -- chunks ------------------------------------------------------------------------------

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
        raise damaged(self.path, f"no chunk has the KV {key}")

    # -- words -------------------------------------------------------------------------------

    @checked
    def search_words(
        self, question: str, k: int, wanted: Filter | None = None
    ) -> list[tuple[int, float]]:
        """Return row number and score of the `k` best chunks by words (`kvrag.ingest.words`)."""
        with self._searching():
            return self._words.search(self, question, k, wanted)

    @checked
    def rows_of(self, wanted: Filter) -> list[int]:
        """Return the numbers of the chunk rows that a filter admits, ascending."""
        with self._searching():
            return self._words.rows(self, wanted)

    @contextlib.contextmanager
    def _searching(self) -> Iterator[None]:
        with self._snapshot():
            yield
        self._words.discard_if_older(self.mark())

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

    def mark(self) -> bytes:
        """Return 16 bytes that change whenever the catalog changes."""
        return self._checksums.whole([repr(self._rows("SELECT * FROM state")).encode()])

    def row_checksums(self) -> Iterator[tuple[int, object]]:
        """Yield the number and the checksum of each readable chunk row."""
        yield from self._scan("row, seal")

    def sound_texts(
        self, rows: Sequence[int]
    ) -> Iterator[tuple[int, bytes, str, Mapping[str, Any]]]:
        """Yield number, checksum, text and fields of each sound chunk row."""
        for values in self._select_in(CHUNK_COLUMNS, "row", rows):
            if self._is_sound(values):
                row, _, source, ordinal, text, *_, metadata, _, checksum = values
                yield row, checksum, text, searched_fields(source, ordinal, unpack_json(metadata))

    # -- all chunks, for the copies that searches and matching use ---------------------------

    @checked
    def version(self) -> tuple[int, bytes]:
        """Return how many transactions have changed the catalog, and a digest of the documents'
        contents; -1 and nothing if that row is damaged.
        """
        state = self._state()
        return (NO_GENERATION, b"") if state is None else state.version

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
        with self._snapshot():
            found = self._scan(columns)
            if known:
                # By the index of ids, which is far smaller than the table.
                places = self._rows("SELECT chunk_id, row FROM chunks ORDER BY chunk_id")
                rows = sorted(row for chunk_id, row in places if chunk_id not in known)
                found = self._select_in(columns, "row", rows)
                for gone in set(known).difference(chunk_id for chunk_id, _ in places):
                    forget(gone)
            for row, chunk_id, source, ordinal, text in found:
                if _is_named(chunk_id, source, ordinal, text):
                    use(chunk_id, text)
                else:
                    self._note(f"the text of chunk {row} is not what was written")
            return self.version()

    @checked
    def each_head(
        self, num_tokens: int, use: Callable[[str, bytes, int], None]
    ) -> tuple[int, bytes]:
        """Call `use` with each chunk's id, its first token ids and its number of tokens.

        The token ids are packed as in the row (`kvrag.ingest.rows.pack_ids`), at most
        `num_tokens` of them. They may be damaged: use them only to compare, and read the chunk
        before you use it. Returns the version.
        """
        with self._snapshot():
            for row, chunk_id, head, length in self._scan(
                f"row, chunk_id, substr(token_ids, 1, {4 * num_tokens}), num_tokens"
            ):
                if isinstance(head, bytes) and isinstance(length, int):
                    use(chunk_id, head, length)
                else:
                    self._note(f"the tokens of chunk {row} are not what was written")
            return self.version()

    @checked
    def tokens_behind(self, row: int, most: int) -> list[tuple[int, bytes]]:
        """Return row number and token ids of the next chunks after a row, at most `most`.

        The token ids are packed as in the row (`kvrag.ingest.rows.pack_ids`). They may be damaged:
        use them only to compare, and read the chunk before you use it.
        """
        found = self._rows(
            "SELECT row, token_ids FROM chunks WHERE row > ? ORDER BY row LIMIT ?", (row, most)
        )
        return [(number, ids if isinstance(ids, bytes) else b"") for number, ids in found]

    @checked
    def token_ids_of(self, rows: Sequence[int], chunk_ids: Sequence[str]) -> dict[str, bytes]:
        """Return token ids as `tokens_behind` does, by chunk id; leaves out unknown chunks."""
        columns = "chunk_id, token_ids"
        found = [
            *self._select_in(columns, "row", rows),
            *self._select_in(columns, "chunk_id", chunk_ids),
        ]
        return {
            chunk_id: ids
            for chunk_id, ids in found
            if isinstance(chunk_id, str) and isinstance(ids, bytes)
        }

    @checked
    def num_vectors(self, dim: int) -> int:
        """Return how many vectors the chunks have, a vector for each window of their texts."""
        counted = self._rows("SELECT SUM(LENGTH(embedding) / ?) FROM chunks", (4 * dim,))
        return counted[0][0] if counted and isinstance(counted[0][0], int) else 0

    @checked
    def vectors(self, dim: int, known: NDArray[np.uint64] | None = None) -> VectorRows:
        """Return the vectors of the chunks, in order of row number.

        Leaves out vectors that differ from what was written.

        Parameters
        ----------
        known
            Marks of chunks whose vectors are not wanted ``[m]``; None wants all.
        """
        import numpy as np

        with self._snapshot():
            present, num_rows = np.empty(0, np.uint64), 0
            found = self._scan(VECTOR_COLUMNS)
            if known is not None:
                rows, present = self.marks()
                num_rows = len(rows)
                new = np.sort(rows[~np.isin(present, known)])
                found = self._select_in(VECTOR_COLUMNS, "row", new.tolist())
            owners: list[tuple[int, int, int]] = []
            vectors: list[NDArray[np.float32]] = [np.empty((0, dim), np.float32)]
            for values in found:
                num_rows += known is None
                sound = self._is_vector_sound(values)
                num, rest = divmod(len(values[2]), 4 * dim) if sound else (0, 0)
                if num and not rest:
                    owners.append((values[0], vector_mark(*values[:2]), num))
                    vectors.append(np.frombuffer(values[2], dtype="<f4").reshape(num, dim))
                else:
                    self._note(f"the vector of chunk {values[0]} is not what was written")
            expected = self._rows("SELECT ifnull(sum(num_chunks), 0) FROM documents")
            if expected and expected[0][0] != num_rows:
                # Or a cache of what is left would count as that of all, once they are back.
                self._note(f"{num_rows} chunks are there, documents have {expected[0][0]}")
            counts = [num for *_, num in owners]
            return VectorRows(
                self.version()[1],
                present,
                np.repeat(np.array([row for row, *_ in owners], np.int64), counts),
                np.repeat(np.array([mark for _, mark, _ in owners], np.uint64), counts),
                np.concatenate(vectors, dtype=np.float32),
            )

    @checked
    def marks(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return row numbers and marks (`kvrag.ingest.rows.vector_mark`) of all chunks ``[m]``."""
        import numpy as np

        # By the index of ids, which is far smaller than the table.
        places = self._rows("SELECT row, chunk_id FROM chunks ORDER BY chunk_id")
        rows = np.fromiter((row for row, _ in places), np.int64, len(places))
        marks = np.fromiter((vector_mark(*one) for one in places), np.uint64, len(places))
        return rows, marks

    # -- what is stored, sound or not --------------------------------------------------------

    @checked
    def damage(self) -> list[str]:
        """Return the problems that SQLite's own check finds in the file; empty if it is sound."""
        try:
            there = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master")}
            if missing := [name for name in NAMES if name not in there]:
                return [f"it has no {name}" for name in missing]
            for statement in _NO_ROWS:
                self._connection.execute(statement)
            rows = self._connection.execute("PRAGMA integrity_check(10)").fetchall()
        except self._sql.DatabaseError as error:  # too damaged for the check itself
            self._go_on(error)
            return [str(error)]
        return [str(text) for (text,) in rows if text != "ok"]

    @checked
    def has_sound_tables(self) -> bool:
        """Return whether all rows of documents and files are present and unchanged.

        Chunks are not checked here: a document's are checked when it is added again.
        """
        state = self._state()
        if state is None or state != self._counted(state.generation):
            return False
        for table in ("documents", "files"):  # and their indexes
            if self._rows(f"PRAGMA integrity_check({table})") != [("ok",)]:
                return False
        return all(is_right for _, is_right in (*self.stored_documents(), *self.stored_files()))

    @checked
    def is_foreign(self) -> bool:
        """Return whether the catalog has rows, and another index wrote them.

        Damage does not look like this: it leaves the state's row, or some other row, as it was.
        """
        if self._state() is not None:
            return False
        found = [
            self._checksums.is_right(name, row)
            for name, columns in (
                ("chunk", CHUNK_COLUMNS),
                ("document", DOCUMENT_COLUMNS),
                ("file", FILE_COLUMNS),
            )
            for row in self._rows(f"SELECT {columns} FROM {name}s LIMIT {_SAMPLE}")
        ]
        return bool(found) and not any(found)

    def stored_state(self) -> tuple[State | None, State]:
        """Return the state, None if its row is damaged, and what it must be for the other rows."""
        state = self._state()
        return state, self._counted(0 if state is None else state.generation)

    def stored_rows(self) -> dict[Any, list[int]]:
        """Return the numbers of the readable chunk rows by source, in order."""
        found: dict[Any, list[int]] = {}
        for row, source in self._scan("row, source"):
            found.setdefault(source, []).append(row)
        return found

    def rows_alone(self) -> dict[Any, list[int]]:
        """Return the numbers of the chunk rows without a context, by source."""
        found: dict[Any, list[int]] = {}
        for row, source, length in self._scan("row, source, length(contexts)"):
            if length == 0:
                found.setdefault(source, []).append(row)
        return found

    def stored_chunks(self, rows: Sequence[int] | None = None) -> Iterator[StoredChunk]:
        """Yield what the readable chunk rows hold, all of them or some."""
        columns = _ALL_CHUNK_COLUMNS
        found = self._scan(columns) if rows is None else self._select_in(columns, "row", rows)
        for *values, keys, embedding, vector_checksum in found:
            vector = (values[0], values[1], embedding, vector_checksum)
            chunk: Chunk | None = None
            with contextlib.suppress(IndexFormatError):
                chunk = self._chunk(values)
            yield StoredChunk(
                row=values[0],
                chunk_id=values[1],
                source=values[2],
                ordinal=values[3],
                num_tokens=values[7],
                chunk=chunk,
                keys=keys,
                checksums=joined(values[10], vector_checksum, ""),
                embedding=embedding if self._is_vector_sound(vector) else None,
            )

    def stored_documents(self, sources: Iterable[Any] = ()) -> list[tuple[StoredDocument, bool]]:
        """Return the readable documents, and whether each row is what was written.

        Documents with the given sources are found even if the table cannot be read in order.
        """
        select = f"SELECT {DOCUMENT_COLUMNS} FROM documents"
        rows = {row[0]: row for row in self._readable(select)}
        for source in sources:
            if source not in rows:
                for row in self._rows(f"{select} WHERE source = ?", (source,)):
                    rows[source] = row
        return [
            (StoredDocument(*row[:-1]), self._checksums.is_right("document", row))
            for row in rows.values()
        ]

    def stored_files(self) -> list[tuple[FileState, bool]]:
        """Return the readable states of files, and whether each row is what was written."""
        rows = self._readable(f"SELECT {FILE_COLUMNS} FROM files")
        return [(FileState(*row[:-1]), self._checksums.is_right("file", row)) for row in rows]

    def checksum_of(self, parts: Iterable[bytes]) -> bytes:
        """Return the checksum of a document's chunks, of what each contributes (`joined`)."""
        return self._checksums.whole(parts)

    # -- writing -----------------------------------------------------------------------------

    @checked
    def write(self, change: Change) -> int:
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
            rows = RowWriter(self._connection, self._checksums, self.path, state, self.encoding)
            return rows.write(change)

    # -- reading rows ------------------------------------------------------------------------

    def _select_in(
        self, columns: str, column: str, values: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the readable chunk rows that have one of some values in a column."""
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
        """Yield all readable chunk rows, in order; `columns` begin with row."""
        last = -1
        try:
            for values in self._connection.execute(f"SELECT {columns} FROM chunks ORDER BY row"):
                last = values[0]
                yield values
        except self._sql.DatabaseError as error:
            self._go_on(error)
            yield from self._select_in(columns, "row", self._rows_behind(last))

    def _rows_behind(self, last: int) -> Sequence[int]:
        """Return the row numbers after the one at which reading the table in order failed."""
        found = self._rows(
            "SELECT row FROM chunks INDEXED BY chunks_by_source WHERE row > ? ORDER BY row", (last,)
        )
        if found:
            return [row for (row,) in found]
        highest = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'")
        number = highest[0][0] if highest and isinstance(highest[0][0], int) else 0
        return range(last + 1, min(number, last + 10_000_000) + 1)

    def _readable(self, statement: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a statement up to the first unreadable one."""
        try:
            yield from self._connection.execute(statement)
        except self._sql.DatabaseError as error:
            if self._go_on(error):
                yield from self._connection.execute(statement)

    def _is_vector_sound(self, values: Sequence[Any]) -> bool:
        """Return whether a chunk's vector (`VECTOR_COLUMNS`) is unchanged."""
        return self._checksums.is_right("vector", values)

    def _is_sound(self, values: Sequence[Any]) -> bool:
        """Return whether a chunk's row (`CHUNK_COLUMNS`) is unchanged."""
        return self._checksums.is_right("chunk", values)

    def _chunk(self, values: Sequence[Any]) -> Chunk:
        """Return the chunk of a row (`CHUNK_COLUMNS`). Raises IndexFormatError."""
        return sound_chunk(values, self._checksums, self.path)

    def _sound_chunk(self, values: Sequence[Any]) -> Chunk | None:
        """Return the chunk of a row, or None and a note of the damage."""
        if self._is_sound(values):
            return self._chunk(values)
        self._note(f"chunk {shown(values[1])} of {shown(values[2])} is not what was written")
        return None

    def _sound_documents(self, where: str, values: Sequence[Any] = ()) -> list[StoredDocument]:
        """Return the documents with sound rows; damage in the others is noted."""
        return [StoredDocument(*row) for row in self._sound("document", where, values)]

    def _sound_files(self, where: str, values: Sequence[Any] = ()) -> list[FileState]:
        """Return the file states with sound rows; damage in the others is noted."""
        return [FileState(*row) for row in self._sound("file", where, values)]

    def _sound(self, name: str, where: str, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
        columns = {"document": DOCUMENT_COLUMNS, "file": FILE_COLUMNS}[name]
        for row in self._rows(f"SELECT {columns} FROM {name}s {where}", values):
            if self._checksums.is_right(name, row):
                yield row[:-1]
            else:
                self._note(f"the entry of {name} {shown(row[0])} is not what was written")

    def _is_whole(self, document: StoredDocument) -> bool:
        """Return whether all chunks of a document are present and unchanged."""
        if not self._has_its_chunks(document):
            self._note(f"the chunks of document {shown(document.source)} are not what was written")
            return False
        return True

    def _has_its_chunks(self, document: StoredDocument) -> bool:
        parts = []
        for *chunk, keys, embedding, vector_checksum, found in self._rows(
            f"SELECT {_ALL_CHUNK_COLUMNS}, {_IS_FOUND} FROM chunks "
            # By row, so that the table is compared and not its index.
            "NOT INDEXED WHERE row IN (SELECT row FROM chunks WHERE source = ?) ORDER BY ordinal",
            (document.source,),
        ):
            vector = (*chunk[:2], embedding, vector_checksum)
            if not (found and self._is_sound(chunk) and self._is_vector_sound(vector)):
                return False
            parts.append(joined(chunk[10], vector_checksum, keys))
        return (len(parts), self._checksums.whole(parts)) == (document.num_chunks, document.chunks)


def _is_named(chunk_id: object, source: object, ordinal: object, text: object) -> bool:
    """Return whether a chunk's id matches its text and place."""
    is_typed = isinstance(text, str) and isinstance(source, str) and isinstance(ordinal, int)
    return is_typed and chunk_id == chunk_id_of(source, ordinal, text)  # type: ignore[arg-type]
