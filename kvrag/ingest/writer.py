"""Adding documents to an index, and removing them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvrag import arguments
from kvrag.chunk import Document
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.foreign import document_failures
from kvrag.ingest import lock
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import CORPUS, MOST_DOCUMENTS, join_passages
from kvrag.ingest.cutting import Cutter
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.files import read_file
from kvrag.ingest.fitter import CodecFitter
from kvrag.ingest.healing import (
    Held,
    audit_catalog,
    held_by,
    lost_since,
    mend_catalog,
)
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import is_storable
from kvrag.ingest.parsing import Parser
from kvrag.ingest.pipeline import run_here
from kvrag.ingest.plan import Plan, Sources, gather
from kvrag.ingest.report import IngestProgress, IngestReport
from kvrag.ingest.rows import Change
from kvrag.ingest.stages import Outcome, Run, Runner
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
        *,
        dry_run: bool,
        force: bool,
        on_progress: Progress | None,
        limits: ParseLimits | None,
        loaders: Mapping[str, str] | None,
        runner: Runner | None,
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
            try:
                return self._add(sources, parser, dry_run, force, on_progress, runner)
            except BaseException:
                if not dry_run:  # what was committed before needs its records
                    with contextlib.suppress(Exception):
                        self._restore_removed()
                raise

    def read_again(self, paths: Sequence[str]) -> IngestReport:
        """Read files again, even unchanged ones; the caller holds the writer's lock."""
        with Parser(None, None) as parser:
            return self._add(Sources(list(paths), [], {}, []), parser, False, True, None, None)

    def delete(self, sources: Sequence[str], chunk_ids: Sequence[str]) -> int:
        """Remove documents and single chunks (`Index.delete`)."""
        storage = self._storage
        storage.require_open()
        sources = arguments.texts(sources, "sources")
        chunk_ids = arguments.texts(chunk_ids, "chunk_ids")
        with lock.writer_lock(storage.path):
            storage.refresh()
            catalog = storage.catalog
            known = {
                source: catalog.chunk_ids_of(source)
                for source in dict.fromkeys(sources)
                if is_storable(source)
            }
            num_removed = sum(map(len, known.values()))
            if known:
                catalog.apply(Change(remove=list(known)))
            if chunk_ids:
                found = catalog.find_chunks(filter(is_storable, chunk_ids))
                num_removed += catalog.apply(Change(remove_chunks=list(found)))
            storage.refresh_caches()
            return num_removed

    # -- private -----------------------------------------------------------------------------

    def _add(
        self,
        sources: Sources,
        parser: Parser,
        dry_run: bool,
        force: bool,
        on_progress: Progress | None,
        runner: Runner | None,
    ) -> IngestReport:
        """Do the work of `add`; except in a dry run, the caller holds the writer's lock."""
        started = time.perf_counter()
        storage, encoders = self._storage, self._encoders
        catalog = storage.catalog
        if storage.log is not None and not dry_run:
            storage.log.begin()
        storage.refresh()
        storage.reload_codec()
        is_sound = self._is_swept or catalog.has_sound_tables()
        before: Held | None = None
        if not (dry_run or is_sound):
            before = self._heal_first()
        num_noted = catalog.num_noted

        def mend() -> bool:
            nonlocal before
            if dry_run or before is not None or catalog.num_noted == num_noted:
                return False
            before = self._heal_first()
            return True

        config = self._with_passages(sources, parser, dry_run)
        run = Run(
            storage=storage,
            encoders=encoders,
            config=config,
            codec_for=self._fitter.codec_for,
            cutter=Cutter(encoders, config),
            parser=parser,
            sources=sources,
            force=force or not is_sound,
            dry_run=dry_run,
            on_progress=on_progress,
            mend=mend,
        )
        plan = (runner or run_here)(run)
        note = "" if dry_run else self._finish(run, plan, before)
        self._is_swept = self._is_swept or not dry_run
        return self._report(run, plan, note, started)

    def _finish(self, run: Run, plan: Plan, before: Held | None) -> str:
        """Bring what is beside the catalog up to date; return a note for the user, or ""."""
        storage = self._storage
        self._restore_removed()
        storage.refresh_caches()
        said: list[str] = []
        if storage.lost:
            said.append(f"{storage.lost}: all documents were lost; ingest all the others again")
            storage.lost = ""
        if before is not None:
            said.append("the catalog was damaged and has been mended")
            said += lost_since(before, storage, len(plan.removed))
        if run.outcome.num_records:
            said += [self._fitter.note(), run.cutter.note()]
        return "; ".join(filter(None, said))

    def _report(self, run: Run, plan: Plan, note: str, started: float) -> IngestReport:
        outcome = run.outcome
        if run.dry_run:
            num_tokens = plan.num_tokens_to_compute
            outcome = Outcome(
                num_records=len(plan.missing),
                num_tokens_computed=num_tokens,
                num_context_tokens=plan.num_context_tokens,
                size_bytes=num_tokens * self._storage.expected_bytes_per_token,
            )
        num_before, seconds = outcome.num_context_tokens, outcome.seconds
        if num_before and run.config.chunk_context.is_filler:  # once, for all chunks
            num_before = min(num_before, run.cutter.num_filler_tokens())
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
            num_context_tokens=num_before,
            size_bytes=outcome.size_bytes,
            seconds=time.perf_counter() - started,
            compute_seconds=seconds,
            prefill_seconds=outcome.prefill_seconds,
            tokens_per_second=outcome.num_tokens_computed / seconds if seconds else 0.0,
            dry_run=run.dry_run,
            note=note,
            compression=run.config.compression,
            control_strings=plan.control_strings,
        )

    def _heal_first(self) -> Held:
        """Repair a damaged catalog before it is written to; return its former content."""
        self._is_swept = True
        audit = audit_catalog(self._storage)
        before = held_by(self._storage, audit)
        self.read_again(mend_catalog(self._storage, self._encoders))
        return before

    def _with_passages(self, sources: Sources, parser: Parser, dry_run: bool) -> IndexConfig:
        """Return the settings with the filler of context ``corpus``, chosen once and kept."""
        storage = self._storage
        config = storage.config
        if config.context != CORPUS or config.corpus_filler:
            return config
        cut = Cutter(self._encoders, config).cut
        found = choose_passages(sources, parser, config.context_tokens, cut)
        if found and not dry_run:
            storage.save_config({"corpus_filler": found})
            return storage.config
        return replace(config, corpus_filler=found)

    def _restore_removed(self) -> None:
        """Compute the KV again that a `gc` of another machine removed during this ingestion."""
        storage = self._storage
        doubts = set() if storage.log is None else storage.log.in_doubt()
        for key in list(doubts):
            if not storage.home.contains(key):
                with contextlib.suppress(IndexFormatError):  # its chunk is gone again
                    self._fitter.repair(key)
            doubts.discard(key)


def choose_passages(
    sources: Sources, parser: Parser, num_tokens: int, check: Callable[[Document], object]
) -> str:
    """Return passages of some of the documents, joined by blank lines.

    The documents' order does not matter. Files that cannot be read are passed over, and documents
    that are not indexed.

    Parameters
    ----------
    sources
        The arguments of `Index.add`.
    parser
        Reads files.
    num_tokens
        The number of tokens that the text should have, if the documents are long enough.
    check
        Raises DocumentError for a document that is not indexed: it must not reach others' KV.
    """
    names = sorted([*sources.documents, *sources.files])
    step = max(1, len(names) / MOST_DOCUMENTS)
    chosen = [names[int(at * step)] for at in range(min(len(names), MOST_DOCUMENTS))]
    texts: list[str] = []
    for name in chosen:
        # What is wrong with a document is reported when it is indexed.
        with document_failures(lambda _: None):
            if name in sources.documents:
                found = [sources.documents[name]]
            else:
                content = read_file(name, parser.limits.max_file_bytes)
                found = parser.parse(name, content)[:MOST_DOCUMENTS]
            for document in found:
                check(document)
            texts += [one.text for one in found]
    return join_passages(texts, num_tokens)
