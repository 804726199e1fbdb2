"""The first stage: rows of files or documents are read, compared, and cut into packets of chunks.

It is a stateless task of Ray. What it loads (the tokenizer, the parser's process, the connection
to the store) stays in the worker process for the next task of the same job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from kvrag.chunk import Chunk, Document, Mark
from kvrag.foreign import document_failures
from kvrag.ingest.chunker import Cutter
from kvrag.ingest.loaders import TEXT_FIELDS, row_to_document, to_document
from kvrag.ingest.plan import Known, Plan, PlannedDocument, Planner, Sources, document_digest
from kvrag.ingest.ray.packets import Packet, against_second, pack, split
from kvrag.ingest.ray.reading import Listed, each_row, read_listed
from kvrag.ingest.ray.workers import Job
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import FileState
from kvrag.ingest.stages import CutAgain, embed

_GIVEN = "kvrag_input"  # the one column of rows that the driver makes


class KnownPart:
    """The part of the catalog that concerns some documents (`kvrag.ingest.plan.Known`).

    Parameters
    ----------
    digests
        Digests of documents by source.
    state, of_file
        State of one file, and the digests of its documents.
    """

    def __init__(
        self,
        digests: Mapping[str, str],
        state: FileState | None = None,
        of_file: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._digests = digests
        self._states = {} if state is None else {state.path: state}
        self._of_file = of_file or {}

    def file(self, path: str) -> FileState | None:
        """Return a file's state when it was last read, or None if it never was."""
        return self._states.get(path)

    def documents_of_file(self, path: str) -> dict[str, str]:
        """Return source and digest of a file's documents."""
        return dict(self._of_file.get(path, {}))

    def digest_of(self, source: str) -> str | None:
        """Return a document's digest, or None if it is not indexed."""
        return self._digests.get(source)


class _Planning:
    """What stays in a worker process between tasks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._parser = job.parser()
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
            for name in ("removed", "unchanged", "failed", "gone_files", "touched"):
                getattr(waiting, name).extend(getattr(plan, name))
            waiting.missing |= plan.missing
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
        cut_again = CutAgain(self._parser, self._cutter)
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
                state = None if told["state"] is None else FileState(**told["state"])
                view = KnownPart(told["digests"], state, {told["path"]: told["of_file"]})
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
            embed(job.encoders.embedding, packet.plan.documents)
        packet.cpu_seconds = time.process_time() - started
        started = time.process_time()
        yield pack(packet, job.config.embedding_dim)


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
