"""The last stage, on the driver: packets become documents again, and the catalog is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError
from kvrag.ingest.plan import Plan, PlannedDocument
from kvrag.ingest.ray.packets import Packet, against_second
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import Change
from kvrag.ingest.stages import COMMIT_TOKENS, Committer, Run
from kvrag.store.capabilities import tiers_of


def assemble(parts: Iterable[PlannedDocument]) -> Iterator[PlannedDocument]:
    """Yield documents from their parts, which arrive in order; one may lack some, and says so."""
    whole: PlannedDocument | None = None
    for part in parts:
        if whole is None or whole.source != part.source:
            if whole is not None:
                yield _checked(whole)
            whole = replace(part, chunks=[], vectors=[])
        whole.chunks += part.chunks
        whole.vectors += part.vectors
        whole.reason = whole.reason or part.reason
        if len(whole.chunks) == whole.num_chunks or (part.reason and not part.chunks):
            yield _checked(whole)
            whole = None
    if whole is not None:
        yield _checked(whole)


def _checked(whole: PlannedDocument) -> PlannedDocument:
    missing = whole.num_chunks - len(whole.chunks)
    if missing and not whole.reason:
        of_all = f"{missing} of its {whole.num_chunks} chunks"
        whole.reason = f"{whole.source}: {of_all} did not arrive"
    return whole


class Collector:
    """Notes what packets say in a plan, and commits their documents.

    Parameters
    ----------
    run
        The ingestion.
    plan
        Receives what was planned.
    is_dataset
        Whether rows come from a dataset, where two may have one source: the first is used.
    """

    def __init__(self, run: Run, plan: Plan, is_dataset: bool) -> None:
        self._run = run
        self._plan = plan
        self._sources: dict[str, str] | None = {} if is_dataset else None
        self._committer = Committer(run.storage.catalog, run.storage.key_of, plan)
        self._change = Change(
            forget_files=plan.gone_files[:], remove=plan.removed[:], put_files=plan.touched[:]
        )
        self._waiting: list[PlannedDocument] = []
        self.cpu_seconds = 0.0

    def collect(self, packets: Iterable[Packet]) -> None:
        """Take all packets, in order. Raises StoreError; what was committed before stays."""
        num_tokens = 0
        parts = self._parts(packets)
        if self._run.dry_run:  # their chunks stay where they were counted
            for part in parts:
                if self._note(part) and part.reason:
                    self._committer.fail(part)
            self._committer.list_failures()
            return
        for document in assemble(parts):
            if not self._note(document):
                continue
            self._waiting.append(document)
            num_tokens += document.num_tokens
            if num_tokens >= COMMIT_TOKENS:
                self._commit()
                num_tokens = 0
        self._commit()
        self._committer.list_failures()

    def _parts(self, packets: Iterable[Packet]) -> Iterator[PlannedDocument]:
        for packet in packets:
            self._take(packet.plan)
            self._run.outcome.add(packet.outcome)
            self.cpu_seconds += packet.cpu_seconds
            if not self._run.dry_run:
                self._check_stored(packet)
            yield from packet.plan.documents

    def _check_stored(self, packet: Packet) -> None:
        """Raise StoreError if this machine does not find one record of a packet.

        Its documents would have no KV: the machine that computed it has another store, such as a
        folder that is not mounted.
        """
        storage = self._run.storage
        parts = packet.plan.documents
        part = next((part for part in parts if part.chunks and not part.reason), None)
        if part is None:
            return
        # What was stored now, if anything was: the first chunk may be on all machines already.
        key = ChunkKey(packet.stored) if packet.stored else storage.key_of(part.chunks[0])
        store = tiers_of(storage.store)[-1]
        if not store.contains(key):
            raise StoreError(
                f"a worker stored KV for {part.source}, and this machine does not find it "
                f"in {store.url}: that is not the same store on all machines; mount the "
                "folder everywhere, or choose a store that they share (redis://, s3://)"
            )

    def _note(self, document: PlannedDocument) -> bool:
        """Count a document in the plan; return False if another one has its source."""
        is_first = self._is_first(document.source, document.digest)
        if is_first:
            self._plan.note(document)
        return is_first

    def _is_first(self, source: str, digest: str = "") -> bool:
        """Return whether no row before had a source; note the row if that one said otherwise.

        `digest` is empty for a document that the index holds as it is.
        """
        if self._sources is None:
            return True
        is_first = source not in self._sources
        if self._sources.setdefault(source, digest) != digest:
            self._plan.failed.append(FailedDocument(source, against_second(source)))
        return is_first

    def _take(self, news: Plan) -> None:
        plan, change = self._plan, self._change
        plan.removed += news.removed
        plan.unchanged += filter(self._is_first, news.unchanged)
        plan.failed += news.failed
        plan.gone_files += news.gone_files
        plan.touched += news.touched
        plan.missing |= news.missing
        change.remove += news.removed
        change.forget_files += news.gone_files
        change.put_files += news.touched

    def _commit(self) -> None:
        self._committer.commit(self._waiting, self._change)
        self._waiting, self._change = [], Change()
