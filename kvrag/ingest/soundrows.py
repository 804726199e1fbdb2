"""Reads of the catalog's rows that return only sound ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.errors import IndexFormatError
from kvrag.ingest.catalogfile import CatalogFile, checked
from kvrag.ingest.connection import is_damage
from kvrag.ingest.rows import FileState, unpack_chunk
from kvrag.ingest.schema import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    KEYS,
    State,
    StoredDocument,
    joined,
    seal_number,
)

NOT_WRITING = State(0)

_SAMPLE = 100
_BATCH = 500  # below SQLite's limit on the parameters of a statement

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


class SoundRows(CatalogFile):
    """The part of `Catalog` that reads rows and compares their seals.

    Attributes
    ----------
    on_damage
        Called for every row that is left out because it is damaged.
    num_noted
        Number of those calls.
    """

    def __init__(
        self, path: Path, *, seal_key: bytes = b"", cipher_key: bytes | None = None
    ) -> None:
        super().__init__(path, seal_key=seal_key, cipher_key=cipher_key)
        self.on_damage: Callable[[str], None] = lambda _: None
        self.num_noted = 0
        self._state_now = NOT_WRITING

    def _note(self, what: str) -> None:
        self.num_noted += 1
        self.on_damage(f"{self.path}: {what}")

    def _rows(
        self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Return rows; none, and a note of the damage, if they cannot be read."""
        try:
            return self._connection.execute(statement, values).fetchall()
        except self._sql.DatabaseError as error:
            if self._go_on(error):
                return self._rows(statement, values)
            return []

    def _go_on(self, error: sqlite3.DatabaseError) -> bool:
        """Note an error caused by damage and make the connection usable again; raise others.

        After a page fails authentication, SQLCipher refuses all others. Invalid UTF-8 is decoded
        to other text from now on, and the seal reveals it: True means that the caller tries again.
        """
        if not is_damage(error):
            raise error
        if "Could not decode" in str(error) and self._connection.text_factory is str:
            self._connection.text_factory = _decoded
            return True
        self._note(str(error))
        if self._cipher_key is not None and self._state_now is NOT_WRITING:
            self._connect()
        return False

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

    def _is_sound(self, values: Sequence[Any]) -> bool:
        """Return whether a chunk's row (`CHUNK_COLUMNS`) is unchanged."""
        return self._seals.is_right(values[10], self._seals.chunk, values[:10])

    def _is_vector_sound(self, values: Sequence[Any]) -> bool:
        """Return whether a chunk's vector (`VECTOR_COLUMNS`) is unchanged."""
        return self._seals.is_right(values[3], self._seals.vector, values[:3])

    def _chunk(self, values: Sequence[Any]) -> Chunk:
        """Return the chunk of a row (`CHUNK_COLUMNS`). Raises IndexFormatError."""
        _, chunk_id, source, ordinal, text, ids, starts, _, metadata, contexts, _ = values
        if not self._is_sound(values):
            raise self._damaged(
                f"chunk {shown(chunk_id)} of {shown(source)} is not what was written"
            )
        try:
            return unpack_chunk((chunk_id, text, ids, starts, source, ordinal, metadata, contexts))
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"chunk {shown(chunk_id)} of {shown(source)}: {error}") from error

    def _sound_chunk(self, values: Sequence[Any]) -> Chunk | None:
        """Return the chunk of a row, or None and a note of the damage."""
        if self._is_sound(values):
            return self._chunk(values)
        self._note(f"chunk {shown(values[1])} of {shown(values[2])} is not what was written")
        return None

    def _sound_documents(self, where: str, values: Sequence[Any] = ()) -> list[StoredDocument]:
        """Return the documents with sound rows; damage in the others is noted."""
        found = []
        for *row, seal in self._rows(f"SELECT {DOCUMENT_COLUMNS} FROM documents {where}", values):
            if self._seals.is_right(seal, self._seals.document, row):
                found.append(StoredDocument(*row))
            else:
                self._note(f"the entry of document {shown(row[0])} is not what was written")
        return found

    def _sound_files(self, where: str, values: Sequence[Any] = ()) -> list[FileState]:
        """Return the file states with sound rows; damage in the others is noted."""
        found = []
        for *row, seal in self._rows(f"SELECT {FILE_COLUMNS} FROM files {where}", values):
            if self._seals.is_right(seal, self._seals.file, row):
                found.append(FileState(*row))
            else:
                self._note(f"the entry of file {shown(row[0])} is not what was written")
        return found

    def _is_whole(self, document: StoredDocument) -> bool:
        """Return whether all chunks of a document are present and unchanged."""
        if not self._has_its_chunks(document):
            self._note(f"the chunks of document {shown(document.source)} are not what was written")
            return False
        return True

    def _has_its_chunks(self, document: StoredDocument) -> bool:
        seals = []
        for values in self._rows(
            f"SELECT {CHUNK_COLUMNS}, embedding, vector_seal, {KEYS}, {_IS_FOUND} FROM chunks "
            # By row, so that the table is compared and not its index.
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
        """Return the state, or None if its row is damaged or missing."""
        rows = self._rows(
            "SELECT generation, num_documents, documents, num_files, files, seal FROM state"
        )
        if len(rows) == 1 and self._seals.is_right(rows[0][5], self._seals.state, rows[0][:5]):
            generation, num_documents, documents, num_files, files, _ = rows[0]
            return State(
                generation, num_documents, seal_number(documents), num_files, seal_number(files)
            )
        return None

    @checked
    def is_foreign(self) -> bool:
        """Return whether the catalog has rows, and another index wrote them.

        Damage does not look like this: it leaves the state's row, or some other row, as it was.
        """
        if self._state() is not None:
            return False
        found = [
            self._seals.is_right(seal, make, row)
            for columns, table, make in (
                (CHUNK_COLUMNS, "chunks", self._seals.chunk),
                (DOCUMENT_COLUMNS, "documents", self._seals.document),
                (FILE_COLUMNS, "files", self._seals.file),
            )
            for *row, seal in self._rows(f"SELECT {columns} FROM {table} LIMIT {_SAMPLE}")
        ]
        return bool(found) and not any(found)

    def _counted(self, generation: int) -> State:
        """Return the state computed from the existing rows."""
        state = State(generation)
        for (seal,) in self._rows("SELECT seal FROM documents"):
            state.count_document(seal, 1)
        for (seal,) in self._rows("SELECT seal FROM files"):
            state.count_file(seal, 1)
        return state

    def _damaged(self, what: str) -> IndexFormatError:
        return IndexFormatError(
            f"{self.path} is damaged ({what}); run 'kvrag verify --repair', or ingest its "
            "document again"
        )


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")
