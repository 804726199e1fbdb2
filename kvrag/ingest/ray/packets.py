"""Packets: chunks of some documents, as rows of an Arrow table that travels between machines.

A packet holds about as many tokens as one call of an actor computes. A long document is spread over
several packets. Ids and contexts are packed as in the catalog; nothing of a packet is pickled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import pyarrow as pa

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import StoreError
from kvrag.ingest.contexts import SIMILAR
from kvrag.ingest.plan import Plan, PlannedDocument
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import Change, FileState, PackedChunk, pack_chunk, unpack_chunk
from kvrag.ingest.stages import Committer, Outcome, Run, refuse, windows
from kvrag.store.capabilities import tiers_of

if TYPE_CHECKING:
    from kvrag.ingest.companions import Companions

_TYPES = {int: pa.int64(), str: pa.large_string(), bytes: pa.binary()}
_CHUNK = pa.struct(
    [
        *(
            (name, _TYPES[kind])
            for name, kind in get_type_hints(PackedChunk).items()
            if name not in ("row", "source", "num_tokens", "contexts")
        ),
        ("contexts", pa.int32()),
        ("vectors", pa.binary()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("head", pa.large_string()),
        ("chunks", pa.list_(_CHUNK)),
        ("contexts", pa.list_(pa.binary())),
    ]
)


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
    outcome: Outcome = field(default_factory=Outcome)
    stored: str = ""
    cpu_seconds: float = 0.0


def against_second(source: str) -> str:
    """Return the reason against a row whose source an earlier one has."""
    return (
        f"{source}: an earlier row has the same source and is used instead; give each row a "
        "different one"
    )


def pack(packet: Packet, dim: int) -> pa.Table:
    """Return a packet as a table of one row; vectors have `dim` dimensions."""
    contexts: dict[bytes, int] = {}
    chunks: list[dict[str, Any]] = []
    documents = packet.plan.documents
    for document in documents:
        for number, chunk in enumerate(document.chunks):
            packed = pack_chunk(0, chunk)
            vectors = document.vectors[number] if document.vectors else None
            chunks.append(
                {
                    **packed._asdict(),
                    "contexts": contexts.setdefault(packed.contexts, len(contexts)),
                    "vectors": None if vectors is None else vectors.astype("<f4").tobytes(),
                }
            )
    bare = [replace(one, document=None, chunks=[], vectors=[]) for one in documents]
    head = asdict(replace(packet, plan=replace(packet.plan, documents=bare)))
    head |= {"num_here": [len(one.chunks) for one in documents], "dim": dim}
    row = {"head": json.dumps(head), "chunks": chunks, "contexts": list(contexts)}
    return pa.Table.from_pylist([row], schema=_SCHEMA)


def unpack(table: pa.Table) -> Iterator[Packet]:
    """Yield the packets of a table, in order."""
    for row in table.to_pylist():
        head = json.loads(row["head"])
        numbers, dim = head.pop("num_here"), head.pop("dim")
        told = head.pop("plan")
        told["failed"] = [FailedDocument(**one) for one in told["failed"]]
        told["touched"] = [FileState(**one) for one in told["touched"]]
        told["missing"] = {key: (own, before) for key, (own, before) in told["missing"].items()}
        rows = iter(row["chunks"])
        documents = []
        for number, one in zip(numbers, told.pop("documents"), strict=True):
            file = one.pop("file")
            document = PlannedDocument(**one, file=None if file is None else FileState(**file))
            _fill(document, itertools.islice(rows, number), row["contexts"], dim)
            documents.append(document)
        plan = Plan(documents, **told)
        yield Packet(plan, Outcome(**head.pop("outcome")), **head)


def _fill(
    document: PlannedDocument, rows: Iterable[dict[str, Any]], contexts: list[bytes], dim: int
) -> None:
    """Give a document its chunks and their vectors."""
    for row in rows:
        values: dict[str, Any] = {name: row.get(name) for name in PackedChunk._fields}
        values |= {"source": document.source, "contexts": contexts[row["contexts"]]}
        document.chunks.append(unpack_chunk(PackedChunk(**values)))
        if row["vectors"] is not None:
            document.vectors.append(np.frombuffer(row["vectors"], "<f4").reshape(-1, dim))


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

    def __init__(self, run: Run, plan: Plan, is_dataset: bool) -> None:
        self._run = run
        self._plan = plan
        self._sources: dict[str, str] | None = {} if is_dataset else None
        self._is_encoded = run.config.context != SIMILAR  # when it comes
        self._committer = Committer(run.storage, plan)
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
            for window in windows(filter(self._note, assemble(parts))):
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
        refuse(documents, self._run.storage.config.key_of, bad)
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

    def _commit(self, documents: list[PlannedDocument]) -> None:
        self._committer.commit(documents, self._change)
        self._change = Change()
