"""Check of a damaged catalog, its repair, and reports of what was lost.

A repair writes what is sound to a new catalog, which takes the place of the old one. A document
that is not whole is marked, so that adding it again writes it again.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.catalogfile import damage_of, next_path, write_through
from kvrag.ingest.config import RUNS_NAME
from kvrag.ingest.contexts import SIMILAR
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.rows import (
    Change,
    ChunkRow,
    Encoding,
    KeyOf,
    StoredChunk,
    StoredDocument,
    Texts,
    unpack_json,
)
from kvrag.ingest.storage import Storage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Embed: TypeAlias = "Callable[[str], NDArray[np.float32]]"

# The metadata that the chunker adds to a document's.
_ADDED_METADATA = ("heading", "headings", "page", "start")
_BATCH = 1000  # chunks of a transaction, at least


@dataclass
class Audit:
    """What is wrong with a catalog.

    Attributes
    ----------
    num_chunks
        Number of chunks, damaged ones included.
    num_documents
        Number of documents that there should be.
    needed
        Names of the sound chunks' KV, each with its number of tokens.
    optional
        The same for their optional records (`Chunk.is_optional`), which the store may lack.
    later
        Those of `needed` that are made when nobody asks, if the store lacks them: what the chunk
        was encoded after was deleted.
    problems
        A line of text for each problem.
    """

    num_chunks: int = 0
    num_documents: int = 0
    needed: dict[ChunkKey, int] = field(default_factory=dict)
    optional: dict[ChunkKey, int] = field(default_factory=dict)
    later: set[ChunkKey] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Held:
    """The content of a catalog before its repair.

    Attributes
    ----------
    num_documents
        Number of documents that there should be.
    distrusted
        Sources of the documents already known to be incomplete.
    """

    num_documents: int
    distrusted: frozenset[str]


# -- checks --------------------------------------------------------------------------------------


def audit_catalog(storage: Storage) -> Audit:
    """Check the whole catalog: SQLite's own check, then every row."""
    found = audit_rows(storage.catalog, storage.config.key_of)
    found.problems[:0] = damage_of(storage.catalog)
    return found


def audit_rows(catalog: Catalog, key_of: KeyOf) -> Audit:
    """Compare every row with its checksum, and the tables with each other.

    Parameters
    ----------
    key_of
        Returns the name that a chunk's KV must have, the first of several.
    """
    found = Audit()
    parts: dict[Any, list[tuple[str, bytes]]] = {}
    with catalog.reading():
        of_chunks = list(_audit_chunks(catalog, key_of, found, parts))
        found.problems += _audit_state(catalog, found)
        found.problems += of_chunks
        found.problems += _audit_documents(catalog, parts)
        for file, is_right in catalog.stored.files():
            if not is_right:
                found.problems.append(f"{file.path}: the recorded state of this file is damaged")
    return found


def _audit_chunks(
    catalog: Catalog, key_of: KeyOf, found: Audit, parts: dict[Any, list[tuple[str, bytes]]]
) -> Iterator[str]:
    is_shared = catalog.encoding is not None and catalog.encoding.context.is_shared
    for one in catalog.stored.chunks():
        found.num_chunks += 1
        source, ordinal = one.packed.source, one.packed.ordinal
        place = f"{source}, chunk {ordinal} ({one.packed.chunk_id})"
        parts.setdefault(source, []).append((str(ordinal).zfill(20), _part(one, one.keys)))
        if one.embedding is None:
            yield f"{place}: its vector is not what was written"
        if one.chunk is None:
            yield f"{place}: it is not what was written"
            continue
        keys = {key_of(each): each.contexts[0] for each in one.chunk.encodings()}
        expected = " ".join(key.digest for key in keys)
        for key, context_ids in keys.items():
            is_optional = one.chunk.is_optional(context_ids)
            (found.optional if is_optional else found.needed)[key] = one.packed.num_tokens
            if is_shared and not context_ids:
                found.later.add(key)
        if one.keys != expected:
            yield f"{place}: names the KV {shown(one.keys)}, expected {expected}"


def _audit_documents(catalog: Catalog, parts: dict[Any, list[tuple[str, bytes]]]) -> Iterator[str]:
    for document, is_right in catalog.stored.documents():
        source = document.source
        chunks = [part for _, part in sorted(parts.pop(source, []))]
        if not is_right:
            yield f"{source}: its entry is not what was written"
        elif document.num_chunks != len(chunks):
            yield f"{source}: it had {document.num_chunks} chunks, {len(chunks)} are there"
        elif document.chunks != catalog.checksums.whole(chunks):
            yield f"{source}: its chunks are not those that it had"
    for source, alone in parts.items():
        yield f"{source}: its entry is missing, {len(alone)} of its chunks are there"


def _audit_state(catalog: Catalog, found: Audit) -> Iterator[str]:
    state, counted = catalog.stored.state()
    if state is None:
        yield "the catalog's own state is not what was written"
        return
    found.num_documents = state.num_documents
    if state.num_documents != counted.num_documents:
        yield f"there were {state.num_documents:,} documents, {counted.num_documents:,} are there"
    elif state.documents != counted.documents:
        yield "the documents differ from those that were written"
    if (state.num_files, state.files) != (counted.num_files, counted.files):
        yield "recorded states of files are missing"


# -- repair --------------------------------------------------------------------------------------


def mend_catalog(storage: Storage, encoders: Encoders) -> list[str]:
    """Repair the catalog; return the existing files that must be read again.

    The caller holds the writer's lock. The view of a shared index is made again from its log.
    """
    if storage.log is not None:
        storage.log.rebuild()
        return []
    separator: tuple[int, ...] | None = None
    if storage.config.context == SIMILAR:
        from kvrag.ingest.companions import separator_ids

        separator = separator_ids(encoders.tokenizer)
    paths = salvage(
        storage.catalog,
        storage.config.key_of,
        lambda text: encoders.embedding.embed_windows([text])[0],
        separator,
    )
    # It may have been made from damaged tokens.
    (storage.path / RUNS_NAME).unlink(missing_ok=True)
    return [path for path in paths if Path(path).is_file()]


def salvage(
    catalog: Catalog,
    key_of: KeyOf,
    embed: Embed,
    separator: tuple[int, ...] | None = None,
) -> list[str]:
    """Replace a catalog by one with its sound content; return the files to read again.

    Vectors are computed again from their text, names of KV from their tokens. A chunk with other
    damage goes. The files of incomplete documents are read again: all of them, if it is unknown
    which documents are missing.

    Parameters
    ----------
    key_of
        Returns the name that a chunk's KV must have, the first of several.
    embed
        Returns the vectors ``[num_windows, dim]`` of a text.
    separator
        With context ``similar``, what follows each text in it: chunks that were encoded after text
        that is lost forget it. None with other contexts.

    Raises
    ------
    StoreError
        When the folder refuses the write; the catalog is then unchanged.
    """
    temporary = catalog.path.with_name(f".{catalog.path.name}.{secrets.token_hex(8)}.tmp")
    try:
        state = catalog.state()
        empty = Catalog.create(
            temporary,
            checksum_key=catalog.checksum_key,
            cipher_key=catalog.cipher_key,
            generation=time.time_ns() if state is None else state.generation,
        )
        with contextlib.closing(empty) as fresh, catalog.reading():
            paths = _Salvage(catalog, fresh, key_of, embed).run()
            if separator is not None:
                _forget_lost(fresh, catalog.encoding, separator)
            write_through(fresh)
        temporary.replace(next_path(catalog.path))
    finally:
        for end in ("", "-wal", "-shm"):
            temporary.with_name(temporary.name + end).unlink(missing_ok=True)
    catalog.use_next(catalog.cipher_key)
    return paths


def _forget_lost(fresh: Catalog, encoding: Encoding | None, separator: tuple[int, ...]) -> None:
    """Take their context from chunks that were encoded after text that a catalog does not hold."""
    chunks = [one.chunk for one in fresh.stored.chunks() if one.chunk is not None]
    texts = Texts((one.token_ids for one in chunks), separator)
    fresh.encoding = encoding
    lost = [one.chunk_id for one in chunks if not texts.are_all_of(one.contexts[0])]
    fresh.write(Change(encode=dict.fromkeys(lost, ((),))))


class _Salvage:
    """Writes what is sound in one catalog to another, an empty one."""

    def __init__(self, catalog: Catalog, fresh: Catalog, key_of: KeyOf, embed: Embed) -> None:
        self._catalog = catalog
        self._fresh = fresh
        self._key_of = key_of
        self._embed = embed

    def run(self) -> list[str]:
        """Do it; return the files to read again."""
        catalog = self._catalog
        state, counted = catalog.stored.state()
        rows_of = catalog.stored.rows()
        documents = {
            one.source: one for one, is_right in catalog.stored.documents(rows_of) if is_right
        }
        files = catalog.stored.files()
        known = {one.path: one for one, is_right in files if is_right}
        # Otherwise something is missing, and nothing says what.
        is_complete = state == counted and not damage_of(catalog) and len(known) == len(files)
        again: set[str] = set()
        change = Change()
        for source in dict.fromkeys([*rows_of, *documents]):
            document = documents.get(source)
            chunks, is_whole = self._chunks_of(rows_of.get(source, []), document)
            if document is not None and document.file is not None and not is_whole:
                again.add(document.file)
            # Only a document's row says for certain which file it is of.
            is_complete = is_complete and document is not None
            if document is not None and (chunks or is_whole):
                digest, metadata = document.digest if is_whole else "", document.metadata
                change.put.append((source, document.file, digest, unpack_json(metadata), chunks))
            elif chunks:
                change.put.append((source, None, "", _metadata_of(chunks[0].chunk), chunks))
            if sum(len(rows) for *_, rows in change.put) >= _BATCH:
                self._fresh.write(change)
                change = Change()
        if is_complete:
            change.put_files = [one for path, one in known.items() if path not in again]
        self._fresh.write(change)
        return sorted(again if is_complete else known)

    def _chunks_of(
        self, rows: Sequence[int], document: StoredDocument | None
    ) -> tuple[list[ChunkRow], bool]:
        """Return the sound chunks of a document, and whether they are all that it had."""
        found = [row for one in self._catalog.stored.chunks(rows) for row in self._sound(one)]
        found.sort(key=lambda one: one[0].chunk.ordinal)
        chunks, parts = [row for row, _ in found], [part for _, part in found]
        if document is None:
            return chunks, False
        checksum = self._catalog.checksums.whole(parts)
        return chunks, (len(parts), checksum) == (document.num_chunks, document.chunks)

    def _sound(self, one: StoredChunk) -> Iterator[tuple[ChunkRow, bytes]]:
        """Yield a chunk to write, and what it contributes to its document, if it is sound."""
        import numpy as np

        chunk = one.chunk
        if chunk is None:
            return
        keys = [self._key_of(each) for each in chunk.encodings()]
        names = " ".join(key.digest for key in keys)
        if one.embedding is None:
            vectors = np.asarray(self._embed(chunk.text), np.float32)
        else:
            vectors = np.frombuffer(one.embedding, "<f4")
        yield ChunkRow(chunk, keys, vectors), _part(one, names)


def _part(one: StoredChunk, keys: Any) -> bytes:
    """Return what a chunk with some names of KV contributes to its document's checksum."""
    return one.checksums + (keys.encode() if isinstance(keys, str) else b"")


def _metadata_of(chunk: Chunk) -> dict[str, Any]:
    """Return the metadata of a chunk's document, whose row is lost."""
    return {name: one for name, one in chunk.metadata.items() if name not in _ADDED_METADATA}


# -- what was lost -------------------------------------------------------------------------------


def held_by(storage: Storage, audit: Audit) -> Held:
    """Return the readable content of a damaged catalog."""
    num_documents = audit.num_documents
    with contextlib.suppress(IndexFormatError):
        num_documents = max(num_documents, storage.catalog.documents.counts()[0])
    return Held(num_documents, frozenset(storage.catalog.documents.distrusted()))


def lost_since(before: Held, storage: Storage, num_removed: int = 0) -> list[str]:
    """Return what damage has destroyed since `held_by`, and what to do about it.

    Parameters
    ----------
    before
        The content of the catalog before its repair.
    storage
        The repaired index.
    num_removed
        Number of documents removed because their files are gone.
    """
    lost = [
        f"{source}: part of it was damaged and is gone; add it again"
        for source in storage.catalog.documents.distrusted()
        if source not in before.distrusted
    ]
    missing = before.num_documents - num_removed - storage.catalog.documents.counts()[0]
    if missing > 0:
        lost.append(
            f"{missing:,} documents are gone with all their chunks; ingest all documents again"
        )
    return lost
