"""What a runner is: it plans and computes an ingestion somewhere else, and commits it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvrag.chunk import Chunk
from kvrag.ingest.computing import Outcome
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.parsing import Parser
from kvrag.ingest.plan import Plan, Sources
from kvrag.ingest.storage import Storage

if TYPE_CHECKING:
    from kvrag.codec.base import Codec


@dataclass(frozen=True)
class Run:
    """One ingestion; its caller holds the writer's lock, unless it is a dry run.

    Attributes
    ----------
    storage, encoders, codec_for
        Of the index; `codec_for` as in `kvrag.ingest.pipeline.Work`.
    sources, parser
        The given files and documents, and the limits and loaders to read them with.
    force
        Read every file, even an unchanged one.
    dry_run
        Only count; write nothing.
    control_strings
        Receives the number of control strings read as text, by document.
    outcome
        Receives the counts of the work done.
    """

    storage: Storage
    encoders: Encoders
    codec_for: Callable[[list[Chunk], Callable[[str], None]], Codec]
    sources: Sources
    parser: Parser
    force: bool
    dry_run: bool
    control_strings: dict[str, int]
    outcome: Outcome = field(default_factory=Outcome)


class Runner(Protocol):
    """Carries out an ingestion."""

    def __call__(self, run: Run) -> Plan:
        """Return what was planned, without its documents; in a dry run nothing is written."""
        ...
