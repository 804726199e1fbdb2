"""Garbage of a shared index: removed once it has been garbage for a whole time of grace.

A first run lists what the newest version does not need, with the time. A later run removes what was
listed that long ago and is still not needed. So a reader or a writer may lag by that time: it
finds every record and segment of any version that was the newest less than the grace ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from kvrag.chunk import ChunkKey
from kvrag.ingest.report import GcReport
from kvrag.ingest.shared.manifest import Log, Manifest
from kvrag.store.base import Store

VERSIONS_SECONDS = 7200.0
"""Manifests stay at least so long: a reader looks for the next one, and lists all each hour."""


def collect(
    log: Log,
    head: Manifest,
    segments: Store,
    records: Store | None,
    needed: Callable[[], Collection[str]],
    grace_seconds: float,
) -> GcReport:
    """Remove old garbage, and list the rest.

    Parameters
    ----------
    head
        The newest version.
    records
        The store of the records; None leaves it alone.
    needed
        Returns the digests of the records that the newest version needs.
    """
    used = {part.key for file in head.files() for part in file.parts}
    sizes = {
        f"segment {key.digest}": size for key, size in segments.sizes() if key.digest not in used
    }
    if records is not None:
        present = dict(records.sizes())  # before `needed`: what is written meanwhile is no garbage
        wanted = needed()
        sizes |= {
            f"record {key.digest}": size
            for key, size in present.items()
            if key.digest not in wanted
        }
    sizes |= {f"version {one}": 0 for one in log.versions() if one < head.version}
    listed, now = log.garbage(), time.time()
    since = {name: min(listed.get(name, now), now) for name in sizes}
    old = [name for name, first in since.items() if now - first >= _grace_of(name, grace_seconds)]
    num_records = num_others = size_bytes = 0
    for name in old:
        kind, _, what = name.partition(" ")
        if kind == "version":
            log.delete(int(what))
            num_others += 1
        elif kind == "segment":
            num_others += segments.delete(ChunkKey(what))
        elif records is not None and records.delete(ChunkKey(what)):
            num_records += 1
            size_bytes += sizes[name]
        del since[name]
    log.list_garbage(since)
    return GcReport(num_records, size_bytes, num_others)


def _grace_of(name: str, grace_seconds: float) -> float:
    return max(grace_seconds, VERSIONS_SECONDS) if name.startswith("version ") else grace_seconds
