"""Verification and cleanup of what an index has stored."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvrag.chunk import ChunkKey
from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.ingest import catalog as catalogs
from kvrag.ingest.config import VECTORS_NAME, write_atomically
from kvrag.ingest.report import (
    GcReport,
    IndexStats,
    RecodeReport,
    RecordProblem,
    Report,
    VerifyReport,
)
from kvrag.ingest.storage import Storage
from kvrag.ingest.vectorheader import ROW_BYTES, vector_stats
from kvrag.recordformat import check_record
from kvrag.regularfile import open_regular
from kvrag.store.base import Store, read_whole
from kvrag.store.capabilities import Flushes, capability

if TYPE_CHECKING:
    from kvrag.ingest.coding import RecordCoding
    from kvrag.ingest.healing import Audit
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
        catalog_problems=first_of(audit.problems),
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
    spec, num_rows = storage.config.spec, storage.config.num_rows(num_tokens)
    try:
        record = storage.store.open(key)
        if record is None:
            return 0, _MISSING
        with contextlib.closing(record):
            encoded = storage.coding.open(key, record, spec)
            if encoded.num_tokens != num_rows:
                return 0, f"holds {encoded.num_tokens} tokens, expected {num_rows}"
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
    num_records, size_bytes = (0, 0) if keeps_unknown else remove_others(store, needed)
    num_temporary = store.collect_garbage(_TEMPORARY_AGE_SECONDS if keeps_unknown else 0.0)
    newest = time.time() - _TEMPORARY_AGE_SECONDS
    # A catalog that was being written has its log beside it.
    left = [one for end in ("", "-wal", "-shm") for one in folder.glob(f".*.tmp{end}")]
    for path in (*left, *profiles.folder.glob(".*.tmp")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < newest:
                path.unlink()
                num_temporary += 1
    unused = set(profiles.hashes()) - {storage.config.profile}
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
    from kvrag.codec.container import RecordReader

    used = set()
    for key in map(ChunkKey, needed):
        with contextlib.suppress(RecordError, StoreError):
            record = store.open(key)
            if record is not None:
                with contextlib.closing(record):
                    used.add(RecordReader(record, key).header.profile)
    return used


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
        old_bytes, is_done = _coded_already(store, coding, key)
        size_before += old_bytes
        if is_done:
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
    more = sum(needed.values()) * per_token - storage.store.size_bytes()
    free = shutil.disk_usage(storage.path).free
    if more > free:
        raise StoreError(
            f"records in codec {codec} need about {more / 1e6:,.0f} MB more in {storage.path}, "
            f"and {free / 1e6:,.0f} MB are free; free some space, or choose a smaller codec"
        )


def _coded_already(store: Store, coding: RecordCoding, key: ChunkKey) -> tuple[int, bool]:
    """Return a record's size in bytes, and whether it already has the wanted coding."""
    from kvrag.codec.container import RecordReader

    try:
        record = store.open(key)
        if record is None:
            return 0, False
        with contextlib.closing(record):
            return record.size_bytes, coding.writes(RecordReader(record, key).header)
    except (RecordError, StoreError):
        return 0, False


class Guest(Protocol):
    """What keeps its own records in an index's store."""

    def leaving(self) -> AbstractContextManager[None]:
        """Remove them; in the block, the index gets another store."""
        ...


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
    background = capability(target, Flushes)
    if background is not None:
        background.flush()
    return MoveReport(target.url, num_records, size_bytes, num_present, num_lost, 0)


def clear_left(left: Store, store: Store, needed: Collection[str]) -> tuple[int, int]:
    """Remove all but the needed records from a store that the index has left.

    Returns
    -------
    (int, int)
        Their number and bytes; 0 if both stores are one.
    """
    if is_same_store(left, store):
        return 0, 0
    found = remove_others(left, needed)
    left.collect_garbage()
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
        record = source.open(key)
        if record is None:
            return None
        with closing(record):
            content = read_whole(record)
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
        model=config.model,
        dtype=config.dtype,
        codec=f"raw, {config.codec} later" if storage.coding.needs_profile else config.codec,
        embedding=config.embedding,
        chunk_tokens=config.chunk_tokens,
        context=config.context,
        context_tokens=config.context_tokens,
        compression=config.compression,
        control_tokens=config.control_tokens,
        num_prefix_tokens=len(config.prefix_ids),
        num_documents=num_documents,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        num_records=len(stored),
        num_unreferenced_records=sum(digest not in needed for digest in stored),
        size_bytes=size_bytes,
        bytes_per_token=config.bytes_per_token,
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
    except OSError:
        return 0
