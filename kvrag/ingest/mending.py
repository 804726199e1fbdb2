"""Check of the catalog against its seals, and repair of what can be repaired."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvrag.arguments import shown
from kvrag.chunk import chunk_id_of
from kvrag.errors import IndexFormatError
from kvrag.ingest.audit import Audit
from kvrag.ingest.catalogfile import checked
from kvrag.ingest.connection import next_path
from kvrag.ingest.rows import KeyOf, pack_json
from kvrag.ingest.rowwriter import RowWriter
from kvrag.ingest.schema import (
    APPLICATION_ID,
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    FILE_COLUMNS,
    KEYS,
    SCHEMA,
    SCHEMA_VERSION,
    StoredDocument,
    joined,
)
from kvrag.sqlitefile import unlock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Embed: TypeAlias = "Callable[[str], NDArray[np.float32]]"

# All columns of a chunk's row.
_ALL_CHUNK_COLUMNS = f"{CHUNK_COLUMNS}, kv_key, embedding, vector_seal"
# Tables and indexes of the file, and reads of no row that need all columns.
_NAMES = re.findall(r"CREATE (?:TABLE|INDEX) (\w+)", SCHEMA)
_COLUMNS = (
    f"SELECT {_ALL_CHUNK_COLUMNS} FROM chunks LIMIT 0",
    f"SELECT {DOCUMENT_COLUMNS} FROM documents LIMIT 0",
    f"SELECT {FILE_COLUMNS} FROM files LIMIT 0",
    "SELECT row, place, kv_key FROM other_keys LIMIT 0",
    "SELECT generation, num_documents, documents, num_files, files, seal FROM state LIMIT 0",
)
# The metadata that the chunker adds to a document's.
_ADDED_METADATA = ("heading", "headings", "page", "start")


class CatalogMending(RowWriter):
    """The part of `Catalog` that finds damage and repairs it."""

    @checked
    def audit(self, key_of: KeyOf) -> Audit:
        """Check every row against its seal, and the tables against each other.

        Parameters
        ----------
        key_of
            Returns the name that a chunk's KV must have, the first of several.
        """
        found = Audit()
        with self._snapshot():
            noted, self.on_damage = self.on_damage, lambda _: None
            try:
                seals = self._audit_chunks(found, key_of)
                self._audit_documents(found, seals)
            finally:
                self.on_damage = noted
        return found

    @checked
    def damage(self) -> list[str]:
        """Return the problems that SQLite's own check finds in the file; empty if it is sound."""
        try:
            there = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master")}
            if missing := [name for name in _NAMES if name not in there]:
                return [f"it has no {name}" for name in missing]
            for statement in _COLUMNS:
                self._connection.execute(statement)
            rows = self._connection.execute("PRAGMA integrity_check(10)").fetchall()
        except self._sql.DatabaseError as error:  # too damaged for the check itself
            self._go_on(error)
            return [str(error)]
        return [str(text) for (text,) in rows if text != "ok"]

    def _audit_chunks(self, found: Audit, key_of: KeyOf) -> dict[Any, list[tuple[Any, bytes]]]:
        """Return ordinal and seal of each chunk, by source."""
        seals: dict[Any, list[tuple[Any, bytes]]] = {}
        columns = f"{CHUNK_COLUMNS}, {KEYS}, embedding, vector_seal"
        for values in self._scan(columns):
            *row, stored, embedding, vector_seal = values
            found.num_chunks += 1
            number, chunk_id, source, ordinal, num_tokens = (*row[:4], row[7])
            place = f"{source}, chunk {ordinal} ({chunk_id})"
            seals.setdefault(source, []).append((ordinal, joined(row[10], vector_seal, stored)))
            if not self._is_vector_sound((number, chunk_id, embedding, vector_seal)):
                found.vectors[number] = f"{place}: its vector is not what was written"
            try:
                chunk = self._chunk(row)
            except IndexFormatError:
                found.chunks[number] = f"{place}: {_what(row)} not what was written"
                continue
            keys = {key_of(one): one.contexts[0] for one in chunk.encodings()}
            expected = " ".join(key.digest for key in keys)
            for key, context_ids in keys.items():
                is_optional = chunk.is_optional(context_ids)
                (found.optional if is_optional else found.needed)[key] = num_tokens
            if stored != expected:
                found.names[number] = f"{place}: names the KV {shown(stored)}, expected {expected}"
        return seals

    def _audit_documents(self, found: Audit, seals: dict[Any, list[tuple[Any, bytes]]]) -> None:
        for *row, seal in self._rows(f"SELECT {DOCUMENT_COLUMNS} FROM documents"):
            source, num_chunks = row[0], row[4]
            chunks = sorted(seals.pop(source, []), key=lambda one: str(one[0]).zfill(20))
            if not self._seals.is_right(seal, self._seals.document, row):
                found.documents[source] = f"{source}: its entry is not what was written"
            elif num_chunks != len(chunks):
                found.documents[source] = (
                    f"{source}: it had {num_chunks} chunks, {len(chunks)} are there"
                )
            elif row[5] != self._seals.whole(one for _, one in chunks):
                found.documents[source] = f"{source}: its chunks are not those that it had"
        for source, chunks in seals.items():
            found.documents[source] = (
                f"{source}: its entry is missing, {len(chunks)} of its chunks are there"
            )
        for *row, seal in self._rows(f"SELECT {FILE_COLUMNS} FROM files"):
            if not self._seals.is_right(seal, self._seals.file, row):
                found.files[row[0]] = f"{row[0]}: the recorded state of this file is damaged"
        state = self._state()
        if state is None:
            found.others.append("the catalog's own state is not what was written")
            return
        found.num_documents = state.num_documents
        counted = self._counted(state.generation)
        if (state.num_documents, state.documents) != (counted.num_documents, counted.documents):
            found.others.append(
                f"there were {state.num_documents:,} documents, {counted.num_documents:,} are there"
                if state.num_documents != counted.num_documents
                else "the documents differ from those that were written"
            )
        if (state.num_files, state.files) != (counted.num_files, counted.files):
            found.others.append("recorded states of files are missing")

    # -- mending -----------------------------------------------------------------------------

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
        tables = (
            (f"SELECT {DOCUMENT_COLUMNS} FROM documents", self._seals.document),
            (f"SELECT {FILE_COLUMNS} FROM files", self._seals.file),
        )
        return all(
            self._seals.is_right(seal, make, row)
            for statement, make in tables
            for *row, seal in self._rows(statement)
        )

    @checked
    def mend(self, audit: Audit, key_of: KeyOf, embed: Embed) -> list[str]:
        """Repair the catalog: drop damaged rows, and rewrite what follows from the others.

        Vectors are computed again from their text, names of KV from their tokens, and a
        document's row from its chunks. A chunk with other damage is removed. Its document is marked
        as incomplete, so that adding it again writes it again.

        Parameters
        ----------
        audit
            The result of `audit`.
        key_of
            Returns the name that a chunk's KV must have, the first of several.
        embed
            Returns the vectors ``[num_windows, dim]`` of a text.

        Returns
        -------
        list of str
            Files to read again: those of the affected documents, or all files if it is unknown
            which documents are missing.
        """
        # All document rows are rewritten; the rows that refer to them stay.
        self._connection.execute("PRAGMA foreign_keys = OFF")
        try:
            with self._transaction():
                return self._mend(audit, key_of, embed)
        finally:
            self._connection.execute("PRAGMA foreign_keys = ON")

    def _mend(self, audit: Audit, key_of: KeyOf, embed: Embed) -> list[str]:
        known = {one.path for one in self._sound_files("")}
        documents = {one.source: one for one in self._sound_documents("")}
        # A damaged source names no document: only the sources in sound rows count.
        distrusted = set(audit.documents)
        for number in audit.chunks:
            for (source,) in self._connection.execute(
                "DELETE FROM chunks WHERE row = ? RETURNING source", (number,)
            ).fetchall():
                distrusted.add(source)
        for number in audit.vectors.keys() - audit.chunks.keys():
            distrusted |= self._embed_again(number, embed)
        for number in audit.names.keys() - audit.chunks.keys():
            for values in self._rows(
                f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE row = ?", (number,)
            ):
                chunk = self._chunk(values)
                self._write_contexts(chunk, [key_of(one) for one in chunk.encodings()])
                distrusted.add(chunk.source)
        execute = self._connection.execute
        execute("DELETE FROM other_keys WHERE row NOT IN (SELECT row FROM chunks)")
        execute("DELETE FROM documents")
        for one in documents.values():
            self._write_document(one)
        paths = set()
        for source in distrusted:
            document = documents.get(source)
            file = document.file if document is not None else _file_of(source, known)
            if file is not None:
                paths.add(file)
                self._drop_file(file)
            self._restore_document(source, document, file)
        if audit.others or audit.structure:
            paths |= known  # a document is missing, and nothing says which
        if audit.others or audit.structure or audit.files:
            self._drop_all_files()
        self._state_now = self._counted(max(self._state_now.generation, time.time_ns()))
        return sorted(paths)

    def _embed_again(self, number: int, embed: Embed) -> set[str]:
        """Compute a chunk's vectors again from its sound text; return the document changed."""
        import numpy as np

        for chunk_id, source, text in self._rows(
            "SELECT chunk_id, source, text FROM chunks WHERE row = ?", (number,)
        ):
            vector = np.asarray(embed(text), dtype="<f4").tobytes()
            self._connection.execute(
                "UPDATE chunks SET embedding = ?, vector_seal = ? WHERE row = ?",
                (vector, self._seals.vector((number, chunk_id, vector)), number),
            )
            return {source}
        return set()

    def _restore_document(
        self, source: str, document: StoredDocument | None, file: str | None
    ) -> None:
        """Rewrite a document's row from its chunks, or remove it if there are none."""
        first = self._rows(
            f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE source = ? ORDER BY ordinal LIMIT 1",
            (source,),
        )
        if not first:
            self._connection.execute("DELETE FROM documents WHERE source = ?", (source,))
            return
        if document is None:
            metadata = dict(self._chunk(first[0]).metadata)
            for name in _ADDED_METADATA:
                metadata.pop(name, None)
            document = StoredDocument(source, file, "", pack_json(metadata), 0, b"")
        there = self._chunks_of(source)
        if there != (document.num_chunks, document.chunks):
            document = document._replace(digest="", num_chunks=there[0], chunks=there[1])
        self._write_document(document)

    @checked
    def distrusted(self) -> list[str]:
        """Return the documents that are incomplete, or not known to be complete."""
        return [one.source for one in self._sound_documents("WHERE digest = '' ORDER BY source")]

    def _distrust(self, source: str) -> None:
        """Record that a document no longer matches its digest: adding it again repairs it."""
        self._forget_file_of(source)
        for one in self._sound_documents("WHERE source = ?", (source,)):
            num_chunks, chunks = self._chunks_of(source)
            self._write_document(one._replace(digest="", num_chunks=num_chunks, chunks=chunks))

    @checked
    def rebuild(self) -> None:
        """Rewrite the whole file from its readable rows.

        Repairs damage to the file's structure; the content of the rows stays as it is.
        """
        following = next_path(self.path)
        following.unlink(missing_ok=True)
        fresh = self._sql.connect(following, isolation_level=None)
        try:
            unlock(fresh, self._cipher_key)
            fresh.executescript(f"BEGIN;{SCHEMA}COMMIT;")
            fresh.execute("BEGIN")
            _fill(fresh, "chunks", _ALL_CHUNK_COLUMNS, self._scan(_ALL_CHUNK_COLUMNS))
            _fill(fresh, "documents", DOCUMENT_COLUMNS, self._readable_documents())
            _fill(fresh, "files", FILE_COLUMNS, self._readable("files", FILE_COLUMNS))
            fresh.execute("COMMIT")
            fresh.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            fresh.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            fresh.execute("PRAGMA journal_mode = WAL")
        finally:
            fresh.close()
        self.use_next(self._cipher_key)

    def _readable(self, table: str, columns: str) -> Iterable[tuple[Any, ...]]:
        """Yield a table's rows up to the first unreadable one."""
        try:
            yield from self._connection.execute(f"SELECT {columns} FROM {table}")
        except self._sql.DatabaseError as error:
            self._go_on(error)

    def _readable_documents(self) -> Iterable[tuple[Any, ...]]:
        """Yield the readable documents, also those found only by their chunks' sources."""
        seen = set()
        for values in self._readable("documents", DOCUMENT_COLUMNS):
            seen.add(values[0])
            yield values
        sources = [source for _, source in self._scan("row, source")]
        for source in set(sources) - seen:
            yield from self._rows(
                f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE source = ?", (source,)
            )


def _what(row: Sequence[Any]) -> str:
    """Return the part of a chunk's row that is wrong, with its verb."""
    _, chunk_id, source, ordinal, text, *_ = row
    try:
        is_named = chunk_id == chunk_id_of(source, ordinal, text)
    except TypeError:
        is_named = False
    if not is_named:
        return "its text, its place or the name of its document is"
    return "its tokens, metadata or context are"


def _file_of(source: str, known: set[str]) -> str | None:
    """Return the file that a damaged document was read from, if it is among the known ones.

    Only the document's row says for certain which file that is.
    """
    from kvrag.ingest.loaders import SUFFIXES

    if source in known:
        return source
    path, _, part = source.rpartition("#") if isinstance(source, str) else ("", "", "")
    is_file = Path(part).suffix.lower() in SUFFIXES  # another file, which is not known any more
    return path if path in known and not is_file else None


def _fill(connection: Any, table: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
    marks = ", ".join("?" * (columns.count(",") + 1))
    # If several rows claim one place, the first wins; a NULL now was not NULL when written.
    connection.executemany(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})", rows)
