"""The rows of a catalog as they are stored, sound or not: what upkeep checks and repairs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError
from kvrag.ingest.catalogfile import CatalogFile, checked, counted_state
from kvrag.ingest.rows import FileState, KeyOf, PackedChunk, StoredChunk, StoredDocument
from kvrag.ingest.schema import (
    ALL_CHUNK_COLUMNS,
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    NUM_TOKENS,
    State,
    damaged,
    joined,
    sound_chunk,
)

_SAMPLE = 100
_HAS_KEY = "(kv_key = :key OR row IN (SELECT row FROM other_keys WHERE kv_key = :key))"


class Stored:
    """All rows of a catalog, sound or not."""

    def __init__(self, catalog: CatalogFile) -> None:
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
                ("chunk", CHUNK_COLUMNS),
                ("document", DOCUMENT_COLUMNS),
                ("file", FILE_COLUMNS),
            )
            for row in self._catalog.rows(f"SELECT {columns} FROM {name}s LIMIT {_SAMPLE}")
        ]
        return bool(found) and not any(found)

    def state(self) -> tuple[State | None, State]:
        """Return the state, None if its row is damaged, and what it must be for the other rows."""
        state = self._catalog.state()
        return state, counted_state(self._catalog, 0 if state is None else state.generation)

    def rows(self, *, is_alone: bool = False) -> dict[Any, list[int]]:
        """Return the numbers of the readable chunk rows by source, in order.

        With `is_alone`, those of chunks without a context.
        """
        found: dict[Any, list[int]] = {}
        for row, source, length in self._catalog.scan("row, source, length(contexts)"):
            if length == 0 or not is_alone:
                found.setdefault(source, []).append(row)
        return found

    def chunks(self, rows: Sequence[int] | None = None) -> Iterator[StoredChunk]:
        """Yield what the readable chunk rows hold, all of them or some."""
        catalog, columns = self._catalog, ALL_CHUNK_COLUMNS
        checksums = catalog.checksums
        found = catalog.scan(columns) if rows is None else catalog.select_in(columns, "row", rows)
        for *values, keys, embedding, vector_checksum in found:
            vector = (*values[:2], embedding, vector_checksum)
            chunk: Chunk | None = None
            with contextlib.suppress(IndexFormatError):
                chunk = sound_chunk(values, checksums, catalog.path)
            yield StoredChunk(
                packed=PackedChunk(*values[:-1]),
                keys=keys,
                chunk=chunk,
                checksums=joined(values[-1], vector_checksum, ""),
                embedding=embedding if checksums.is_right("vector", vector) else None,
            )

    def documents(self, sources: Iterable[Any] = ()) -> list[tuple[StoredDocument, bool]]:
        """Return the readable documents, and whether each row is what was written.

        Documents with the given sources are found even if the table cannot be read in order.
        """
        select = f"SELECT {DOCUMENT_COLUMNS} FROM documents"
        rows = {row[0]: row for row in self._catalog.readable(select)}
        for source in sources:
            if source not in rows:
                for row in self._catalog.rows(f"{select} WHERE source = ?", (source,)):
                    rows[source] = row
        return [
            (StoredDocument(*row[:-1]), self._catalog.checksums.is_right("document", row))
            for row in rows.values()
        ]

    def files(self) -> list[tuple[FileState, bool]]:
        """Return the readable states of files, and whether each row is what was written."""
        rows = self._catalog.readable(f"SELECT {FILE_COLUMNS} FROM files")
        return [
            (FileState(*row[:-1]), self._catalog.checksums.is_right("file", row)) for row in rows
        ]

    @checked
    def keys(self) -> dict[str, int]:
        """Return the names of all KV that chunks refer to, each with its number of tokens.

        The number is 0 where it is damaged.
        """
        names = f"SELECT kv_key, {NUM_TOKENS} FROM chunks"
        others = (
            f"SELECT o.kv_key, {NUM_TOKENS} FROM other_keys o JOIN chunks ON chunks.row = o.row"
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
    def chunk_with(self, key: ChunkKey, key_of: KeyOf) -> Chunk:
        """Return a sound chunk whose KV has a given name, with only the context of that KV;
        `audit` has found one.
        """
        catalog = self._catalog
        for row in catalog.rows(
            f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE {_HAS_KEY} ORDER BY row", {"key": key.digest}
        ):
            if catalog.checksums.is_right("chunk", row):
                for one in sound_chunk(row, catalog.checksums, catalog.path).encodings():
                    if key_of(one) == key:
                        return one
        raise damaged(self._catalog.path, f"no chunk has the KV {key}")

    @checked
    def num_vectors(self, dim: int) -> int:
        """Return how many vectors the chunks have, a vector for each window of their texts."""
        counted = self._catalog.rows("SELECT SUM(LENGTH(embedding) / ?) FROM chunks", (4 * dim,))
        return counted[0][0] if counted and isinstance(counted[0][0], int) else 0
