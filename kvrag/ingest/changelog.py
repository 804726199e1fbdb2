"""What a shared index does in place of a folder: its log takes the changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from kvrag.chunk import ChunkKey
from kvrag.ingest.report import GcReport
from kvrag.ingest.rows import Change


class ChangeLog(Protocol):
    """The log of a shared index (`kvrag.ingest.shared.log`), as the rest of the index sees it.

    Attributes
    ----------
    url
        The index's URL, with its options.
    """

    url: str

    def owns(self, store: str) -> bool:
        """Return whether the store of records with a URL is this index's alone."""

    def begin(self) -> None:
        """Say that an ingestion begins, which will rely on records that it finds in the store."""

    def in_doubt(self) -> set[ChunkKey]:
        """Return the records of committed chunks that a `gc` meanwhile may have removed.

        The caller takes out those that it has looked for.
        """

    def commit(self, change: Change) -> int:
        """Write a change to the log, and carry it out here; return the single chunks removed."""

    def save_config(self, changes: Mapping[str, Any], codec: str | None = None) -> None:
        """Record some settings, unless another codec than the given one was chosen meanwhile."""

    def refresh(self) -> int:
        """Bring this machine's view up to date; return its version."""

    def rebuild(self) -> None:
        """Replace this machine's view by what the log says."""

    def compact(self, *, is_forced: bool) -> None:
        """Publish a whole catalog, if that is due or forced."""

    def damage(self) -> list[str]:
        """Return what is wrong with the segments that the newest version names."""

    def mend(self) -> None:
        """Publish all that the newest version names again, from this machine's view."""

    def collect_garbage(
        self,
        needed: Callable[[], Collection[str]],
        restore: Callable[[str], None],
        grace_seconds: float,
        *,
        all_records: bool,
    ) -> GcReport:
        """Remove records and segments that no version has needed for `grace_seconds`."""

    def close(self) -> None:
        """Close the stores of the log."""
