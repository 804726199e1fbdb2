"""Adding documents to an index, and removing them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvrag import arguments
from kvrag.chunk import Chunk, Document
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.ingest import lock
from kvrag.ingest.computing import Outcome
from kvrag.ingest.contexts import CORPUS, encoded_behind
from kvrag.ingest.corpus_filler import choose_passages
from kvrag.ingest.cutting import Cutter
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.fitter import CodecFitter
from kvrag.ingest.healing import (
    Held,
    audit_catalog,
    held_by,
    lost_since,
    mend_catalog,
    store_damage,
)
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import is_storable
from kvrag.ingest.parsing import Parser
from kvrag.ingest.pipeline import Work, check_space, run_plan
from kvrag.ingest.plan import Plan, Planner, Sources, find_gone, gather
from kvrag.ingest.report import IngestProgress, IngestReport
from kvrag.ingest.rows import Change
from kvrag.ingest.runner import Run, Runner
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
        self._cutter = Cutter(encoders)

    def add(
        self,
        paths_or_documents: Any,
        *,
        dry_run: bool,
        force: bool,
        on_progress: Progress | None,
        limits: ParseLimits | None,
        loaders: Mapping[str, str] | None,
        runner: Runner | None = None,
    ) -> IngestReport:
        """Add files and documents to the index (`Index.add`)."""
        storage = self._storage
        storage.require_open()
        arguments.flag(dry_run, "dry_run")
        arguments.flag(force, "force")
        if on_progress is not None and not callable(on_progress):
            raise ParameterError(f"on_progress {arguments.shown(on_progress)}: expected a function")
        parser = Parser(limits, loaders)
        sources = gather(paths_or_documents, storage.path, parser.suffixes)
        lock_taken = contextlib.nullcontext() if dry_run else lock.writer_lock(storage.path)
        with parser, lock_taken:
            before = storage.config
            try:
                return self._add(sources, parser, dry_run, force, on_progress, runner)
            except BaseException:
                if not dry_run:  # what was committed before needs its records
                    with contextlib.suppress(Exception):
                        self._restore_removed()
                raise
            finally:
                if dry_run:  # it may have chosen a filler, from documents that are not added
                    storage.config = before

    def read_again(self, paths: Sequence[str]) -> IngestReport:
        """Read files again, even unchanged ones; the caller holds the writer's lock."""
        with Parser(None, None) as parser:
            return self._add(Sources(list(paths), [], {}, []), parser, False, True, None)

    def delete(self, sources: Sequence[str], chunk_ids: Sequence[str]) -> int:
        """Remove documents and single chunks (`Index.delete`)."""
        storage = self._storage
        storage.require_open()
        sources = arguments.texts(sources, "sources")
        chunk_ids = arguments.texts(chunk_ids, "chunk_ids")
        with lock.writer_lock(storage.path):
            storage.refresh()
            catalog, config = storage.catalog, storage.config
            known = {
                source: catalog.chunk_ids_of(source)
                for source in dict.fromkeys(sources)
                if is_storable(source)
            }
            num_removed = sum(map(len, known.values()))
            if known:
                catalog.apply(Change(remove=list(known)))
            if chunk_ids:
                num_removed += catalog.remove_chunks(
                    dict.fromkeys(filter(is_storable, chunk_ids)),
                    lambda ordinal, later: encoded_behind(ordinal, later, config.chunk_context),
                    storage.key_of,
                )
            storage.refresh_caches()
            return num_removed

    def cut(self, document: Document) -> list[Chunk]:
        """Split a document into chunks, each with its contexts."""
        return self._cutter.cut(document, self._storage.config)

    # -- private -----------------------------------------------------------------------------

    def _add(
        self,
        sources: Sources,
        parser: Parser,
        dry_run: bool,
        force: bool,
        on_progress: Progress | None,
        runner: Runner | None = None,
    ) -> IngestReport:
        """Do the work of `add`; except in a dry run, the caller holds the writer's lock."""
        started = time.perf_counter()
        storage = self._storage
        catalog = storage.catalog
        if storage.log is not None and not dry_run:
            storage.log.begin()
        storage.refresh()
        storage.reload_codec()
        self._cutter.neutralised.clear()
        is_sound = self._is_swept or catalog.has_sound_tables()
        before: Held | None = None
        of_store: list[str] = []
        if not dry_run:
            storage.encrypt_catalog()
            of_store = [] if self._is_swept else store_damage(storage.store, mend=True)
            if not is_sound:
                before = self._heal_first()
        num_noted = catalog.num_noted
        self._choose_passages(sources, parser, dry_run)
        if runner is not None:
            plan, outcome = self._run_with(runner, sources, parser, force or not is_sound, dry_run)
            return self._finish(plan, outcome, before, of_store, started, dry_run)
        plan = self._plan(sources, parser, force or not is_sound, on_progress)
        if catalog.num_noted > num_noted and not dry_run and before is None:
            # Damage elsewhere must not prevent writing.
            before = self._heal_first()
            plan = self._plan(sources, parser, True, on_progress)
        outcome = self._foretell(plan) if dry_run else self._run(plan, parser, on_progress)
        return self._finish(plan, outcome, before, of_store, started, dry_run)

    def _run_with(
        self, runner: Runner, sources: Sources, parser: Parser, force: bool, dry_run: bool
    ) -> tuple[Plan, Outcome]:
        """Let others plan and compute; return what they did."""
        storage, encoders = self._storage, self._encoders
        run = Run(
            storage=storage,
            encoders=encoders,
            codec_for=self._fitter.codec_for,
            sources=sources,
            parser=parser,
            force=force,
            dry_run=dry_run,
            control_strings=self._cutter.neutralised,
        )
        plan = runner(run)
        if dry_run:
            return plan, self._foretell(plan)
        return plan, run.outcome

    def _finish(
        self,
        plan: Plan,
        outcome: Outcome,
        before: Held | None,
        of_store: list[str],
        started: float,
        dry_run: bool,
    ) -> IngestReport:
        """Bring what is beside the catalog up to date, and return the report."""
        storage = self._storage
        if not dry_run:
            self._restore_removed()
            if of_store:
                of_store = [f"{self._compute_lost():,} records computed again", *of_store]
            storage.refresh_caches()
        self._is_swept = self._is_swept or not dry_run
        note = "" if dry_run else self._note(plan, outcome, before, of_store)
        seconds = outcome.seconds
        return IngestReport(
            added=tuple(plan.added),
            changed=tuple(plan.changed),
            removed=tuple(plan.removed),
            unchanged=tuple(plan.unchanged),
            failed=tuple(plan.failed),
            num_chunks=plan.num_chunks,
            num_tokens=plan.num_tokens,
            num_records=outcome.num_records,
            num_tokens_computed=outcome.num_tokens_computed,
            num_context_tokens=self._num_context_tokens(outcome),
            size_bytes=outcome.size_bytes,
            seconds=time.perf_counter() - started,
            compute_seconds=seconds,
            prefill_seconds=outcome.prefill_seconds,
            tokens_per_second=outcome.num_tokens_computed / seconds if seconds else 0.0,
            dry_run=dry_run,
            note=note,
            compression=storage.config.compression,
            control_strings=self._num_control_strings([*plan.added, *plan.changed]),
        )

    def _heal_first(self) -> Held:
        """Repair a damaged catalog before it is written to; return its former content."""
        self._is_swept = True
        audit = audit_catalog(self._storage)
        before = held_by(self._storage, audit)
        self.read_again(mend_catalog(self._storage, self._encoders, audit))
        return before

    def _choose_passages(self, sources: Sources, parser: Parser, dry_run: bool) -> None:
        """Choose the filler of context ``corpus`` from the first documents, once."""
        storage = self._storage
        config = storage.config
        if config.context != CORPUS or config.corpus_filler:
            return
        found = choose_passages(sources, parser, config.context_tokens, self.cut)
        if found and not dry_run:
            storage.save_config({"corpus_filler": found})
        else:
            storage.config = replace(storage.config, corpus_filler=found)

    def _compute_lost(self) -> int:
        """Compute the KV again that the store has lost, of unchanged documents too.

        Return the number of records.
        """
        storage = self._storage
        num_computed = 0
        for key in storage.catalog.audit(storage.key_of).needed:
            if not storage.home.contains(key):
                self._fitter.repair(key)
                num_computed += 1
        return num_computed

    def _restore_removed(self) -> None:
        """Compute the KV again that a `gc` of another machine removed during this ingestion."""
        storage = self._storage
        doubts = set() if storage.log is None else storage.log.in_doubt()
        for key in list(doubts):
            if not storage.home.contains(key):
                with contextlib.suppress(IndexFormatError):  # its chunk is gone again
                    self._fitter.repair(key)
            doubts.discard(key)

    def _plan(
        self, sources: Sources, parser: Parser, force: bool, on_progress: Progress | None
    ) -> Plan:
        started = time.perf_counter()
        num_inputs = len(sources.files) + len(sources.documents)

        def report(num_done: int) -> None:
            if on_progress is not None:
                seconds = time.perf_counter() - started
                on_progress(
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

        planner = Planner(self._storage.catalog, parser, self.cut, self._missing_key, report, force)
        plan = planner.run(sources)
        find_gone(self._storage.catalog, sources, plan)
        return plan

    def _missing_key(self, chunk: Chunk) -> str | None:
        key = self._storage.key_of(chunk)
        return None if self._storage.home.contains(key) else key.digest

    def _num_context_tokens(self, outcome: Outcome) -> int:
        """Return the tokens computed before chunks; a filler counts once, for all of them."""
        config, found = self._storage.config, outcome.num_context_tokens
        if found and config.chunk_context.is_filler:
            return min(found, self._cutter.num_filler_tokens(config))
        return found

    def _foretell(self, plan: Plan) -> Outcome:
        return Outcome(
            num_records=plan.num_records,
            num_tokens_computed=plan.num_tokens_to_compute,
            num_context_tokens=plan.num_context_tokens,
            size_bytes=plan.num_tokens_to_compute * self._storage.expected_bytes_per_token,
        )

    def _run(self, plan: Plan, parser: Parser, on_progress: Progress | None) -> Outcome:
        storage, encoders = self._storage, self._encoders
        # A shared store does not use this disk.
        room = 0 if storage.is_store_shared else storage.expected_bytes_per_token
        check_space(plan, storage.path, room, storage.config.embedding_dim)
        work = Work(
            catalog=storage.catalog,
            store=storage.home,
            codec_for=self._fitter.codec_for,
            embedding=encoders.embedding,
            parser=parser,
            chunk=self.cut,
            key_of=storage.key_of,
            prefill=encoders.prefill,
            bytes_per_token=storage.expected_bytes_per_token,
        )
        return run_plan(plan, work, on_progress)

    def _note(
        self, plan: Plan, outcome: Outcome, before: Held | None, of_store: Sequence[str]
    ) -> str:
        """Return a note for the user after an ingestion; "" if there is nothing to say."""
        storage = self._storage
        said: list[str] = []
        if storage.lost:
            said.append(f"{storage.lost}: all documents were lost; ingest all the others again")
            storage.lost = ""
        if before is not None:
            said.append("the catalog was damaged and has been mended")
            said += lost_since(before, storage, len(plan.removed))
        if of_store:
            said.append(
                "the store's list of its records was damaged and has been mended "
                f"({'; '.join(of_store[:2])})"
            )
        if outcome.num_records:
            said += [self._fitter.note(), self._cutter.note(storage.config)]
        return "; ".join(filter(None, said))

    def _num_control_strings(self, sources: Sequence[str]) -> dict[str, int]:
        """Return the number of control strings read as text, for each document with any."""
        found = self._cutter.neutralised
        return {source: found[source] for source in sources if source in found}
