"""Garbage of a shared index: removed once it has been garbage for a whole time of grace.

A first run lists what the newest version does not need, with the time. A later run removes what was
listed that long ago and is still not needed. So a reader or a writer may lag by that time: it
finds every record and segment of any version that was the newest less than the grace ago.

A writer may find an old record in the store and commit a chunk that needs it while a run removes
it. So each run says when it begins and ends. A writer sees that at its commit and looks for its
records again; a run looks at its end for what has been committed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from kvrag.chunk import ChunkKey
from kvrag.ingest.report import GcReport
from kvrag.ingest.shared.manifest import Log, Manifest
from kvrag.store.base import Store

_NEWEST = "newest version"
VERSIONS_SECONDS = 7200.0
"""Manifests stay at least so long: a reader looks for the next one, and lists all each hour."""


def collect(
    log: Log,
    newest: Callable[[], Manifest],
    segments: Store,
    records: Store | None,
    needed: Callable[[], Collection[str]],
    grace_seconds: float,
    put_since: Callable[[int, Manifest], Collection[str] | None],
    removed: set[str],
) -> GcReport:
    """Remove old garbage, and list the rest.

    Parameters
    ----------
    newest
        Brings the view up to the newest version, and returns that.
    records
        The store of the records; None leaves it alone.
    needed
        Returns the digests of the records that the newest version needs.
    put_since
        Returns the digests of the records that versions after a given one, up to another, have
        brought; None if that is not known.
    removed
        Receives what is removed: ``"record DIGEST"`` and ``"segment KEY"``.
    """
    # Listed before the log is read: what is written and committed meanwhile is no garbage.
    stored = dict(segments.sizes())
    present = {} if records is None else dict(records.sizes())
    head = newest()
    used = {part.key for file in head.files() for part in file.parts}
    sizes = {
        f"segment {key.digest}": size for key, size in stored.items() if key.digest not in used
    }
    if present:
        wanted = needed()
        sizes |= {
            f"record {key.digest}": size
            for key, size in present.items()
            if key.digest not in wanted
        }
    sizes |= {f"version {one}": 0 for one in log.versions() if one < head.version}
    listed, now = log.garbage(), time.time()
    since = {name: min(listed.get(name, now), now) for name in sizes}
    if again := [name for name in sizes if name in listed and name.startswith("record ")]:
        # What was needed again since then has been garbage for less time than the list says.
        put = put_since(int(listed[_NEWEST]), head) if _NEWEST in listed else None
        for name in again:
            if put is None or name.partition(" ")[2] in put:
                since[name] = now
    old = [name for name, first in since.items() if now - first >= _grace_of(name, grace_seconds)]
    num_records = num_others = size_bytes = 0
    for name in old:
        kind, _, what = name.partition(" ")
        if kind == "version":
            log.delete(int(what))
            num_others += 1
        elif kind == "segment":
            removed.add(name)
            num_others += segments.delete(ChunkKey(what))
        elif records is not None:
            removed.add(name)
            if records.delete(ChunkKey(what)):
                num_records += 1
                size_bytes += sizes[name]
        del since[name]
    log.list_garbage({**since, _NEWEST: head.version})
    return GcReport(num_records, size_bytes, num_others)


def _grace_of(name: str, grace_seconds: float) -> float:
    return max(grace_seconds, VERSIONS_SECONDS) if name.startswith("version ") else grace_seconds
