"""The second half of ingestion: embed, prefill, encode, store, and then write the catalog.

Records are stored before the catalog is written. Whenever the process is killed, the catalog
names only chunks whose KV is stored, and a second run finds the records that it needs.

Each chunk has a separate forward pass. On a CPU, the last bits of a chunk's KV depend on how many
others share its batch and how far it is padded (the shapes choose the matrix kernels). In a batch,
stored bytes would therefore depend on what else was indexed at the time. A CPU loses little
without batches: one chunk of 100 tokens or more fills the matrix units
(``kvrag bench ingest`` measures it). Much shorter chunks, and GPUs, would gain from batches of a
fixed shape.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.errors import DocumentError, StoreError
from kvrag.ingest import committing
from kvrag.ingest.background import BackgroundWriter
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.committing import Committer
from kvrag.ingest.computing import (
    Outcome,
    RecordMaker,
    by_length,
    embed_chunks,
    names_of,
    reason_against,
)
from kvrag.ingest.failures import document_failures
from kvrag.ingest.files import read_file
from kvrag.ingest.parsing import Parser
from kvrag.ingest.plan import Plan, PlannedDocument, document_digest
from kvrag.ingest.report import IngestProgress
from kvrag.ingest.rows import Change, ChunkRow, KeyOf
from kvrag.store.base import Store

if TYPE_CHECKING:
    from kvrag.codec.base import Codec
    from kvrag.ingest.embedding import Embedding
    from kvrag.kvcache import ChunkKV

# A record's header and the fixed part of a catalog row, in bytes.
_BYTES_PER_CHUNK = 4096
# Text, token ids and token starts.
_CATALOG_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class Work:
    """Everything that ingestion needs from an index.

    Attributes
    ----------
    parser
        Parses files.
    chunk
        Splits a document into chunks.
    key_of
        Returns the name of a chunk's KV, the first of several.
    prefill
        Computes the KV of one chunk after the first of its contexts.
    codec_for
        Returns the codec for new records, and fits it to a sample of chunks first if necessary;
        its second argument receives lines of progress.
    """

    catalog: Catalog
    store: Store
    embedding: Embedding
    parser: Parser
    chunk: Callable[[Document], list[Chunk]]
    key_of: KeyOf
    prefill: Callable[[Chunk], ChunkKV]
    codec_for: Callable[[list[Chunk], Callable[[str], None]], Codec]
    bytes_per_token: int


def check_space(plan: Plan, folder: Path, bytes_per_token: int, embedding_dim: int) -> None:
    """Raise StoreError if the disk has no room for what a plan will write."""
    needed = (
        plan.num_tokens_to_compute * bytes_per_token
        + (plan.num_tokens + plan.num_context_tokens) * _CATALOG_BYTES_PER_TOKEN
        + plan.num_chunks * (_BYTES_PER_CHUNK + 8 * embedding_dim)
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"the KV of {plan.num_tokens_to_compute:,} tokens needs about {needed / 1e6:,.0f} MB "
            f"in {folder}, and {free / 1e6:,.0f} MB are free; free some space, or make the "
            "index on another disk"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run_plan(
    plan: Plan,
    work: Work,
    on_progress: Callable[[IngestProgress], None] | None,
) -> Outcome:
    """Carry out a plan. Adds failed documents to its `failed`.

    Raises
    ------
    StoreError
        When the disk refuses a write; everything committed before stays.
    """
    return _Run(plan, work, on_progress).run()


class _Run:
    def __init__(
        self, plan: Plan, work: Work, on_progress: Callable[[IngestProgress], None] | None
    ) -> None:
        self._plan = plan
        self._work = work
        self._on_progress = on_progress
        self._started = time.perf_counter()
        self._outcome = Outcome()
        self._num_documents_done = 0
        # Documents that failed when they were read again, and their tokens.
        self._num_unread = self._num_tokens_unread = 0
        self._reread = Rereader(work.parser, work.chunk)
        self._maker = RecordMaker(work.store, work.prefill, self._outcome)
        # The writer's thread uses it too.
        self._committer = Committer(work.catalog, plan)

    def run(self) -> Outcome:
        plan, work = self._plan, self._work
        first = Change(forget_files=plan.gone_files, remove=plan.removed, put_files=plan.touched)
        if first:
            work.catalog.apply(first)
        with BackgroundWriter() as writer:
            for window in self._windows():
                self._run_window(window, writer)
        self._committer.list_failures()
        self._outcome.seconds = time.perf_counter() - self._started
        self._report()
        return self._outcome

    def _windows(self) -> Iterator[list[tuple[PlannedDocument, list[Chunk]]]]:
        window: list[tuple[PlannedDocument, list[Chunk]]] = []
        num_tokens = 0
        for planned in self._plan.documents:
            chunks = planned.chunks
            if chunks is None:
                with document_failures(functools.partial(self._committer.fail, planned)):
                    chunks = self._reread(planned)
            if chunks is None:
                self._num_unread += 1
                self._num_tokens_unread += planned.num_tokens
                self._report()
                continue
            planned.chunks = None  # the window holds them now, and only as long as needed
            window.append((planned, chunks))
            num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
            if num_tokens >= committing.COMMIT_TOKENS:
                yield window
                window, num_tokens = [], 0
        if window:
            yield window

    def _run_window(
        self, window: list[tuple[PlannedDocument, list[Chunk]]], writer: BackgroundWriter
    ) -> None:
        work, maker = self._work, self._maker
        all_chunks = [chunk for _, chunks in window for chunk in chunks]
        keys, required = names_of(all_chunks, work.key_of)
        missing = by_length(
            {key: chunk for key, chunk in required.items() if not work.store.contains(key)}
        )
        if missing and maker.codec is None:
            maker.codec = work.codec_for([chunk for _, chunk in missing], self._report_profile)
        bad_keys: dict[ChunkKey, str] = {}
        for key, chunk in missing:
            if maker.make(key, chunk, writer, bad_keys):
                self._report()
        vectors, bad_texts = embed_chunks(work.embedding, all_chunks, self._report)

        def commit() -> None:
            self._committer.commit(
                (
                    planned,
                    reason_against(chunks, keys, bad_keys, bad_texts)
                    or [
                        ChunkRow(chunk, keys[chunk.chunk_id], vectors[chunk.text])
                        for chunk in chunks
                    ],
                )
                for planned, chunks in window
            )
            self._num_documents_done += len(window)

        writer.submit(commit)

    def _report_profile(self, doing: str) -> None:
        if self._on_progress is not None:
            progress = self._progress("profile")
            self._on_progress(replace(progress, doing=doing))

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress("compute"))

    def _progress(self, stage: str) -> IngestProgress:
        seconds = time.perf_counter() - self._started
        done = self._outcome.num_tokens_computed
        # Texts of a failed document may be stored already, or another document's too.
        total = max(done, self._plan.num_tokens_to_compute - self._num_tokens_unread)
        return IngestProgress(
            stage=stage,
            num_documents_done=self._num_documents_done + self._num_unread,
            num_documents=len(self._plan.documents),
            num_tokens_done=done,
            num_tokens=total,
            size_bytes_done=self._outcome.size_bytes,
            size_bytes_estimate=total * self._work.bytes_per_token,
            seconds=seconds,
            tokens_per_second=done / seconds if seconds > 0 else 0.0,
            eta_seconds=seconds * (total - done) / done if done else None,
        )


class Rereader:
    """Reads and splits documents again whose chunks were not kept; each file once."""

    def __init__(self, parser: Parser, chunk: Callable[[Document], list[Chunk]]) -> None:
        self._parser = parser
        self._chunk = chunk
        self._path = ""
        self._documents: dict[str, Document] = {}
        self._reason: str | None = None

    def __call__(self, planned: PlannedDocument) -> list[Chunk]:
        """Return a document's chunks. Raises DocumentError, also if it has changed."""
        if planned.document is not None:
            return self._chunk(planned.document)
        assert planned.file is not None
        path = planned.file.path
        if path != self._path:
            self._path, self._documents, self._reason = path, {}, None
            # Once for all documents of the file, even if it fails.
            with document_failures(self._note):
                content = read_file(path, self._parser.limits.max_file_bytes)
                documents = self._parser.parse(path, content)
                self._documents = {document.source: document for document in documents}
        if self._reason is not None:
            raise DocumentError(self._reason)
        document = self._documents.get(planned.source)
        if document is None or document_digest(document) != planned.digest:
            raise DocumentError(f"{path}: changed while it was being ingested; ingest it again")
        return self._chunk(document)

    def _note(self, reason: str) -> None:
        self._reason = reason
