"""Verification and cleanup of what an index has stored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.chunk import ChunkKey
from kvrag.errors import ProfileError, RecordError, StoreError
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.profiles import ProfileFolder
from kvrag.ingest.report import GcReport, RecordProblem, VerifyReport
from kvrag.store.base import Store

if TYPE_CHECKING:
    from kvrag.ingest.coding import RecordCoding
    from kvrag.ingest.healing import Audit
    from kvrag.kvcache import KVSpec

# Readers write the vectors' cache without the writer's lock.
_TEMPORARY_AGE_SECONDS = 3600.0
_MAX_CATALOG_PROBLEMS = 20  # reported one by one
_MISSING = "missing"


def verify_records(
    catalog: Catalog,
    store: Store,
    coding: RecordCoding,
    spec: KVSpec,
    *,
    home: Store,
    audit: Audit,
    num_rows: Callable[[int], int],
    repair: Callable[[ChunkKey], None] | None,
    on_progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Read every layer of every record that a chunk refers to; an optional one may be missing.

    Parameters
    ----------
    home
        The store that must have the records: `store`, or the tier of it that all machines share.
    audit
        The result of the check of the catalog's rows against their checksums.
    num_rows
        Returns the rows of KV that a chunk with a given number of tokens must have.
    repair
        Replaces the record of a key; None only reports.
    on_progress
        Called with the number of records read so far, and the number to read.
    """
    started = time.perf_counter()
    needed = {**audit.optional, **audit.needed}
    problems: list[RecordProblem] = []
    num_records = num_repaired = 0
    size_bytes = 0
    for num_done, (key, num_tokens) in enumerate(sorted(needed.items()), 1):
        size, reason = _read_record(key, num_rows(num_tokens), store, coding, spec)
        if reason is None and home is not store and not home.contains(key):
            reason = _MISSING
        is_left_out = reason == _MISSING and key not in audit.needed
        num_records += not is_left_out
        size_bytes += size
        if reason is not None and not is_left_out:
            problems.extend(
                RecordProblem(*place, key.digest, reason) for place in catalog.places_of_key(key)
            )
            if repair is not None:
                repair(key)
                _, still = _read_record(key, num_rows(num_tokens), store, coding, spec)
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
    )


def first_of(problems: list[str]) -> tuple[str, ...]:
    """Return the first problems of a catalog for a report, and how many more there are."""
    if len(problems) <= _MAX_CATALOG_PROBLEMS:
        return tuple(problems)
    num_more = len(problems) - _MAX_CATALOG_PROBLEMS
    return (*problems[:_MAX_CATALOG_PROBLEMS], f"and {num_more:,} more")


def _read_record(
    key: ChunkKey, num_tokens: int, store: Store, coding: RecordCoding, spec: KVSpec
) -> tuple[int, str | None]:
    """Return the number of bytes read, and what is wrong with the record, or None."""
    try:
        record = store.open(key)
        if record is None:
            return 0, _MISSING
        with contextlib.closing(record):
            encoded = coding.open(key, record, spec)
            if encoded.num_tokens != num_tokens:
                return 0, f"holds {encoded.num_tokens} tokens, expected {num_tokens}"
            for layer_index in range(spec.num_layers):
                encoded.read_layer(layer_index)
            return encoded.size_bytes, None
    except (RecordError, StoreError, ProfileError) as error:
        return 0, str(error)


def collect_garbage(
    folder: Path,
    store: Store,
    profiles: ProfileFolder,
    profile_hash: str,
    *,
    needed: Collection[str],
    keeps_unknown: bool,
) -> GcReport:
    """Remove unneeded records, profiles that no record needs, and files of killed processes.

    The caller holds the writer's lock: a record is stored before its chunk is in the catalog.

    Parameters
    ----------
    needed
        Names of the records that stay.
    keeps_unknown
        Keep records that this index does not need: other indexes share the store.
    """
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
    unused = set(profiles.hashes()) - {profile_hash}
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
