"""Mending a damaged catalog, and saying what was lost."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import IndexFormatError
from kvrag.ingest.audit import Audit
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.storage import Storage


@dataclass(frozen=True)
class Held:
    """What a catalog held before it was mended.

    Attributes
    ----------
    num_documents
        Documents that there should be.
    distrusted
        Those that were not whole to our knowledge.
    """

    num_documents: int
    distrusted: frozenset[str]


def audit_catalog(storage: Storage) -> Audit:
    """Hold all that the catalog holds against its seals."""
    audit = storage.catalog.audit(storage.key_of)
    audit.structure = storage.catalog.damage()
    return audit


def held_by(storage: Storage, audit: Audit) -> Held:
    """Return what a catalog holds, damaged as it is."""
    num_documents = audit.num_documents
    with contextlib.suppress(IndexFormatError):
        num_documents = max(num_documents, storage.catalog.counts()[0])
    return Held(num_documents, frozenset(storage.catalog.distrusted()))


def mend_catalog(storage: Storage, encoders: Encoders, audit: Audit) -> list[str]:
    """Make the catalog sound; return the files to read again, of those that are there.

    Call with the writer's lock held.
    """
    catalog = storage.catalog
    if audit.structure:
        catalog.rebuild()
        audit = catalog.audit(storage.key_of)
        audit.others.append("the file was rebuilt")  # something may be missing
    paths = catalog.mend(audit, storage.key_of, lambda texts: encoders.embedding.embed(texts))
    return [path for path in paths if Path(path).is_file()]


def lost_since(before: Held, storage: Storage, num_removed: int = 0) -> list[str]:
    """Return what was lost by damage since `held_by`, and what to do about it.

    Parameters
    ----------
    before
        What the catalog held.
    storage
        The index, mended.
    num_removed
        Documents that were removed because their files are gone.
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
