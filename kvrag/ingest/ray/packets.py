"""The stages of Ray, and the packets between them: chunks as rows of an Arrow table that travels.

The first stage reads and compares rows of files or documents, and cuts them into packets. It is a
stateless task: what it loads (the tokenizer, the parser's process, the connection to the store)
stays in the worker process for the next task of the same job. Actors embed and encode packets.

A packet holds about as many tokens as one call of an actor computes. A long document is spread over
several packets. Nothing of a packet is pickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kvrag.chunk import Chunk, ChunkKey, Document, Mark
from kvrag.codec.profile import Profile
from kvrag.codec.registry import get_codec
from kvrag.errors import StoreError
from kvrag.ingest import stages
from kvrag.ingest.chunker import Cutter
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import SIMILAR
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import TEXT_FIELDS, row_to_document, to_document
from kvrag.ingest.parsing import Parser
from kvrag.ingest.plan import Known, Plan, PlannedDocument, Planner, Sources, document_digest
from kvrag.ingest.ray.reading import Listed, each_row, read_listed
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.schema import Change, FileState
from kvrag.plugins import document_failures
from kvrag.store.base import Store, tiers_of
from kvrag.store.registry import open_store

if TYPE_CHECKING:
    from kvrag.ingest.companions import Companions


_SCHEMA = pa.schema([("head", pa.large_string()), ("vectors", pa.large_binary())])
# What a packet says of a chunk, whose source is that of its document.
_FIELDS = tuple(one.name for one in fields(Chunk) if one.name != "source")


@dataclass
class Packet:
    """The work of one call of an actor.

    Attributes
    ----------
    plan
        The documents with their chunks, of which the last one's other chunks may be in a later
        packet; and what planning found beside them. The collector counts documents once.
    outcome
        What was computed for it.
    stored
        Name of KV that was stored for it, the last; "" if nothing was.
    cpu_seconds
        Processor time of the processes that handled it, all of their threads.
    """

    plan: Plan = field(default_factory=Plan)
    outcome: stages.Outcome = field(default_factory=stages.Outcome)
    stored: str = ""
    cpu_seconds: float = 0.0


def against_second(source: str) -> str:
    """Return the reason against a row whose source an earlier one has."""
    return (
        f"{source}: an earlier row has the same source and is used instead; give each row a "
        "different one"
    )


def pack(packet: Packet) -> pa.Table:
    """Return a packet as a table of one row."""
    documents = packet.plan.documents
    vectors = [of_chunk for one in documents for of_chunk in one.vectors]
    bare = [replace(one, document=None, chunks=[], vectors=[]) for one in documents]
    head = asdict(replace(packet, plan=replace(packet.plan, documents=bare)))
    head["chunks"] = [
        [[getattr(chunk, name) for name in _FIELDS] for chunk in one.chunks] for one in documents
    ]
    head["num_windows"] = [[len(of_chunk) for of_chunk in one.vectors] for one in documents]
    head["dim"] = vectors[0].shape[1] if vectors else 0
    row = {
        "head": json.dumps(head, ensure_ascii=False),
        "vectors": b"".join(of_chunk.astype("<f4").tobytes() for of_chunk in vectors),
    }
    return pa.Table.from_pylist([row], schema=_SCHEMA)


def unpack(table: pa.Table) -> Iterator[Packet]:
    """Yield the packets of a table, in order."""
    for row in table.to_pylist():
        head = json.loads(row["head"])
        chunks, num_windows = head.pop("chunks"), head.pop("num_windows")
        vectors = np.frombuffer(row["vectors"], "<f4").reshape(-1, head.pop("dim") or 1)
        told = head.pop("plan")
        told["failed"] = [FailedDocument(**one) for one in told["failed"]]
        told["touched"] = [FileState(**one) for one in told["touched"]]
        told["missing"] = {key: (own, before) for key, (own, before) in told["missing"].items()}
        place = 0
        documents = []
        for one, its, counts in zip(told.pop("documents"), chunks, num_windows, strict=True):
            document = PlannedDocument(**one)
            document.file = FileState(**one["file"]) if one["file"] else None
            document.chunks = [_chunk(document.source, values) for values in its]
            for count in counts:
                document.vectors.append(vectors[place : place + count])
                place += count
            documents.append(document)
        yield Packet(Plan(documents, **told), stages.Outcome(**head.pop("outcome")), **head)


def _chunk(source: str, values: list[Any]) -> Chunk:
    named = dict(zip(_FIELDS, values, strict=True))
    for name in ("token_ids", "token_starts"):
        named[name] = tuple(named[name])
    return Chunk(**{**named, "source": source, "contexts": tuple(map(tuple, named["contexts"]))})


def split(
    documents: Iterable[PlannedDocument], batch_tokens: int
) -> Iterator[list[PlannedDocument]]:
    """Yield documents in groups of about `batch_tokens` tokens; cuts those that are longer."""
    group: list[PlannedDocument] = []
    room = batch_tokens
    for document in documents:
        rest = document.chunks
        is_first = True
        while rest or is_first:
            taken = 0
            while taken < len(rest) and room > 0:
                room -= len(rest[taken].token_ids)
                taken += 1
            group.append(replace(document, chunks=rest[:taken]))
            rest, is_first = rest[taken:], False
            if room <= 0:
                yield group
                group, room = [], batch_tokens
    if group:
        yield group


def single_chunks(missing: Iterable[tuple[ChunkKey, Chunk]], batch_tokens: int) -> Iterator[Packet]:
    """Yield packets of chunks in this order, each as a separate document, to be encoded."""
    alone = (PlannedDocument(one.source, "", {}, chunks=[one]) for _, one in missing)
    yield from (Packet(Plan(documents)) for documents in split(alone, batch_tokens))


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

    def __init__(self, run: stages.Run, plan: Plan, is_dataset: bool) -> None:
        self._run = run
        self._plan = plan
        self._sources: dict[str, str] | None = {} if is_dataset else None
        self._is_encoded = run.config.context != SIMILAR  # when it comes
        self._committer = stages.Committer(run.storage, plan)
        self._change = Change(
            forget_files=plan.gone_files[:], remove=plan.removed[:], put_files=plan.touched[:]
        )
        self.cpu_seconds = 0.0

    def collect(self, packets: Iterable[Packet], companions: Companions | None = None) -> None:
        """Take all packets, in order. Raises StoreError; what was committed before stays.

        With context ``similar``, `companions` has them encoded.
        """
        parts = self._parts(packets)
        if self._run.dry_run:  # their chunks stay where they were counted
            for part in parts:
                if self._note(part) and part.reason:
                    self._committer.fail(part)
        elif companions is not None:
            self._commit([])  # what is gone precedes nothing any more
            companions.write(self._whole(parts), self._write)
        else:
            for window in stages.windows(filter(self._note, assemble(parts))):
                self._commit(window)
            self._commit([])  # what the last packets say beside their documents
        self._committer.list_failures()

    def encoded(self, packets: Iterable[Packet]) -> dict[ChunkKey, str]:
        """Take packets of `single_chunks` that are encoded; return why some could not be."""
        key_of = self._run.storage.config.key_of
        bad: dict[ChunkKey, str] = {}
        for packet in packets:
            self._count(packet)
            self._check_stored(packet)
            for one in packet.plan.documents:
                if one.reason:
                    bad[key_of(one.chunks[0])] = one.reason.removeprefix(f"{one.source}: ")
        return bad

    def _whole(self, parts: Iterable[PlannedDocument]) -> Iterator[PlannedDocument]:
        yield from filter(self._note, assemble(parts))
        self._commit([])

    def _write(
        self, documents: list[PlannedDocument], bad: dict[ChunkKey, str], change: Change
    ) -> None:
        stages.refuse(documents, self._run.storage.config.key_of, bad)
        self._change.after = change.after
        self._commit(documents)

    def _count(self, packet: Packet) -> None:
        self._run.outcome.add(packet.outcome)
        self.cpu_seconds += packet.cpu_seconds

    def _parts(self, packets: Iterable[Packet]) -> Iterator[PlannedDocument]:
        for packet in packets:
            self._take(packet.plan)
            self._count(packet)
            if self._is_encoded and not self._run.dry_run:
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
        key = ChunkKey(packet.stored) if packet.stored else storage.config.key_of(part.chunks[0])
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
        unchanged = [source for source in news.unchanged if self._is_first(source)]
        _merge(replace(news, unchanged=unchanged), self._plan)
        self._change.remove += news.removed
        self._change.forget_files += news.gone_files
        self._change.put_files += news.touched

    def _commit(self, documents: list[PlannedDocument]) -> None:
        self._committer.commit(documents, self._change)
        self._change = Change()


def _merge(news: Plan, plan: Plan) -> None:
    """Add to a plan what another says beside documents."""
    for name in ("removed", "unchanged", "failed", "gone_files", "touched"):
        getattr(plan, name).extend(getattr(news, name))
    plan.missing |= news.missing


MAX_ENDS = 3
"""How often a process may end while it computes one chunk, before the chunk is refused."""


@dataclass(frozen=True)
class Job:
    """The settings of an ingestion, as plain values that travel to other machines.

    Attributes
    ----------
    folder
        The index folder, for messages; other machines need not have it.
    config
        The settings of the index.
    model, device
        Where to load the model from, and where it runs (`Index.open`).
    store
        URL of the store of KV.
    codec, profile
        Name of the codec of new records, and the content of its profile; b"" for none.
    writer
        The content of the index's writer; b"" for none.
    limits, loaders
        How to read files (`Index.add`).
    force, dry_run
        As in `Run`.
    batch_tokens, cpus
        As in `RayOptions`.
    """

    folder: str
    config: IndexConfig
    model: str
    device: str | None
    store: str
    codec: str
    profile: bytes
    writer: bytes
    limits: ParseLimits
    loaders: tuple[tuple[str, str], ...]
    force: bool
    dry_run: bool
    batch_tokens: int
    cpus: float

    @property
    def is_similar(self) -> bool:
        """Whether chunks are encoded only once all are embedded, each after its nearest."""
        return self.config.context == SIMILAR

    @cached_property
    def encoders(self) -> Encoders:
        """The models of the index, each loaded on first use."""
        found = Encoders(
            Path(self.folder), self.config, model=self.model, embedding=None, device=self.device
        )
        found.writer = self.writer
        return found

    def open_store(self) -> Store:
        """Open the store of KV; of tiers only the last one, which all machines share.

        Raises as `kvrag.store.registry.open_store` does.
        """
        url = self.store
        return open_store(url.rpartition("|")[2] if url.startswith("tiered:") else url)


class Attempts:
    """Counts how often something was begun without an end: an actor of Ray, for all others."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def begin(self, name: str) -> int:
        """Return how often it was begun before."""
        before = self._counts.get(name, 0)
        self._counts[name] = before + 1
        return before

    def end(self, name: str) -> None:
        """Forget it."""
        self._counts.pop(name, None)


class RemoteAttempts:
    """The counts in an actor of `Attempts`; one that is gone has counted nothing."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, name: str) -> int:
        """Return how often it was begun before."""
        import ray

        try:
            return int(ray.get(self._actor.begin.remote(name)))
        except ray.exceptions.RayActorError:
            return 0

    def end(self, name: str) -> None:
        """Forget it."""
        self._actor.end.remote(name)


class Encoder:
    """Embeds packets' chunks, computes their KV and stores it, unless it is stored already.

    With context ``similar``, planning embeds them.

    Parameters
    ----------
    job
        The settings.
    attempts
        If a process ended while it computed a packet, the next one computes it chunk by chunk, and
        refuses a chunk that ended several.
    """

    def __init__(self, job: Job, attempts: Attempts | RemoteAttempts) -> None:
        import torch

        torch.set_num_threads(max(1, int(job.cpus)))
        self._job = job
        self._attempts = attempts
        self._store = job.open_store()
        profile = Profile.from_bytes(job.profile) if job.profile else None
        self._codec = get_codec(job.codec, profile)
        self._prefill = job.encoders.prefill
        _ = job.encoders.model

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the packets of a table, with what was done and what cannot be computed."""
        return pa.concat_tables([self._encoded(packet) for packet in unpack(table)])

    def _encoded(self, packet: Packet) -> pa.Table:
        started = time.process_time()
        maker = stages.RecordMaker(self._store, self._prefill, packet.outcome)
        maker.codec = self._codec
        documents = packet.plan.documents
        sound = (one for one in documents if one.chunks and not one.reason)
        name = next((one.chunks[0].chunk_id for one in sound), "")
        is_careful = bool(name) and self._attempts.begin(name) > 0
        if not self._job.is_similar:
            stages.embed(self._job.encoders.embedding, documents)
        bad: dict[ChunkKey, str] = {}
        # Others may have stored some of it since it was planned.
        missing = stages.lacking(
            documents, self._job.config.key_of, self._store, by_context=self._job.is_similar
        )
        with stages.BackgroundWriter() as writer:
            for key, chunk in missing:
                if is_careful:
                    self._make_alone(key, chunk, maker, bad)
                else:
                    maker.make(key, chunk, writer, bad)
        # The last task has ended only now.
        packet.stored = next((key.digest for key, _ in reversed(missing) if key not in bad), "")
        if name:
            self._attempts.end(name)
        stages.refuse(documents, self._job.config.key_of, bad)
        packet.cpu_seconds += time.process_time() - started
        return pack(packet)

    def _make_alone(
        self, key: ChunkKey, chunk: Chunk, maker: stages.RecordMaker, bad: dict[ChunkKey, str]
    ) -> None:
        if self._attempts.begin(key.digest) >= MAX_ENDS:
            bad[key] = (
                f"the process that computes chunk {chunk.ordinal} ended {MAX_ENDS} times while it "
                "did so; look at the logs of Ray, and split or leave out the document"
            )
            return
        with stages.BackgroundWriter() as writer:
            maker.make(key, chunk, writer, bad)
        self._attempts.end(key.digest)


_GIVEN = "kvrag_input"  # the one column of rows that the driver makes


@dataclass(frozen=True)
class KnownPart:
    """The part of the catalog that concerns a file, or documents (`kvrag.ingest.plan.Known`).

    Attributes
    ----------
    digests
        Digests of documents by source.
    state, of_file
        State of the file, and the digests of its documents.
    """

    digests: Mapping[str, str]
    state: FileState | None = None
    of_file: Mapping[str, str] = field(default_factory=dict)

    def file(self, _: str) -> FileState | None:
        """Return the file's state when it was last read, or None if it never was."""
        return self.state

    def documents_of_file(self, _: str) -> dict[str, str]:
        """Return source and digest of the file's documents."""
        return dict(self.of_file)

    def digest_of(self, source: str) -> str | None:
        """Return a document's digest, or None if it is not indexed."""
        return self.digests.get(source)


class _Planning:
    """What stays in a worker process between tasks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._parser = Parser(job.limits, dict(job.loaders))
        self._cutter = Cutter(job.encoders, job.config)
        self._store = job.open_store() if job.dry_run else None
        self._known: Any = None
        self._digests: Mapping[str, str] = {}

    def close(self) -> None:
        """End the parser's process, and close the store."""
        self._parser.close()
        if self._store is not None:
            self._store.close()

    def digests(self, known: Any) -> Mapping[str, str]:
        """Return the digests of indexed documents, fetched once for each run."""
        if known != self._known:  # another run of the same job
            import ray

            self._known, self._digests = known, {} if known is None else ray.get(known)
        return self._digests

    def packets(self, table: pa.Table, known: Mapping[str, str]) -> Iterator[Packet]:
        """Yield packets of chunks for rows of `file_row` and `document_row`, or of a dataset."""
        waiting = Plan()
        waiting_tokens = 0
        of_dataset = KnownPart(known)
        seen: dict[str, str] = {}
        for view, sources in self._inputs(table, of_dataset):
            if view is of_dataset:
                # Packets do not tell what is unchanged before a document from what is after it.
                for source in seen.keys() & sources.documents.keys():
                    if document_digest(sources.documents.pop(source)) != seen[source]:
                        waiting.failed.append(FailedDocument(source, against_second(source)))
            plan = self._plan(view, sources)
            if view is of_dataset:
                seen |= {source: known[source] for source in plan.unchanged}
                seen |= {planned.source: planned.digest for planned in plan.documents}
            _merge(plan, waiting)
            for document in self._cut_documents(plan):
                waiting.documents.append(document)
                waiting_tokens += sum(len(chunk.token_ids) for chunk in document.chunks)
                if waiting_tokens >= self.job.batch_tokens:
                    yield from self._full(waiting)
                    waiting, waiting_tokens = Plan(), 0
        yield from self._full(waiting)

    def _full(self, plan: Plan) -> Iterator[Packet]:
        first, *others = list(split(plan.documents, self.job.batch_tokens)) or [[]]
        yield Packet(replace(plan, documents=first))
        yield from (Packet(Plan(documents)) for documents in others)

    def _plan(self, view: KnownPart, sources: Sources) -> Plan:
        def missing_key(chunk: Chunk) -> str | None:
            if self._store is None:
                return None
            key = self.job.config.key_of(chunk)
            return None if self._store.contains(key) else key.digest

        planner = Planner(
            view, self._parser, self._cutter, missing_key, lambda _: None, self.job.force
        )
        return planner.run(sources)

    def _cut_documents(self, plan: Plan) -> Iterator[PlannedDocument]:
        """Yield the documents of a plan; those whose chunks it has not kept are cut once more."""
        cut_again = stages.CutAgain(self._parser, self._cutter)
        for document in plan.documents:
            if self.job.dry_run:
                document.chunks = []
            else:
                cut_again(document)
            yield document

    def _inputs(
        self, table: pa.Table, of_dataset: KnownPart
    ) -> Iterator[tuple[KnownPart, Sources]]:
        """Yield what is known and what is planned: a row, or a file. `of_dataset` is of rows."""
        for row in (row for batch in table.to_batches() for row in each_row(batch)):
            if not isinstance(row, dict):
                name = _name_of(dict.fromkeys(table.column_names))
                failed = [FailedDocument(name, f"{name}: cannot be read ({row})")]
                yield of_dataset, Sources([], [], {}, failed)
                continue
            if _GIVEN not in row:
                yield of_dataset, self._sources(row, _name_of(row))
                continue
            told = json.loads(row[_GIVEN])
            if "listed" in told:
                listed = Listed(**told["listed"])
                reasons: list[str] = []
                max_bytes = self.job.limits.max_file_bytes
                for found, place in read_listed(listed, max_bytes, reasons.append):
                    yield of_dataset, self._sources(found, place, listed.path)
                failed = [FailedDocument(listed.path, reason) for reason in reasons]
                yield of_dataset, Sources([], [], {}, failed)
            elif "document" in told:
                given = told["document"]
                outline = tuple(Mark(*mark) for mark in given["outline"])
                document = Document(**{**given, "outline": outline})
                sources = Sources([], [], {document.source: document}, [])
                yield KnownPart(told["digests"]), sources
            else:
                state = FileState(**told["state"]) if told["state"] else None
                view = KnownPart(told["digests"], state, told["of_file"])
                yield view, Sources([told["path"]], [], {}, [])

    def _sources(self, row: dict[str, Any], place: str, path: str | None = None) -> Sources:
        """Return the documents of a row of a file; `place` says in messages where it is."""
        documents: dict[str, Document] = {}
        failed: list[FailedDocument] = []
        source = next((str(row[key]) for key in ("source", "id") if row.get(key) is not None), "")
        name = source or place
        with document_failures(lambda reason: failed.append(FailedDocument(name, reason))):
            for document in self._documents(row, source, place, path):
                documents[document.source] = document
        return Sources([], [], documents, failed)

    def _documents(
        self, row: dict[str, Any], source: str, place: str, path: str | None
    ) -> list[Document]:
        content, name = row.get("bytes"), row.get("path")
        # A text beside them makes the row a document, such as one of Parquet.
        has_text = any(isinstance(row.get(one), str) for one in TEXT_FIELDS)
        if isinstance(content, bytes) and isinstance(name, str) and not has_text:
            return self._parser.parse(name, content)
        given = {key: value for key, value in row.items() if key != "source"}
        if source and path:  # a row named by its content may be in several files
            given.setdefault("path", path)
        return [to_document(row_to_document(given, source, place))]


def plan_rows(table: pa.Table, job: Job, known: Any = None) -> Iterator[pa.Table]:
    """Yield packets for a block of rows; embedded ones with context ``similar``.

    Parameters
    ----------
    table, job
        The rows, and the settings.
    known
        For rows of a dataset: a reference in Ray's object store to the digests of the indexed
        documents, by source; None if there are none.
    """
    started = time.process_time()
    planning = _planning(job)
    for packet in planning.packets(table, planning.digests(known)):
        if job.is_similar and not job.dry_run:
            stages.embed(job.encoders.embedding, packet.plan.documents)
        packet.cpu_seconds = time.process_time() - started
        started = time.process_time()
        yield pack(packet)


def file_row(catalog: Known, path: str) -> dict[str, str]:
    """Return the row of one file: its path, and what the catalog knows of it."""
    state = catalog.file(path)
    of_file = catalog.documents_of_file(path)
    told = {
        "path": path,
        "state": None if state is None else asdict(state),
        "of_file": of_file,
        "digests": _digests(catalog, path) | of_file,
    }
    return {_GIVEN: json.dumps(told)}


def document_row(catalog: Known, document: Document) -> dict[str, str]:
    """Return the row of one document, and what the catalog knows of it."""
    told = {"document": asdict(document), "digests": _digests(catalog, document.source)}
    return {_GIVEN: json.dumps(told, default=str)}


def listed_row(listed: Listed) -> dict[str, str]:
    """Return the row of one file that a task reads from its place."""
    return {_GIVEN: json.dumps({"listed": asdict(listed)})}


def _name_of(row: Mapping[str, Any]) -> str:
    """Return where a row of a dataset is, as far as it says so."""
    path = row.get("path")
    return path if isinstance(path, str) else f"a row with the columns {', '.join(row) or '(none)'}"


def _digests(catalog: Known, source: str) -> dict[str, str]:
    digest = catalog.digest_of(source)
    return {} if digest is None else {source: digest}


_kept: list[_Planning] = []


def _planning(job: Job) -> _Planning:
    if not _kept or _kept[0].job != job:
        forget()
        _kept.append(_Planning(job))
    return _kept[0]


def forget() -> None:
    """Close what stays in this process between tasks."""
    while _kept:
        _kept.pop().close()
