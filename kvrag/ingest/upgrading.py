"""Upgrade of a catalog from before its rows had seals (schema 2)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from kvrag.chunk import chunk_id_of
from kvrag.errors import IndexFormatError
from kvrag.ingest.connection import catalog_error
from kvrag.ingest.rows import KeyOf
from kvrag.ingest.rowwriter import RowWriter
from kvrag.ingest.schema import CHUNK_COLUMNS, KEYS, SCHEMA, SCHEMA_VERSION, write_state

_UPGRADE = """
DROP TABLE state;
ALTER TABLE files ADD COLUMN inode INTEGER NOT NULL DEFAULT 0;
ALTER TABLE files ADD COLUMN ctime_ns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE files ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE documents ADD COLUMN num_chunks INTEGER NOT NULL DEFAULT 0;
ALTER TABLE documents ADD COLUMN chunks BLOB NOT NULL DEFAULT x'';
ALTER TABLE documents ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE chunks ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE chunks ADD COLUMN vector_seal BLOB NOT NULL DEFAULT x'';
"""


class CatalogUpgrade(RowWriter):
    """The part of `Catalog` that seals the rows of an older one."""

    def upgrade(self, key_of: KeyOf) -> None:
        """Seal the rows of a catalog of schema 2, in one transaction.

        A row that contradicts itself gets no seal: from then on it counts as damaged.

        Raises
        ------
        StoreError
            When the file cannot be written; it is then unchanged.
        """
        with self._lock:
            try:
                self._connection.execute("PRAGMA foreign_keys = OFF")
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._upgrade(key_of)
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("PRAGMA foreign_keys = ON")
            except self._sql.Error as error:
                raise catalog_error(self.path, error) from error
            self.is_old = False

    def _upgrade(self, key_of: KeyOf) -> None:
        execute = self._connection.execute
        (generation,) = execute("SELECT generation FROM state").fetchone() or (None,)
        if not isinstance(generation, int):
            generation = time.time_ns()
        for name in ("added", "removed", "changed"):  # of an index of words within the catalog
            execute(f"DROP TRIGGER IF EXISTS chunk_words_{name}")
        with contextlib.suppress(self._sql.DatabaseError):  # damaged: it stays without effect
            execute("DROP TABLE IF EXISTS chunk_words")
        for statement in filter(str.strip, _UPGRADE.split(";")):
            execute(statement)
        execute(SCHEMA[SCHEMA.index("CREATE TABLE state") : SCHEMA.index("CREATE TABLE files")])
        columns = f"{CHUNK_COLUMNS}, {KEYS}, embedding, vector_seal"
        for number in [row for (row,) in execute("SELECT row FROM chunks")]:
            for values in self._rows(f"SELECT {columns} FROM chunks WHERE row = ?", (number,)):
                self._seal_chunk(values, key_of)
        for row in execute("SELECT source, file, digest, metadata FROM documents").fetchall():
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                values = (*row, *self._chunks_of(row[0]))
                execute(
                    "UPDATE documents SET num_chunks = ?, chunks = ?, seal = ? WHERE source = ?",
                    (*values[4:], self._seals.document(values), row[0]),
                )
        for row in execute("SELECT path, digest, size_bytes, mtime_ns FROM files").fetchall():
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                seal = self._seals.file((*row, 0, 0))
                execute("UPDATE files SET seal = ? WHERE path = ?", (seal, row[0]))
        write_state(self._connection, self._seals, self._counted(generation + 1))
        execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _seal_chunk(self, values: Sequence[Any], key_of: KeyOf) -> None:
        """Seal a row that has no seal; a row that contradicts itself stays without."""
        import numpy as np

        *row, _, stored, embedding, _ = values
        try:
            seal = self._seals.chunk(row)
            chunk = self._chunk((*row, seal))
            keys = " ".join(key_of(one).digest for one in chunk.encodings())
            if chunk.chunk_id != chunk_id_of(chunk.source, chunk.ordinal, chunk.text):
                return
            if (keys, len(chunk.token_ids)) != (stored, row[7]):
                return
            self._connection.execute("UPDATE chunks SET seal = ? WHERE row = ?", (seal, row[0]))
            vector = np.frombuffer(embedding, dtype="<f4")
            if np.isfinite(vector).all() and vector.any():
                self._connection.execute(
                    "UPDATE chunks SET vector_seal = ? WHERE row = ?",
                    (self._seals.vector((row[0], chunk.chunk_id, embedding)), row[0]),
                )
        except (IndexFormatError, TypeError, ValueError, AttributeError):
            return
