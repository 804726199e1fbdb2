"""Writes computed documents to the catalog, and notes those that failed."""

from __future__ import annotations

from collections.abc import Iterable

from kvrag.ingest.catalog import Catalog
from kvrag.ingest.failures import STAYS
from kvrag.ingest.plan import Plan, PlannedDocument
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import Change, ChunkRow

COMMIT_TOKENS = 32_768
"""Tokens after which the catalog is updated: a killed run must embed at most these again."""

Computed = tuple[PlannedDocument, list[ChunkRow] | str]
"""A document with its rows, or with the reason why it has none."""


class Committer:
    """Writes the documents of one plan.

    Parameters
    ----------
    catalog
        The catalog of the index.
    plan
        The plan; receives the failures.
    """

    def __init__(self, catalog: Catalog, plan: Plan) -> None:
        self._catalog = catalog
        self._plan = plan
        self._failed: dict[str, str] = {}
        self._failed_files: set[str] = set()

    def fail(self, planned: PlannedDocument, reason: str) -> None:
        """Note why a document is left out."""
        self._failed[planned.source] = reason
        if planned.file is not None:
            self._failed_files.add(planned.file.path)

    def commit(self, documents: Iterable[Computed], change: Change | None = None) -> None:
        """Write documents in one transaction. Raises StoreError; nothing is written then.

        Parameters
        ----------
        change
            Other changes of the same transaction; receives the documents.
        """
        change = change or Change()
        last_of_files = []
        for planned, rows in documents:
            if planned.is_last_of_file:
                last_of_files.append(planned)
            if isinstance(rows, str):
                self.fail(planned, f"{planned.source}: {rows}")
                continue
            file = planned.file
            path = None if file is None else file.path
            change.put.append((planned.source, path, planned.digest, planned.metadata, rows))
        for planned in last_of_files:
            file = planned.file
            # A file with a failed document is read again next time.
            if file and file.path not in self._failed_files:
                change.put_files.append(file)
        if change:
            self._catalog.apply(change)

    def list_failures(self) -> None:
        """Move the failed documents of the plan to its failures."""
        plan = self._plan
        known = set(plan.changed)
        for source, reason in self._failed.items():
            stays = STAYS if source in known else ""
            plan.failed.append(FailedDocument(source, reason + stays))
        plan.added[:] = [source for source in plan.added if source not in self._failed]
        plan.changed[:] = [source for source in plan.changed if source not in self._failed]
