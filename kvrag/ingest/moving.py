"""Copying the records of an index from one store to another."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Protocol

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError
from kvrag.ingest.maintenance import remove_others
from kvrag.ingest.report import Report
from kvrag.recordformat import check_record
from kvrag.store.base import Store
from kvrag.store.capabilities import Flushes, capability
from kvrag.store.wrapper import read_whole


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
    on_progress: Callable[[int, int], None] | None = None,
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
