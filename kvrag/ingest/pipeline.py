"""An ingestion in this process: plan, and then the stages over one window of documents at a time.

Records are stored before the catalog is written. Whenever the process is killed, the catalog
names only chunks whose KV is stored, and a second run finds the records that it needs.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import StoreError
from kvrag.ingest import stages
from kvrag.ingest.plan import Plan, PlannedDocument, Planner, find_gone
from kvrag.ingest.report import IngestProgress
from kvrag.ingest.rows import Change
from kvrag.ingest.stages import BackgroundWriter, Committer, CutAgain, RecordMaker, Run

# A record's header and the fixed part of a catalog row, in bytes.
_BYTES_PER_CHUNK = 4096
# Text, token ids and token starts.
_CATALOG_BYTES_PER_TOKEN = 16


def run_here(run: Run) -> Plan:
    """Carry out an ingestion in this process.

    Raises
    ------
    StoreError
        When the disk has no room, or refuses a write; everything committed before stays.
    """
    plan = _plan(run)
    if run.mend():  # damage elsewhere must not prevent writing
        plan = _plan(replace(run, force=True))
    if not run.dry_run:
        _check_space(plan, run)
        _Computing(plan, run).run()
    return plan


def _plan(run: Run) -> Plan:
    started = time.perf_counter()
    storage, sources = run.storage, run.sources
    num_inputs = len(sources.files) + len(sources.documents)

    def report(num_done: int) -> None:
        if run.on_progress is not None:
            seconds = time.perf_counter() - started
            run.on_progress(
                IngestProgress(
                    stage="read",
                    num_documents_done=num_done,
                    num_documents=num_inputs,
                    num_tokens_done=0,
                    num_tokens=0,
                    size_bytes_done=0,
                    size_bytes_estimate=0,
                    seconds=seconds,
                    tokens_per_second=0.0,
                    eta_seconds=seconds * (num_inputs - num_done) / num_done,
                )
            )

    def missing_key(chunk: Chunk) -> str | None:
        key = storage.key_of(chunk)
        return None if storage.home.contains(key) else key.digest

    planner = Planner(storage.catalog, run.parser, run.cutter, missing_key, report, run.force)
    plan = planner.run(sources)
    find_gone(storage.catalog, sources, plan)
    return plan


def _check_space(plan: Plan, run: Run) -> None:
    """Raise StoreError if the disk has no room for what a plan will write."""
    storage = run.storage
    # A shared store does not use this disk.
    per_token = 0 if storage.is_store_shared else storage.expected_bytes_per_token
    needed = (
        plan.num_tokens_to_compute * per_token
        + (plan.num_tokens + plan.num_context_tokens) * _CATALOG_BYTES_PER_TOKEN
        + plan.num_chunks * (_BYTES_PER_CHUNK + 8 * run.config.embedding_dim)
    )
    free = shutil.disk_usage(storage.path).free
    if needed > free:
        raise StoreError(
            f"the KV of {plan.num_tokens_to_compute:,} tokens needs about {needed / 1e6:,.0f} MB "
            f"in {storage.path}, and {free / 1e6:,.0f} MB are free; free some space, or make the "
            "index on another disk"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Computing:
    """Carries out a plan; adds failed documents to its `failed`."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan = plan
        self._run = run
        self._started = time.perf_counter()
        self._num_documents_done = 0
        # The documents that fail when they are read again are not computed.
        self._num_tokens = plan.num_tokens_to_compute
        self._cut_again = CutAgain(run.parser, run.cutter)
        self._maker = RecordMaker(run.storage.home, run.encoders.prefill, run.outcome)
        # The writer's thread uses it too.
        self._committer = Committer(run.storage.catalog, run.storage.key_of, plan)

    def run(self) -> None:
        plan = self._plan
        first = Change(forget_files=plan.gone_files, remove=plan.removed, put_files=plan.touched)
        if first:
            self._run.storage.catalog.apply(first)
        with BackgroundWriter() as writer:
            for window in self._windows():
                self._run_window(window, writer)
        self._committer.list_failures()
        self._run.outcome.seconds = time.perf_counter() - self._started
        self._report()

    def _windows(self) -> Iterator[list[PlannedDocument]]:
        window: list[PlannedDocument] = []
        num_tokens = 0
        for document in self._plan.documents:
            self._cut_again(document)
            if document.reason:
                self._num_tokens -= document.num_tokens
            window.append(document)
            num_tokens += sum(len(chunk.token_ids) for chunk in document.chunks)
            if num_tokens >= stages.COMMIT_TOKENS:
                yield window
                window, num_tokens = [], 0
        if window:
            yield window

    def _run_window(self, window: list[PlannedDocument], writer: BackgroundWriter) -> None:
        run, maker, key_of = self._run, self._maker, self._run.storage.key_of
        missing = stages.lacking(window, key_of, run.storage.home)
        if missing and maker.codec is None:
            maker.codec = run.codec_for([chunk for _, chunk in missing], self._report_profile)
        bad: dict[ChunkKey, str] = {}
        for key, chunk in missing:
            if maker.make(key, chunk, writer, bad):
                self._report()
        stages.embed(run.encoders.embedding, window, self._report)

        def commit() -> None:
            stages.refuse(window, key_of, bad)
            self._committer.commit(window)
            for document in window:  # they are held only as long as needed
                document.chunks, document.vectors = [], []
            self._num_documents_done += len(window)

        writer.submit(commit)

    def _report_profile(self, doing: str) -> None:
        if self._run.on_progress is not None:
            self._run.on_progress(replace(self._progress("profile"), doing=doing))

    def _report(self) -> None:
        if self._run.on_progress is not None:
            self._run.on_progress(self._progress("compute"))

    def _progress(self, stage: str) -> IngestProgress:
        seconds = time.perf_counter() - self._started
        done = self._run.outcome.num_tokens_computed
        # Texts of a failed document may be stored already, or another document's too.
        total = max(done, self._num_tokens)
        return IngestProgress(
            stage=stage,
            num_documents_done=self._num_documents_done,
            num_documents=len(self._plan.documents),
            num_tokens_done=done,
            num_tokens=total,
            size_bytes_done=self._run.outcome.size_bytes,
            size_bytes_estimate=total * self._run.storage.expected_bytes_per_token,
            seconds=seconds,
            tokens_per_second=done / seconds if seconds > 0 else 0.0,
            eta_seconds=seconds * (total - done) / done if done else None,
        )
