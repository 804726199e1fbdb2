"""Adding documents to an index, and removing them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, ParameterError, StoreError
from kvrag.ingest import stages
from kvrag.ingest.config import writer_lock
from kvrag.ingest.contexts import SIMILAR
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.files import is_storable
from kvrag.ingest.fitter import CodecFitter
from kvrag.ingest.maintenance import audit_catalog, losses, mend_catalog
from kvrag.ingest.parsing import Parser
from kvrag.ingest.plan import Plan, PlannedDocument, Planner, Sources, find_gone, gather
from kvrag.ingest.report import IngestProgress, IngestReport
from kvrag.ingest.schema import Change
from kvrag.ingest.stages import (
    BackgroundWriter,
    Committer,
    CutAgain,
    Outcome,
    RecordMaker,
    Run,
    Runner,
    windows,
)
from kvrag.ingest.storage import Storage

Progress = Callable[[IngestProgress], None]


class Writer:
    """Writes the documents of one index.

    Parameters
    ----------
    storage, encoders, fitter
        The storage, the encoders and the fitter of the index.
    """

    def __init__(self, storage: Storage, encoders: Encoders, fitter: CodecFitter) -> None:
        self._storage = storage
        self._encoders = encoders
        self._fitter = fitter
        self._is_swept = False

    def add(
        self,
        paths_or_documents: Any,
        parser: Parser,
        *,
        dry_run: bool,
        force: bool,
        on_progress: Progress | None,
        runner: Runner | None,
    ) -> IngestReport:
        """Add files and documents to the index (`Index.add`)."""
        storage = self._storage
        storage.require_open()
        arguments.flag(dry_run, "dry_run")
        arguments.flag(force, "force")
        if on_progress is not None and not callable(on_progress):
            raise ParameterError(f"on_progress {arguments.shown(on_progress)}: expected a function")
        sources = gather(paths_or_documents, storage.path, parser.suffixes)
        lock_taken = contextlib.nullcontext() if dry_run else writer_lock(storage.path)
        with parser, lock_taken:
            run = replace(self._run_of(sources, parser), force=force, dry_run=dry_run)
            run = replace(run, on_progress=on_progress or run.on_progress)
            try:
                return self._add(run, runner or run_here)
            except BaseException:
                if not dry_run:  # what was committed before needs its records
                    with contextlib.suppress(Exception):
                        self._restore_removed()
                raise

    def read_again(self, paths: Sequence[str]) -> IngestReport:
        """Read files again, even unchanged ones; the caller holds the writer's lock."""
        with Parser(None, None) as parser:
            run = self._run_of(Sources(list(paths), [], {}, []), parser)
            return self._add(replace(run, force=True), run_here)

    def delete(self, sources: Sequence[str], chunk_ids: Sequence[str]) -> int:
        """Remove documents and single chunks (`Index.delete`)."""
        storage = self._storage
        storage.require_open()
        sources = arguments.texts(sources, "sources")
        chunk_ids = arguments.texts(chunk_ids, "chunk_ids")
        with writer_lock(storage.path):
            storage.refresh()
            catalog = storage.catalog
            known = {
                source: catalog.chunk_ids_of(source)
                for source in dict.fromkeys(sources)
                if is_storable(source)
            }
            num_removed = sum(map(len, known.values()))
            if known:
                storage.apply(Change(remove=list(known)))
            if chunk_ids:
                found = catalog.find_chunks(filter(is_storable, chunk_ids))
                num_removed += storage.apply(Change(remove_chunks=list(found)))
            _refresh_caches(storage)
            return num_removed

    # -- private -----------------------------------------------------------------------------

    def _run_of(self, sources: Sources, parser: Parser) -> Run:
        storage = self._storage
        self._fitter.failed_tokens = 0
        codec_for = self._fitter.codec_for
        return Run(storage, self._encoders, codec_for, parser, sources, storage.config)

    def _add(self, run: Run, runner: Runner) -> IngestReport:
        """Do the work of `add`; except in a dry run, the caller holds the writer's lock."""
        started = time.perf_counter()
        storage, dry_run = self._storage, run.dry_run
        catalog = storage.catalog
        if storage.log is not None and not dry_run:
            storage.log.begin()
        storage.refresh()
        storage.reload_codec()
        is_sound = self._is_swept or catalog.stored.has_sound_tables()
        lost = None if dry_run or is_sound else self._heal_first()
        num_noted = catalog.num_noted

        def mend() -> bool:
            nonlocal lost
            if dry_run or lost is not None or catalog.num_noted == num_noted:
                return False
            lost = self._heal_first()
            return True

        config = storage.config
        run = replace(run, config=config, force=run.force or not is_sound, mend=mend)
        plan = runner(run)
        note = "" if dry_run else self._finish(run, plan, lost)
        self._is_swept = self._is_swept or not dry_run
        return self._report(run, plan, note, started)

    def _finish(self, run: Run, plan: Plan, lost: Callable[[int], list[str]] | None) -> str:
        """Bring what is beside the catalog up to date; return a note for the user, or ""."""
        storage = self._storage
        self._restore_removed()
        _refresh_caches(storage)
        said: list[str] = []
        if storage.lost:
            said.append(f"{storage.lost}: all documents were lost; ingest all the others again")
            storage.lost = ""
        if lost is not None:
            said += ["the catalog was damaged and has been mended", *lost(len(plan.removed))]

        def say(doing: str) -> None:
            num = len(plan.documents)
            run.on_progress(IngestProgress("profile", num, num, doing=doing))

        if not storage.config.has_kv and plan.num_chunks:
            said.append("chunks are stored without KV: their model computes each prompt as a whole")
        if run.outcome.num_records:
            said.append(self._fitter.catch_up(run.outcome, say))
        return "; ".join(filter(None, said))

    def _report(self, run: Run, plan: Plan, note: str, started: float) -> IngestReport:
        outcome = run.outcome
        if run.dry_run:
            num_tokens = plan.num_tokens_to_compute
            outcome = Outcome(
                num_records=len(plan.missing),
                num_tokens_computed=num_tokens,
                num_context_tokens=plan.num_context_tokens,
                size_bytes=num_tokens * self._storage.config.expected_bytes_per_token,
            )
        num_before, seconds = outcome.num_context_tokens, outcome.seconds
        if num_before and run.config.chunk_context.is_filler:  # once, for all chunks
            num_before = min(num_before, run.cutter.num_filler_tokens())
        of_plan = ("added", "changed", "removed", "unchanged", "failed")
        told: dict[str, Any] = {name: tuple(getattr(plan, name)) for name in of_plan}
        told |= vars(outcome) | {
            "num_context_tokens": num_before,
            "seconds": time.perf_counter() - started,
            "compute_seconds": seconds,
            "tokens_per_second": outcome.num_tokens_computed / seconds if seconds else 0.0,
        }
        return IngestReport(
            num_chunks=plan.num_chunks,
            num_tokens=plan.num_tokens,
            dry_run=run.dry_run,
            note=note,
            control_strings=plan.control_strings,
            **told,
        )

    def _heal_first(self) -> Callable[[int], list[str]]:
        """Repair a damaged catalog before it is written to; return what tells what is lost."""
        self._is_swept = True
        lost = losses(self._storage, audit_catalog(self._storage))
        self.read_again(mend_catalog(self._storage, self._encoders))
        return lost

    def _restore_removed(self) -> None:
        """Compute the KV again that a `gc` of another machine removed during this ingestion."""
        storage = self._storage
        doubts = set() if storage.log is None else storage.log.in_doubt()
        for key in list(doubts):
            if not storage.home.contains(key):
                with contextlib.suppress(IndexFormatError):  # its chunk is gone again
                    self._fitter.repair(key)
            doubts.discard(key)


def _refresh_caches(storage: Storage) -> None:
    """Bring the files beside a changed catalog up to date: no removed text stays in one.

    The caller holds the writer's lock.
    """
    from kvrag.ingest.run_finder import forget_removed

    storage.catalog.words.refresh()
    storage.refresh_vectors()
    forget_removed(storage.catalog)
    if storage.log is not None:
        storage.log.compact(is_forced=False)


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
        seconds = time.perf_counter() - started
        eta = seconds * (num_inputs - num_done) / num_done
        run.on_progress(
            IngestProgress("read", num_done, num_inputs, seconds=seconds, eta_seconds=eta)
        )

    def missing_key(chunk: Chunk) -> str | None:
        key = storage.config.key_of(chunk)
        return None if storage.home.contains(key) else key.digest

    known = storage.catalog.documents
    planner = Planner(known, run.parser, run.cutter, missing_key, report, run.force)
    plan = planner.run(sources)
    find_gone(known, sources, plan)
    return plan


def _check_space(plan: Plan, run: Run) -> None:
    """Raise StoreError if the disk has no room for what a plan will write."""
    storage = run.storage
    # A shared store does not use this disk.
    per_token = 0 if storage.config.store else storage.config.expected_bytes_per_token
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
        self._committer = Committer(run.storage, plan)

    def run(self) -> None:
        plan = self._plan
        first = Change(forget_files=plan.gone_files, remove=plan.removed, put_files=plan.touched)
        if first:
            self._run.storage.apply(first)
        with BackgroundWriter() as writer:
            if self._run.config.context == SIMILAR:
                self._write_similar(writer)
            else:
                for window in windows(self._documents()):
                    self._run_window(window, writer)
        self._committer.list_failures()
        self._run.outcome.seconds = time.perf_counter() - self._started
        self._report()

    def _documents(self) -> Iterator[PlannedDocument]:
        """Yield the planned documents with their chunks, or with the reason why they have none."""
        for document in self._plan.documents:
            self._cut_again(document)
            if document.reason:
                self._num_tokens -= document.num_tokens
            yield document

    def _run_window(self, window: list[PlannedDocument], writer: BackgroundWriter) -> None:
        stages.embed(self._run.encoders.embedding, window, self._report)
        storage = self._run.storage
        missing = stages.lacking(window, storage.config.key_of, storage.home)
        bad = self._make(missing, writer)
        writer.submit(partial(self._commit, window, bad, Change()))

    def _write_similar(self, writer: BackgroundWriter) -> None:
        """Write the documents of an index whose chunks are encoded after other chunks."""
        from kvrag.ingest.companions import Companions

        run = self._run

        def embedded() -> Iterator[PlannedDocument]:
            for window in windows(self._documents()):
                stages.embed(run.encoders.embedding, window, self._report)
                yield from window

        def encode(missing: list[tuple[ChunkKey, Chunk]]) -> dict[ChunkKey, str]:
            # Among them may be chunks that were not planned: those that have lost their contexts.
            num_tokens = sum(len(one.token_ids) for _, one in missing)
            self._num_tokens = max(self._num_tokens, run.outcome.num_tokens_computed + num_tokens)
            bad = self._make(missing, writer)
            writer.wait()
            return bad

        planned = {one.source for one in self._plan.documents}
        Companions(run.storage, run.encoders, planned, encode).write(embedded(), self._commit)

    def _commit(
        self, window: list[PlannedDocument], bad: dict[ChunkKey, str], change: Change
    ) -> None:
        stages.refuse(window, self._run.storage.config.key_of, bad)
        self._committer.commit(window, change)
        for document in window:  # they are held only as long as needed
            document.chunks, document.vectors = [], []
        self._num_documents_done += len(window)

    def _make(
        self, missing: list[tuple[ChunkKey, Chunk]], writer: BackgroundWriter
    ) -> dict[ChunkKey, str]:
        """Queue records; return the reasons for those that cannot be made."""
        maker = self._maker
        if missing and (maker.codec is None or self._run.storage.coding.needs_profile):
            say = partial(self._report, "profile")
            maker.codec = self._run.codec_for([one for _, one in missing], say)
        bad: dict[ChunkKey, str] = {}
        for key, chunk in missing:
            if maker.make(key, chunk, writer, bad):
                self._report()
        return bad

    def _report(self, stage: str = "compute", doing: str = "") -> None:
        seconds = time.perf_counter() - self._started
        done = self._run.outcome.num_tokens_computed
        # Texts of a failed document may be stored already, or another document's too.
        total = max(done, self._num_tokens)
        progress = IngestProgress(
            stage=stage,
            num_documents_done=self._num_documents_done,
            num_documents=len(self._plan.documents),
            num_tokens_done=done,
            num_tokens=total,
            size_bytes_done=self._run.outcome.size_bytes,
            size_bytes_estimate=total * self._run.storage.config.expected_bytes_per_token,
            seconds=seconds,
            tokens_per_second=done / seconds if seconds > 0 else 0.0,
            eta_seconds=seconds * (total - done) / done if done else None,
            doing=doing,
        )
        self._run.on_progress(progress)
