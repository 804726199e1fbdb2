"""The records of an index from one store into another."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError
from kvrag.recordformat import check_record
from kvrag.store.base import Store
from kvrag.store.capabilities import Flushes, capability
from kvrag.store.wrapper import read_whole


@dataclass(frozen=True)
class MoveReport:
    """What moving did.

    Attributes
    ----------
    store
        Where the records are now, without a password.
    num_records, size_bytes
        Copied.
    num_present
        There already.
    num_lost
        That could not be had or were damaged: they are computed with each prompt that needs them,
        until ``kvrag verify --repair`` stores them.
    num_removed
        Removed from where they were; 0 where others may need them.
    """

    store: str
    num_records: int
    size_bytes: int
    num_present: int
    num_lost: int
    num_removed: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def copy_records(
    keys: Collection[ChunkKey],
    source: Store,
    target: Store,
    on_progress: Callable[[int, int], None] | None = None,
) -> MoveReport:
    """Copy records that are whole; what is there already, and whole, stays.

    Raises
    ------
    StoreError
        When a store refuses. What was copied is kept; a second call completes it.
    """
    num_records = size_bytes = num_present = num_lost = 0
    for number, key in enumerate(sorted(keys)):
        if on_progress is not None:
            on_progress(number, len(keys))
        is_there = target.contains(key)
        # What is of no use there must not be why the only good record is removed here.
        if is_there and _read(key, target) is not None:
            num_present += 1
            continue
        content = _read(key, source)
        if content is None:
            num_lost += 1
            continue
        (target.replace if is_there else target.put)(key, content)
        num_records += 1
        size_bytes += len(content)
    background = capability(target, Flushes)
    if background is not None:
        background.flush()
    return MoveReport(target.url, num_records, size_bytes, num_present, num_lost, 0)


def is_same_store(one: Store, other: Store) -> bool:
    """Say whether what is written to one store is in the other as well.

    Their URLs do not tell: a folder has many names, and may be behind a server or among tiers.
    """
    probe = ChunkKey(secrets.token_hex(20))
    one.put(probe, b"is this the same store?")
    try:
        return other.contains(probe)
    finally:
        one.delete(probe)


def _read(key: ChunkKey, source: Store) -> bytes | None:
    """Return a record, or None where there is none that is whole."""
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
