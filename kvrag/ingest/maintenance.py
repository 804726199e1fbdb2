"""Verification, cleanup and healing of what an index has stored."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import schema as s
from kvrag.ingest.cachefile import ROW_BYTES, vector_stats
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.catalogfile import damage_of, next_path, write_through
from kvrag.ingest.config import KV_FOLDER, RUNS_NAME, VECTORS_NAME, write_atomically
from kvrag.ingest.contexts import SIMILAR
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.report import (
    GcReport,
    IndexStats,
    RecodeReport,
    RecordProblem,
    Report,
    VerifyReport,
)
from kvrag.ingest.storage import Storage
from kvrag.recordformat import check_record
from kvrag.regularfile import open_regular
from kvrag.store.base import Store, capability, content_of
from kvrag.store.file import FileStore
from kvrag.store.tiered import TieredStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvrag.codec.container import RecordHeader
    from kvrag.ingest.coding import RecordCoding
    from kvrag.kvcache import ChunkKV


# Readers write the vectors' cache without the writer's lock.
_TEMPORARY_AGE_SECONDS = 3600.0
_MAX_CATALOG_PROBLEMS = 20  # reported one by one
_MISSING = "missing"

Progress = Callable[[int, int], None]
"""Called with the number of finished records, and the number of all."""


def verify_records(
    storage: Storage,
    audit: Audit,
    repair: Callable[[ChunkKey], None] | None,
    on_progress: Progress | None,
) -> VerifyReport:
    """Read every layer of every record that a chunk refers to; an optional one may be missing.

    Parameters
    ----------
    audit
        The result of the check of the catalog's rows against their checksums.
    repair
        Replaces the record of a key; None only reports.
    on_progress
        Called with the number of records read so far, and the number to read.
    """
    started = time.perf_counter()
    needed = {**audit.optional, **audit.needed}
    problems: list[RecordProblem] = []
    num_records = num_repaired = num_later = size_bytes = 0
    for num_done, (key, num_tokens) in enumerate(sorted(needed.items()), 1):
        size, reason = _read_record(storage, key, num_tokens)
        is_there = storage.home is storage.store or storage.home.contains(key)
        if reason is None and not is_there:
            reason = _MISSING
        is_later = key in audit.later and repair is None
        is_left_out = reason == _MISSING and (is_later or key not in audit.needed)
        num_later += is_left_out and key in audit.needed
        num_records += not is_left_out
        size_bytes += size
        if reason is not None and not is_left_out:
            problems.extend(
                RecordProblem(*place, key.digest, reason)
                for place in storage.catalog.stored.places_of_key(key)
            )
            if repair is not None:
                repair(key)
                _, still = _read_record(storage, key, num_tokens)
                num_repaired += still is None
        if on_progress is not None:
            on_progress(num_done, len(needed))
    return VerifyReport(
        num_chunks=audit.num_chunks,
        num_records=num_records,
        size_bytes=size_bytes,
        problems=tuple(problems),
        num_repaired=num_repaired,
        catalog_problems=(),
        seconds=time.perf_counter() - started,
        num_later=num_later,
    )


def first_of(problems: list[str]) -> tuple[str, ...]:
    """Return the first problems of a catalog for a report, and how many more there are."""
    if len(problems) <= _MAX_CATALOG_PROBLEMS:
        return tuple(problems)
    num_more = len(problems) - _MAX_CATALOG_PROBLEMS
    return (*problems[:_MAX_CATALOG_PROBLEMS], f"and {num_more:,} more")


def _read_record(storage: Storage, key: ChunkKey, num_tokens: int) -> tuple[int, str | None]:
    """Return the number of bytes read, and what is wrong with the record, or None."""
    spec = storage.config.spec
    try:
        record = storage.store.open(key)
        if record is None:
            return 0, _MISSING
        with contextlib.closing(record):
            encoded = storage.coding.open(key, record, spec)
            if encoded.num_tokens != num_tokens:
                return 0, f"holds {encoded.num_tokens} tokens, expected {num_tokens}"
            for layer_index in range(spec.num_layers):
                encoded.read_layer(layer_index)
            return encoded.size_bytes, None
    except (RecordError, StoreError, ProfileError) as error:
        return 0, str(error)


def collect_garbage(storage: Storage, needed: Collection[str], *, keeps_unknown: bool) -> GcReport:
    """Remove unneeded records, profiles that no record needs, and files of killed processes.

    The caller holds the writer's lock: a record is stored before its chunk is in the catalog.

    Parameters
    ----------
    needed
        Names of the records that stay.
    keeps_unknown
        Keep records that this index does not need: other indexes share the store.
    """
    store, folder, profiles = storage.store, storage.path, storage.profiles
    # What processes left that were killed after a move, and what nobody needs.
    removed = [clear_left(storage, needed)]
    removed += [] if keeps_unknown else [remove_others(store, needed)]
    num_records, size_bytes = (sum(one) for one in zip(*removed, strict=True))
    num_temporary = store.collect_garbage(_TEMPORARY_AGE_SECONDS if keeps_unknown else 0.0)
    newest = time.time() - _TEMPORARY_AGE_SECONDS
    # A catalog that was being written has its log beside it.
    left = [one for end in ("", "-wal", "-shm") for one in folder.glob(f".*.tmp{end}")]
    for path in (*left, *profiles.folder.glob(".*.tmp")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < newest:
                path.unlink()
                num_temporary += 1
    unused = set(profiles.hashes()) - {storage.config.profile, storage.config.writer}
    if unused:
        unused -= _profiles_in_use(store, needed)
    for one in unused:
        profiles.delete(one)
    return GcReport(num_records, size_bytes, num_temporary, len(unused))


def remove_others(store: Store, needed: Collection[str]) -> tuple[int, int]:
    """Remove all records but the named ones; return their number and bytes."""
    num_records = size_bytes = 0
    for key, size in list(store.sizes()):
        if key.digest not in needed and store.delete(key):
            num_records += 1
            size_bytes += size
    return num_records, size_bytes


def _profiles_in_use(store: Store, needed: Collection[str]) -> set[str]:
    """Return the profiles that records name; damaged records are left out."""
    found = (_read_header(store, ChunkKey(digest)) for digest in needed)
    return {header.profile for _, header in filter(None, found)}


def _read_header(store: Store, key: ChunkKey) -> tuple[int, RecordHeader] | None:
    """Return a record's size in bytes and its header; None if it is missing or damaged."""
    from kvrag.codec.container import RecordReader

    with contextlib.suppress(RecordError, StoreError):
        record = store.open(key)
        if record is not None:
            with contextlib.closing(record):
                return record.size_bytes, RecordReader(record, key).header
    return None


def recode_records(
    storage: Storage,
    needed: Mapping[ChunkKey, int],
    compute: Callable[[ChunkKey], ChunkKV],
    on_progress: Progress | None,
    coding: RecordCoding | None = None,
) -> RecodeReport:
    """Rewrite every record with the index's codec; each is replaced in one step.

    Records that decode exactly are converted. KV of lossy, damaged and missing records is
    computed again.

    Parameters
    ----------
    needed
        Number of tokens for each key.
    compute
        Computes the KV of a key with the model.
    coding
        Another coding than the index's.
    """
    from kvrag.ingest.coding import read_exact

    started = time.perf_counter()
    store, coding = storage.store, coding or storage.coding
    size_before = size_after = num_recoded = num_computed = 0
    for number, (key, num_tokens) in enumerate(sorted(needed.items())):
        if on_progress is not None:
            on_progress(number, len(needed))
        old_bytes, header = _read_header(store, key) or (0, None)
        size_before += old_bytes
        if header is not None and coding.writes(header):
            size_after += old_bytes
            continue
        kv = read_exact(key, num_tokens, store, coding, storage.config.spec)
        if kv is None:
            kv = compute(key)
            num_computed += 1
        record = coding.codec.encode(key, kv)
        store.replace(key, record)
        size_after += len(record)
        num_recoded += 1
    return RecodeReport(
        codec=coding.label,
        num_records=len(needed),
        num_recoded=num_recoded,
        num_computed=num_computed,
        size_bytes_before=size_before,
        size_bytes=size_after,
        seconds=time.perf_counter() - started,
    )


def check_room(storage: Storage, needed: Mapping[ChunkKey, int], codec: str) -> None:
    """Raise StoreError if the disk has no room for all records in another codec."""
    per_token = replace(storage.config, codec=codec).expected_bytes_per_token
    more = sum(needed.values()) * per_token - sum(size for _, size in storage.store.sizes())
    free = shutil.disk_usage(storage.path).free
    if more > free:
        raise StoreError(
            f"records in codec {codec} need about {more / 1e6:,.0f} MB more in {storage.path}, "
            f"and {free / 1e6:,.0f} MB are free; free some space, or choose a smaller codec"
        )


class Guest(Protocol):
    """What keeps its own records in an index's store."""

    def leaving(self) -> AbstractContextManager[None]:
        """Remove them; in the block, the index gets another store."""


@dataclass(frozen=True)
class MoveReport(Report):
    """The result of moving an index's KV to another store.

    Attributes
    ----------
    store
        URL of the new store, without a password.
    num_records, size_bytes
        Number and size of the copied records.
    num_present
        Number of records that the new store already had.
    num_lost
        Number of records that were missing or damaged: each prompt that needs one computes it,
        until ``kvrag verify --repair`` stores it.
    num_removed
        Number of records removed from the old store; 0 if others may need them.
    """

    store: str
    num_records: int
    size_bytes: int
    num_present: int
    num_lost: int
    num_removed: int


def copy_records(
    keys: Collection[ChunkKey],
    source: Store,
    target: Store,
    on_progress: Progress | None = None,
    optional: Collection[ChunkKey] = (),
) -> MoveReport:
    """Copy sound records; sound records that are already there stay.

    The ones in `optional` are not lost where they are missing: the next prompt makes them.

    Raises
    ------
    StoreError
        When a store refuses access. Copied records are kept; a second call does the rest.
    """
    num_records = size_bytes = num_present = num_lost = 0
    for number, key in enumerate(sorted(keys)):
        if on_progress is not None:
            on_progress(number, len(keys))
        is_there = target.contains(key)
        # A useless record there must not cause the removal of the only good one here.
        if is_there and _read(key, target) is not None:
            num_present += 1
            continue
        content = _read(key, source)
        if content is None:
            num_lost += key not in optional
            continue
        (target.replace if is_there else target.put)(key, content)
        num_records += 1
        size_bytes += len(content)
    background = capability(target, TieredStore)
    if background is not None:
        background.flush()
    return MoveReport(target.url, num_records, size_bytes, num_present, num_lost, 0)


def clear_left(storage: Storage, needed: Collection[str]) -> tuple[int, int]:
    """Remove what the store has too, or nobody needs, from the folder that the index has left.

    Returns the number of these records, and their bytes.
    """
    folder = storage.path / KV_FOLDER
    if not storage.config.store or not folder.is_dir():
        return 0, 0
    with contextlib.closing(FileStore(folder)) as left:
        if is_same_store(left, storage.store):
            return 0, 0
        lost = {one for one in needed if not storage.store.contains(ChunkKey(one))}
        found = remove_others(left, lost)
        left.collect_garbage()  # reclaims their space
        return found


def is_same_store(one: Store, other: Store) -> bool:
    """Return whether what is written to one store appears in the other.

    The URLs cannot say: a folder has many names, and a server or tiers may lead to it too.
    """
    probe = ChunkKey(secrets.token_hex(20))
    one.put(probe, b"is this the same store?")
    try:
        return other.contains(probe)
    finally:
        one.delete(probe)


def _read(key: ChunkKey, source: Store) -> bytes | None:
    """Return a record, or None if there is none or it is damaged."""
    try:
        content = content_of(source, key)
        if content is not None:
            check_record(key, content)
    except RecordError:
        source.note_damage(key)
        return None
    return content


KEPT_FOLDER = "kept"
_VERSION = 1


def write_kept(path: Path, keys: Mapping[str, int]) -> None:
    """Write the digests of keys, each with its number of tokens. Raises StoreError."""
    content = {"version": _VERSION, "keys": dict(keys)}
    write_atomically(path, json.dumps(content).encode())


def kept_keys(folder: Path) -> dict[str, int]:
    """Return the keys that the lists in an index folder keep, each with its number of tokens.

    Raises
    ------
    IndexFormatError
        When a list is damaged: garbage collection must not rely on it.
    StoreError
        When a list cannot be read.
    """
    found: dict[str, int] = {}
    for path in sorted((folder / KEPT_FOLDER).glob("[!.]*.json")):
        try:
            with open_regular(path) as file:  # of any size: kvrag wrote it
                content = json.load(file)
            keys = content["keys"]
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}, expected {_VERSION}")
            found |= {ChunkKey(key).digest: int(keys[key]) for key in keys}
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IndexFormatError(
                f"{path}: not a list of kept records ({error}); write it again, with 'kvrag pml "
                "encode' and the schema's file, or delete it if nobody uses that schema"
            ) from error
    return found


_OF_CONFIG = (
    *("model", "dtype", "embedding", "chunk_tokens", "context", "context_tokens"),
    *("trust", "writer", "control_tokens", "bytes_per_token"),
)


def stats_of(storage: Storage) -> IndexStats:
    """Return the content of an index in numbers; needs no model."""
    config = storage.config
    num_documents, num_chunks, num_tokens = storage.catalog.documents.counts()
    needed = kept_keys(storage.path) | storage.catalog.stored.keys()
    sizes = {
        key.digest: size
        for key, size in storage.store.sizes()
        # Other indexes' records in a shared store do not count.
        if not storage.config.store or key.digest in needed
    }
    stored = sorted(sizes)
    size_bytes = sum(sizes.values())
    num_vectors = storage.catalog.stored.num_vectors(config.embedding_dim)
    cached = vector_stats(storage.path)
    compared_bytes = num_vectors * (4 * config.embedding_dim + ROW_BYTES)
    # Identical chunks share one record.
    stored_tokens = sum(needed[digest] for digest in stored if digest in needed)
    return IndexStats(
        path=str(storage.path),
        store=storage.store.url,
        **{name: getattr(config, name) for name in _OF_CONFIG},
        codec=f"raw, {config.codec} later" if storage.coding.needs_profile else config.codec,
        num_prefix_tokens=len(config.prefix_ids),
        num_documents=num_documents,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        num_records=len(stored),
        num_unreferenced_records=sum(digest not in needed for digest in stored),
        size_bytes=size_bytes,
        stored_bytes_per_token=size_bytes / stored_tokens if stored_tokens else 0.0,
        catalog_bytes=_size_of(storage.path / catalogs.FILE_NAME),
        vectors_bytes=_size_of(storage.path / VECTORS_NAME),
        num_vectors=num_vectors,
        vectors_memory_bytes=cached.memory_bytes if cached.is_graph else compared_bytes,
        has_graph=cached.is_graph,
        generation=storage.catalog.version()[0],
    )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # absent, or another process has just removed it
        return 0


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
        Those of `needed` that are made when nobody asks, if the store lacks them: what all their
        chunks were encoded after was deleted.
    problems
        A line of text for each problem.
    """

    num_chunks: int = 0
    num_documents: int = 0
    needed: dict[ChunkKey, int] = field(default_factory=dict)
    optional: dict[ChunkKey, int] = field(default_factory=dict)
    later: set[ChunkKey] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


# -- checks --------------------------------------------------------------------------------------


def audit_catalog(storage: Storage) -> Audit:
    """Check the whole catalog: SQLite's own check, then every row."""
    found = audit_rows(storage.catalog)
    found.problems[:0] = damage_of(storage.catalog)
    return found


def audit_rows(catalog: Catalog) -> Audit:
    """Compare every row with its checksum, and the tables with each other."""
    found = Audit()
    parts: dict[Any, list[tuple[str, bytes]]] = {}
    with catalog.reading():
        of_chunks = list(_audit_chunks(catalog, found, parts))
        found.problems += _audit_state(catalog, found)
        found.problems += of_chunks
        found.problems += _audit_documents(catalog, parts)
        for file, is_right in catalog.stored.files():
            if not is_right:
                found.problems.append(f"{file.path}: the recorded state of this file is damaged")
    return found


def _audit_chunks(
    catalog: Catalog, found: Audit, parts: dict[Any, list[tuple[str, bytes]]]
) -> Iterator[str]:
    stored: set[ChunkKey] = set()
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
        keys = {catalog.key_of(each): each.contexts[0] for each in one.chunk.encodings()}
        expected = " ".join(key.digest for key in keys)
        for key, context_ids in keys.items():
            is_optional = one.chunk.is_optional(context_ids)
            (found.optional if is_optional else found.needed)[key] = one.packed.num_tokens
            if not is_optional:
                (found.later if one.packed.contexts == s.FORGOTTEN else stored).add(key)
        if one.keys != expected:
            yield f"{place}: names the KV {shown(one.keys)}, expected {expected}"
    found.later -= stored


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
    embed: Embed = lambda text: encoders.embedding.embed_windows([text])[0]  # noqa: E731
    paths = salvage(storage.catalog, embed, separator)
    # It may have been made from damaged tokens.
    (storage.path / RUNS_NAME).unlink(missing_ok=True)
    return [path for path in paths if Path(path).is_file()]


def salvage(catalog: Catalog, embed: Embed, separator: tuple[int, ...] | None = None) -> list[str]:
    """Replace a catalog by one with its sound content; return the files to read again.

    Vectors are computed again from their text, names of KV from their tokens. A chunk with other
    damage goes. The files of incomplete documents are read again: all of them, if it is unknown
    which documents are missing.

    Parameters
    ----------
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
            paths = _copy_sound(catalog, fresh, embed)
            if separator is not None:
                fresh.config = catalog.config
                _forget_lost(fresh, separator)
            write_through(fresh)
        temporary.replace(next_path(catalog.path))
    finally:
        for end in ("", "-wal", "-shm"):
            temporary.with_name(temporary.name + end).unlink(missing_ok=True)
    catalog.use_next(catalog.cipher_key)
    return paths


def _forget_lost(fresh: Catalog, separator: tuple[int, ...]) -> None:
    """Take their context from chunks that were encoded after text that a catalog does not hold."""
    chunks = [one.chunk for one in fresh.stored.chunks() if one.chunk is not None]
    texts = s.Texts((one.token_ids for one in chunks), separator)
    lost = [one.chunk_id for one in chunks if not texts.are_all_of(one.contexts[0])]
    fresh.write(s.Change(encode=dict.fromkeys(lost, ((),))))


def _copy_sound(catalog: Catalog, fresh: Catalog, embed: Embed) -> list[str]:
    """Write what is sound in a catalog to another, an empty one; return the files to read again."""
    state, counted = catalog.stored.state()
    rows_of = catalog.stored.rows()
    documents = {one.source: one for one, is_right in catalog.stored.documents(rows_of) if is_right}
    files = catalog.stored.files()
    known = {one.path: one for one, is_right in files if is_right}
    # Otherwise something is missing, and nothing says what.
    is_complete = state == counted and not damage_of(catalog) and len(known) == len(files)
    again: set[str] = set()
    change = s.Change()
    for source in dict.fromkeys([*rows_of, *documents]):
        document = documents.get(source)
        chunks, checksum = _sound_rows(catalog, rows_of.get(source, []), embed)
        if document is not None:
            is_whole = (len(chunks), checksum) == (document.num_chunks, document.chunks)
            if document.file is not None and not is_whole:
                again.add(document.file)
            if chunks or is_whole:
                digest, metadata = document.digest if is_whole else "", document.metadata
                change.put.append((source, document.file, digest, s.unpack_json(metadata), chunks))
        else:
            is_complete = False  # only a document's row says for certain which file it is of
            if chunks:
                change.put.append((source, None, "", _metadata_of(chunks[0].chunk), chunks))
        if sum(len(rows) for *_, rows in change.put) >= _BATCH:
            fresh.write(change)
            change = s.Change()
    if is_complete:
        change.put_files = [one for path, one in known.items() if path not in again]
    fresh.write(change)
    return sorted(again if is_complete else known)


def _sound_rows(
    catalog: Catalog, rows: Sequence[int], embed: Embed
) -> tuple[list[s.ChunkRow], bytes]:
    """Return the sound chunks of some rows, to write, and their documents' checksum of them."""
    import numpy as np

    found: list[tuple[s.ChunkRow, bytes]] = []
    for one in catalog.stored.chunks(rows):
        if one.chunk is not None:
            keys = [catalog.key_of(each) for each in one.chunk.encodings()]
            if one.embedding is None:
                vectors = np.asarray(embed(one.chunk.text), np.float32)
            else:
                vectors = np.frombuffer(one.embedding, "<f4")
            part = _part(one, " ".join(key.digest for key in keys))
            found.append((s.ChunkRow(one.chunk, keys, vectors), part))
    found.sort(key=lambda each: each[0].chunk.ordinal)
    return [row for row, _ in found], catalog.checksums.whole(part for _, part in found)


def _part(one: s.StoredChunk, keys: Any) -> bytes:
    """Return what a chunk with some names of KV contributes to its document's checksum."""
    return one.checksums + (keys.encode() if isinstance(keys, str) else b"")


def _metadata_of(chunk: Chunk) -> dict[str, Any]:
    """Return the metadata of a chunk's document, whose row is lost."""
    return {name: one for name, one in chunk.metadata.items() if name not in _ADDED_METADATA}


# -- what was lost -------------------------------------------------------------------------------


def losses(storage: Storage, audit: Audit) -> Callable[[int], list[str]]:
    """Note what a damaged catalog holds; return what tells after its repair what is lost.

    That is called with the number of documents removed because their files are gone.
    """
    documents = storage.catalog.documents
    num_before = audit.num_documents
    with contextlib.suppress(IndexFormatError):
        num_before = max(num_before, documents.counts()[0])
    distrusted = set(documents.distrusted())

    def lost(num_removed: int) -> list[str]:
        told = [
            f"{source}: part of it was damaged and is gone; add it again"
            for source in documents.distrusted()
            if source not in distrusted
        ]
        missing = num_before - num_removed - documents.counts()[0]
        if missing > 0:
            told.append(
                f"{missing:,} documents are gone with all their chunks; ingest all documents again"
            )
        return told

    return lost
