"""The last stage, on the driver: packets become documents again, and the catalog is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import StoreError
from kvrag.ingest.committing import COMMIT_TOKENS, Committer, Computed
from kvrag.ingest.computing import Outcome
from kvrag.ingest.plan import Plan, PlannedDocument
from kvrag.ingest.ray.packets import News, Packet, Part, against_second
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import Change, ChunkRow, KeyOf
from kvrag.ingest.runner import Run
from kvrag.store.capabilities import tiers_of


@dataclass
class Assembled:
    """A document whose parts have arrived, in order."""

    parts: list[Part] = field(default_factory=list)

    @property
    def planned(self) -> PlannedDocument:
        """The document, without its text."""
        return self.parts[0].planned

    @property
    def num_missing(self) -> int:
        """The number of its chunks that have not arrived."""
        return self.planned.num_chunks - sum(len(part.chunks) for part in self.parts)

    def chunks(self) -> Iterator[Chunk]:
        """Yield its chunks, in order."""
        for part in self.parts:
            yield from part.chunks

    def computed(self, key_of: KeyOf) -> Computed:
        """Return what is written to the catalog, or the reason why nothing is."""
        reason = next((part.reason for part in self.parts if part.reason), "")
        if not reason and self.num_missing:
            reason = f"{self.num_missing} of its {self.planned.num_chunks} chunks did not arrive"
        if reason:
            return self.planned, reason
        return self.planned, [
            ChunkRow(chunk, [key_of(one) for one in chunk.encodings()], vectors)
            for part in self.parts
            for chunk, vectors in zip(part.chunks, part.vectors, strict=True)
        ]


def assemble(parts: Iterable[Part]) -> Iterator[Assembled]:
    """Yield documents from their parts, which arrive in order; one may lack some (`computed`)."""
    whole = Assembled()
    for part in parts:
        if whole.parts and whole.planned.source != part.planned.source:
            yield whole
            whole = Assembled()
        whole.parts.append(part)
        if not whole.num_missing or (part.reason and not part.chunks):
            yield whole
            whole = Assembled()
    if whole.parts:
        yield whole


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
        self._new_keys: set[str] = set()
        self._committer = Committer(run.storage.catalog, plan)
        self._change = Change(
            forget_files=plan.gone_files[:], remove=plan.removed[:], put_files=plan.touched[:]
        )
        self._waiting: list[Assembled] = []
        self.cpu_seconds = 0.0

    def collect(self, packets: Iterable[Packet]) -> None:
        """Take all packets, in order. Raises StoreError; what was committed before stays."""
        num_tokens = 0
        parts = self._parts(packets)
        if self._run.dry_run:  # their chunks stay where they were counted
            for part in parts:
                if self._note(part) and part.reason:
                    self._committer.fail(part.planned, f"{part.planned.source}: {part.reason}")
            self._committer.list_failures()
            return
        for document in assemble(parts):
            if not self._note(document.parts[0]):
                continue
            self._waiting.append(document)
            num_tokens += document.planned.num_tokens
            if num_tokens >= COMMIT_TOKENS:
                self._commit()
                num_tokens = 0
        self._commit()
        self._committer.list_failures()

    def _parts(self, packets: Iterable[Packet]) -> Iterator[Part]:
        for packet in packets:
            self._take(packet.news)
            for count in fields(Outcome):
                own, more = (getattr(of, count.name) for of in (self._run.outcome, packet.outcome))
                setattr(self._run.outcome, count.name, own + more)
            self.cpu_seconds += packet.cpu_seconds
            if not self._run.dry_run:
                self._check_stored(packet)
            yield from packet.parts

    def _check_stored(self, packet: Packet) -> None:
        """Raise StoreError if this machine does not find one record of a packet.

        Its documents would have no KV: the machine that computed it has another store, such as a
        folder that is not mounted.
        """
        storage = self._run.storage
        part = next((part for part in packet.parts if part.chunks and not part.reason), None)
        if part is None:
            return
        # What was stored now, if anything was: the first chunk may be on all machines already.
        key = ChunkKey(packet.stored) if packet.stored else storage.key_of(part.chunks[0])
        store = tiers_of(storage.store)[-1]
        if not store.contains(key):
            raise StoreError(
                f"a worker stored KV for {part.planned.source}, and this machine does not find it "
                f"in {store.url}: that is not the same store on all machines; mount the "
                "folder everywhere, or choose a store that they share (redis://, s3://)"
            )

    def _note(self, part: Part) -> bool:
        """Note a document in the plan; return False if another one has its source."""
        plan, source = self._plan, part.planned.source
        if not self._is_first(source, part.planned.digest):
            return False
        (plan.changed if part.is_known else plan.added).append(source)
        plan.num_chunks += part.planned.num_chunks
        plan.num_tokens += part.planned.num_tokens
        if part.control_strings:
            self._run.control_strings[source] = part.control_strings
        return True

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

    def _take(self, news: News) -> None:
        plan, change = self._plan, self._change
        plan.removed += news.removed
        plan.unchanged += filter(self._is_first, news.unchanged)
        plan.failed += [FailedDocument(*one) for one in news.failed]
        plan.gone_files += news.gone_files
        plan.touched += news.touched
        change.remove += news.removed
        change.forget_files += news.gone_files
        change.put_files += news.touched
        for key, (num_tokens, num_context_tokens) in news.missing.items():
            if key not in self._new_keys:
                self._new_keys.add(key)
                plan.num_records += 1
                plan.num_tokens_to_compute += num_tokens
                plan.num_context_tokens += num_context_tokens

    def _commit(self) -> None:
        key_of = self._run.storage.key_of
        computed = [document.computed(key_of) for document in self._waiting]
        self._committer.commit(computed, self._change)
        self._waiting, self._change = [], Change()
