"""The stages of an ingestion: embed, encode and commit documents that were planned.

`kvrag.ingest.writer` runs them in one process, one window of documents after the other;
`kvrag.ingest.ray` runs each on many machines.

Each chunk has a separate forward pass. On a CPU, the last bits of a chunk's KV depend on how many
others share its batch and how far it is padded (the shapes choose the matrix kernels). In a batch,
stored bytes would therefore depend on what else was indexed at the time. A CPU loses little
without batches: one chunk of 100 tokens or more fills the matrix units
(``kvrag bench ingest`` measures it). Much shorter chunks, and GPUs, would gain from batches of a
fixed shape.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.chunker import Cutter
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.files import read_file
from kvrag.ingest.parsing import Parser
from kvrag.ingest.plan import STAYS, Plan, PlannedDocument, Sources, document_digest
from kvrag.ingest.report import FailedDocument, IngestProgress
from kvrag.ingest.schema import Change, ChunkRow, KeyOf
from kvrag.ingest.storage import Storage
from kvrag.plugins import document_failures
from kvrag.process import working
from kvrag.store.base import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvrag.codec.base import Codec
    from kvrag.ingest.embedding import Embedding
    from kvrag.kvcache import ChunkKV

COMMIT_TOKENS = 32_768
"""Tokens after which the catalog is updated: a killed run must embed at most these again."""

_EMBEDDED_AT_ONCE = 32
# Each waiting task holds the KV of one chunk. Two keep both sides busy and need little memory.
_MAX_WAITING = 4


@dataclass
class Outcome:
    """Counts of the work actually done."""

    num_records: int = 0
    num_tokens_computed: int = 0
    num_context_tokens: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0

    def add(self, more: Outcome) -> None:
        """Add other counts to these."""
        for one in fields(Outcome):
            setattr(self, one.name, getattr(self, one.name) + getattr(more, one.name))


@dataclass(frozen=True)
class Run:
    """One ingestion; its caller holds the writer's lock, unless it is a dry run.

    Attributes
    ----------
    storage, encoders
        Of the index.
    codec_for
        Returns the codec for new records, and fits it to a sample of chunks first if necessary;
        its second argument receives lines of progress.
    parser
        Reads files within limits.
    sources
        The given files and documents.
    config
        The settings of the index; in a dry run with a filler that is not recorded.
    force
        Read every file, even an unchanged one.
    dry_run
        Only count; write nothing.
    on_progress
        Receives the progress.
    mend
        Mends the catalog if planning has found damage; returns whether it did, and everything must
        be planned again.
    outcome
        Receives the counts of the work done.
    """

    storage: Storage
    encoders: Encoders
    codec_for: Callable[[list[Chunk], Callable[[str], None]], Codec]
    parser: Parser
    sources: Sources
    config: IndexConfig
    force: bool = False
    dry_run: bool = False
    on_progress: Callable[[IngestProgress], None] = lambda _: None
    mend: Callable[[], bool] = lambda: False
    outcome: Outcome = field(default_factory=Outcome)

    @cached_property
    def cutter(self) -> Cutter:
        """Splits documents into chunks."""
        return Cutter(self.encoders, self.config)


Runner = Callable[[Run], Plan]
"""Carries out an ingestion: returns what was planned, and in a dry run writes nothing."""


def windows(
    documents: Iterable[PlannedDocument], least_tokens: int | None = None
) -> Iterator[list[PlannedDocument]]:
    """Yield documents in groups of `COMMIT_TOKENS` or a little more, which are written together."""
    least_tokens = COMMIT_TOKENS if least_tokens is None else least_tokens
    window: list[PlannedDocument] = []
    num_tokens = 0
    for document in documents:
        window.append(document)
        num_tokens += document.num_tokens
        if num_tokens >= least_tokens:
            yield window
            window, num_tokens = [], 0
    if window:
        yield window


class CutAgain:
    """Reads and splits documents again whose chunks were not kept; each file once."""

    def __init__(self, parser: Parser, cutter: Cutter) -> None:
        self._parser = parser
        self._cutter = cutter
        self._path = self._reason = ""
        self._documents: dict[str, Document] = {}

    def __call__(self, planned: PlannedDocument) -> None:
        """Give a document its chunks if it has none, or the reason why it has none now."""
        if len(planned.chunks) < planned.num_chunks:
            with document_failures(functools.partial(setattr, planned, "reason")):
                planned.chunks = self._cutter.cut(planned.document or self._read(planned))

    def _read(self, planned: PlannedDocument) -> Document:
        assert planned.file is not None
        path = planned.file.path
        if path != self._path:
            self._path, self._reason, self._documents = path, "", {}
            # Once for all documents of the file, even if it fails.
            with document_failures(functools.partial(setattr, self, "_reason")):
                content = read_file(path, self._parser.limits.max_file_bytes)
                self._documents = {one.source: one for one in self._parser.parse(path, content)}
        if self._reason:
            raise DocumentError(self._reason)
        document = self._documents.get(planned.source)
        if document is None or document_digest(document) != planned.digest:
            raise DocumentError(f"{path}: changed while it was being ingested; ingest it again")
        return document


def embed(
    embedding: Embedding,
    documents: Iterable[PlannedDocument],
    between: Callable[[], object] = lambda: None,
) -> None:
    """Give documents the vectors of their chunks, or the reason why they cannot be embedded.

    `between` is called after each few texts; what it raises ends the work.
    """
    sound = [one for one in documents if not one.reason]
    # Passages that several documents hold are embedded once.
    texts = list(dict.fromkeys(chunk.text for one in sound for chunk in one.chunks))
    vectors, bad = _embedded(embedding, texts, between)
    for one in sound:
        if reason := next((bad[chunk.text] for chunk in one.chunks if chunk.text in bad), ""):
            one.reason = f"{one.source}: it cannot be embedded ({reason})"
        else:
            one.vectors = [vectors[chunk.text] for chunk in one.chunks]


def _embedded(
    embedding: Embedding, texts: list[str], between: Callable[[], object]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    """Return vectors ``[num_windows, dim]`` by text, and reasons for the texts without any."""
    vectors: dict[str, NDArray[np.float32]] = {}
    with document_failures(lambda _: None):
        for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
            vectors |= _vectors(embedding, texts[start : start + _EMBEDDED_AT_ONCE])
            between()
        return vectors, {}
    # Either a text is at fault, or the embedding, which then fails for a plain word too.
    _vectors(embedding, ["word"])
    vectors = {}
    bad: dict[str, str] = {}
    for text in texts:
        with document_failures(functools.partial(bad.__setitem__, text)):
            vectors |= _vectors(embedding, [text])
    return vectors, bad


def _vectors(embedding: Embedding, texts: list[str]) -> dict[str, NDArray[np.float32]]:
    import numpy as np

    rows = embedding.embed_windows(texts)
    if not all(np.isfinite(vectors).all() for vectors in rows):
        raise DocumentError("its vector is not finite")
    return dict(zip(texts, rows, strict=True))


def lacking(
    documents: Iterable[PlannedDocument], key_of: KeyOf, store: Store, *, by_context: bool = False
) -> list[tuple[ChunkKey, Chunk]]:
    """Return the KV that documents need and a store lacks.

    It is in order of length, so that neighbouring passes reuse each other's buffers. With
    `by_context`, chunks with the same context follow each other, so that its KV is made once.
    """
    chunks = (chunk for one in documents if not one.reason for chunk in one.chunks)
    required = {key_of(one): one for chunk in chunks for one in chunk.required()}
    return sorted(
        ((key, chunk) for key, chunk in required.items() if not store.contains(key)),
        key=lambda one: (
            one[1].contexts[0] if by_context else (),
            len(one[1].contexts[0]) + len(one[1].token_ids),
            one[0],
        ),
    )


def refuse(documents: Iterable[PlannedDocument], key_of: KeyOf, bad: dict[ChunkKey, str]) -> None:
    """Note why documents cannot be indexed that need KV which could not be made."""
    for one in documents if bad else ():
        keys = (key_of(each) for chunk in one.chunks for each in chunk.encodings())
        reason = next((bad[key] for key in keys if key in bad), "")
        if reason and not one.reason:
            one.reason = f"{one.source}: {reason}"


class RecordMaker:
    """Computes the KV of chunks, and encodes and stores it.

    Parameters
    ----------
    store
        Where records go.
    prefill
        Computes the KV of one chunk after the first of its contexts.
    outcome
        Counts what is done.

    Attributes
    ----------
    codec
        The codec of the records; set before the first is made.
    """

    def __init__(self, store: Store, prefill: Callable[[Chunk], ChunkKV], outcome: Outcome) -> None:
        self.codec: Codec | None = None
        self._store = store
        self._prefill = prefill
        self._outcome = outcome
        self._last_encoded: Chunk | None = None
        self._last_context: tuple[int, ...] = ()
        self._is_doubted = False

    def make(
        self, key: ChunkKey, chunk: Chunk, writer: BackgroundWriter, bad: dict[ChunkKey, str]
    ) -> bool:
        """Compute a chunk's KV and queue its storing; note in `bad` why this failed.

        Returns whether it was computed.
        """
        codec = self.codec
        assert codec is not None
        started = time.perf_counter()
        fail = functools.partial(bad.__setitem__, key)
        kv: ChunkKV | None = None
        with document_failures(fail):
            kv = self._prefill(chunk)
        self._outcome.prefill_seconds += time.perf_counter() - started
        if kv is None or self._is_doubted:
            self._is_doubted = False
            # A model that fails where it succeeded before, or on a single token, is broken.
            one_token = replace(chunk, text="", token_ids=chunk.token_ids[:1])
            sample = self._prefill(self._last_encoded or one_token)
            writer.submit(lambda: codec.encode(key, sample))
        if kv is None:
            return False

        def store() -> None:
            record: bytes | None = None
            with document_failures(fail):
                try:
                    record = codec.encode(key, kv)
                except ParameterError as error:  # NaN or infinity
                    raise DocumentError(f"its KV cannot be encoded ({error})") from error
            if record is None:
                self._is_doubted = True  # the model, until it is asked again
                return
            self._last_encoded = chunk
            self._store.put(key, record)
            self._outcome.size_bytes += len(record)

        writer.submit(store)
        self._outcome.num_records += 1
        self._outcome.num_tokens_computed += len(chunk.token_ids)
        if chunk.contexts[0] != self._last_context:  # its KV is made once for several chunks
            self._last_context = chunk.contexts[0]
            self._outcome.num_context_tokens += len(self._last_context)
        return True


class Committer:
    """Writes the documents of one plan.

    Parameters
    ----------
    storage
        The storage of the index.
    plan
        The plan; receives the failures.
    """

    def __init__(self, storage: Storage, plan: Plan) -> None:
        self._storage = storage
        self._plan = plan
        self._failed: dict[str, str] = {}
        self._failed_files: set[str] = set()

    def commit(self, documents: Sequence[PlannedDocument], change: Change | None = None) -> None:
        """Write documents in one transaction. Raises StoreError; nothing is written then.

        Parameters
        ----------
        change
            Other changes of the same transaction; receives the documents.
        """
        change = change or Change()
        for one in documents:
            if one.reason:
                self.fail(one)
                continue
            path = None if one.file is None else one.file.path
            rows = [
                ChunkRow(
                    chunk,
                    [self._storage.config.key_of(each) for each in chunk.encodings()],
                    vectors,
                )
                for chunk, vectors in zip(one.chunks, one.vectors, strict=True)
            ]
            change.put.append((one.source, path, one.digest, one.metadata, rows))
        for one in documents:
            # A file with a failed document is read again next time.
            if one.file and one.is_last_of_file and one.file.path not in self._failed_files:
                change.put_files.append(one.file)
        if change:
            self._storage.apply(change)

    def fail(self, document: PlannedDocument) -> None:
        """Note that a document is left out."""
        self._failed[document.source] = document.reason
        if document.file is not None:
            self._failed_files.add(document.file.path)

    def list_failures(self) -> None:
        """Move the failed documents of the plan to its failures."""
        plan = self._plan
        known = set(plan.changed)
        for source, reason in self._failed.items():
            stays = STAYS if source in known else ""
            plan.failed.append(FailedDocument(source, reason + stays))
            plan.control_strings.pop(source, None)
        plan.added[:] = [source for source in plan.added if source not in self._failed]
        plan.changed[:] = [source for source in plan.changed if source not in self._failed]


class BackgroundWriter:
    """Runs tasks one after the other in a separate thread.

    After a task has failed, no other task runs, and the error is raised in the submitting
    thread. Leaving the context with an error drops the tasks that still wait. Leaving it without
    an error waits for all of them.
    """

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_WAITING)
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvrag-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = kind is not None
        self._tasks.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task. Blocks while the queue is full. Raises the error of an earlier task."""
        self._raise()
        self._tasks.put(task)

    def wait(self) -> None:
        """Wait for all tasks. Raises the error of an earlier task."""
        self._tasks.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None and not self._stopped:
                    with working():
                        task()
            except BaseException as error:  # raised again by the submitting thread
                self._error = error
            finally:
                self._tasks.task_done()
