"""Repair of a damaged catalog, and reports of what was lost."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import IndexFormatError
from kvrag.ingest.audit import Audit
from kvrag.ingest.config import RUNS_NAME
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.storage import Storage
from kvrag.store.base import Store
from kvrag.store.capabilities import Mends, capability, tiers_of


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


def audit_catalog(storage: Storage) -> Audit:
    """Check the whole catalog against its seals."""
    audit = storage.catalog.audit(storage.key_of)
    audit.structure = storage.catalog.damage()
    return audit


def store_damage(store: Store, *, mend: bool) -> list[str]:
    """Return what is wrong with a store's own list of its records; `mend` mends it.

    Raises
    ------
    StoreError
        When the medium refuses.
    """
    found: list[str] = []
    for tier in tiers_of(store):
        mends = capability(tier, Mends)
        if mends is not None and (problems := mends.damage()):
            found += problems
            if mend:
                mends.mend()
    return found


def held_by(storage: Storage, audit: Audit) -> Held:
    """Return the readable content of a damaged catalog."""
    num_documents = audit.num_documents
    with contextlib.suppress(IndexFormatError):
        num_documents = max(num_documents, storage.catalog.counts()[0])
    return Held(num_documents, frozenset(storage.catalog.distrusted()))


def mend_catalog(storage: Storage, encoders: Encoders, audit: Audit) -> list[str]:
    """Repair the catalog; return the existing files that must be read again.

    The caller holds the writer's lock. The view of a shared index is made again from its log.
    """
    catalog = storage.catalog
    if storage.log is not None:
        storage.log.rebuild()
        return []
    if audit.structure:
        catalog.rebuild()
        audit = catalog.audit(storage.key_of)
        audit.others.append("the file was rebuilt")  # something may be missing
    paths = catalog.mend(
        audit, storage.key_of, lambda text: encoders.embedding.embed_windows([text])[0]
    )
    # It may have been made from damaged tokens.
    (storage.path / RUNS_NAME).unlink(missing_ok=True)
    return [path for path in paths if Path(path).is_file()]


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
        for source in storage.catalog.distrusted()
        if source not in before.distrusted
    ]
    missing = before.num_documents - num_removed - storage.catalog.counts()[0]
    if missing > 0:
        lost.append(
            f"{missing:,} documents are gone with all their chunks; ingest all documents again"
        )
    return lost
