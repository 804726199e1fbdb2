"""The view of a shared index on a machine: an index folder, from the newest whole catalog."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from kvrag.ingest.catalog import FILE_NAME
from kvrag.ingest.config import IndexConfig, write_atomically
from kvrag.ingest.encryption import make_catalog
from kvrag.ingest.shared.manifest import Manifest
from kvrag.ingest.shared.parts import get_file
from kvrag.store.base import Store

_APPLIED = "applied.json"


def applied(view: Path) -> dict[int, str]:
    """Return the names by number (`Manifest.names`) of the versions that a view may be at."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        found = json.loads((view / _APPLIED).read_bytes())
        return {int(number): str(name) for number, name in found.items()}
    return {}


def note_applied(view: Path, names: Mapping[int, str]) -> None:
    """Record the names of the version that a view is at, and of those that it will be at."""
    if applied(view) != names:
        write_atomically(view / _APPLIED, json.dumps(names).encode())


def forget_applied(view: Path) -> None:
    """Say that a view's catalog may be anything, before it is replaced."""
    (view / _APPLIED).unlink(missing_ok=True)


def build(folder: Path, config: IndexConfig, head: Manifest, segments: Store, store: Store) -> None:
    """Write a catalog, and caches if there are any, to a folder without them.

    Parameters
    ----------
    head
        The version whose base is wanted; without a base, the catalog is empty.
    segments, store
        The segments, and the store of the records, whose key the catalog has.
    """
    if head.base is not None:
        for file in head.base.files:
            get_file(segments, file, folder / file.name)
        return
    with contextlib.closing(make_catalog(folder, config, store)) as catalog:
        catalog.write_through()
    for end in ("-wal", "-shm"):
        (folder / f"{FILE_NAME}{end}").unlink(missing_ok=True)
