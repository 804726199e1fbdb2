"""The first half of ingestion: what is new, changed, gone, and how much work it is.

Reading and cutting happen here; nothing is written and no weights are needed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvrag.chunk import Chunk, Document, content_hash
from kvrag.errors import DocumentError
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.loaders import (
    NoTextError,
    check_source,
    find_files,
    load_bytes,
    printable,
    read_file,
    to_document,
)
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.rows import FileState

STAYS = "; the version indexed before stays"
"""Ends the reason of a failure that leaves an old version in the index."""

# Chunks kept from planning for computing; what does not fit is read and cut once more.
_MAX_KEPT_TOKENS = 1 << 20
_TICK_NS = 50_000_000
_MAX_INTEGER = (1 << 63) - 1  # of SQLite


@dataclass
class PlannedDocument:
    """A document to be written.

    Attributes
    ----------
    source, digest, metadata
        Its row in the catalog.
    file
        The file it came from, if any.
    is_last_of_file
        Whether the file is whole in the catalog once this one is written.
    document
        The document, if it was handed over as an object.
    chunks
        Its chunks, or None where they were too many to keep.
    """

    source: str
    digest: str
    metadata: Mapping[str, Any]
    file: FileState | None
    is_last_of_file: bool
    document: Document | None
    chunks: list[Chunk] | None


@dataclass
class Plan:
    """All that an ingestion will do.

    Attributes
    ----------
    num_tokens_to_compute, num_records
        Distinct KV that the store does not hold yet.
    num_context_tokens
        Computed beside, and not stored: what these are encoded behind.
    touched
        Files whose documents are as they were but whose state must be noted.
    """

    documents: list[PlannedDocument] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: list[FailedDocument] = field(default_factory=list)
    gone_files: list[str] = field(default_factory=list)
    touched: list[FileState] = field(default_factory=list)
    num_chunks: int = 0
    num_tokens: int = 0
    num_records: int = 0
    num_tokens_to_compute: int = 0
    num_context_tokens: int = 0


@dataclass(frozen=True)
class Sources:
    """What `Index.add` was given, sorted out.

    Attributes
    ----------
    files
        Absolute paths, each once.
    folders
        Those given, in which files may have gone.
    documents
        Objects, by source; of several with one source, the last.
    failed
        Objects and folders that cannot be used.
    """

    files: list[str]
    folders: list[str]
    documents: dict[str, Document]
    failed: list[FailedDocument]


def gather(given: Any, index_folder: Path) -> Sources:
    """Sort paths, documents and iterables of them.

    Raises
    ------
    DocumentError
        When a path does not exist, before anything else is done.
    """
    files: dict[str, None] = {}
    folders: list[str] = []
    documents: dict[str, Document] = {}
    failed: list[FailedDocument] = []
    for value in _flatten(given):
        if not isinstance(value, str | Path):
            try:
                document = to_document(value)
                documents[document.source] = document
            except DocumentError as error:
                source = getattr(value, "source", None) or getattr(value, "id", None)
                source = printable(str(source or type(value).__name__))
                failed.append(FailedDocument(source, str(error)))
            continue
        path = Path(value).expanduser()
        if not path.exists():
            raise DocumentError(f"{printable(str(value))}: there is no such file or folder")
        path = path.resolve()
        try:
            check_source(str(path))
            found = list(find_files(path, index_folder)) if path.is_dir() else [str(path)]
        except DocumentError as error:
            failed.append(FailedDocument(printable(str(path)), str(error)))
            continue
        if path.is_dir():
            folders.append(str(path))
        for name in found:
            try:
                check_source(name)
                files[name] = None
            except DocumentError as error:
                failed.append(FailedDocument(printable(name), str(error)))
    return Sources(list(files), folders, documents, failed)


def _flatten(given: Any) -> Iterator[Any]:
    is_one = isinstance(given, str | Path | Document | Mapping) or hasattr(given, "page_content")
    if is_one or hasattr(given, "get_content") or not isinstance(given, Iterable):
        yield given
        return
    for value in given:
        yield from _flatten(value)


class Planner:
    """Compares what was given with the catalog.

    Parameters
    ----------
    catalog
        What is indexed.
    chunk
        Cuts a document.
    missing_key
        Returns the name of a chunk's (first) KV if the store lacks it, else None.
    on_progress
        Called with the number of inputs looked at.
    force
        Read every file, also one that looks as it was.
    """

    def __init__(
        self,
        catalog: Catalog,
        chunk: Callable[[Document], list[Chunk]],
        missing_key: Callable[[Chunk], str | None],
        on_progress: Callable[[int], None],
        force: bool = False,
    ) -> None:
        self._force = force
        self._catalog = catalog
        self._chunk = chunk
        self._missing_key = missing_key
        self._on_progress = on_progress
        self._plan = Plan()
        self._num_kept_tokens = 0
        self._new_keys: set[str] = set()

    def run(self, sources: Sources) -> Plan:
        """Return the plan; nothing is written."""
        plan = self._plan
        for failed in sources.failed:
            self._fail(failed.source, failed.reason)
        num_done = 0
        for path in sources.files:
            try:
                self._add_file(path)
            except NoTextError as error:
                plan.failed.append(FailedDocument(path, str(error)))
                # It was read whole: answering from its old text would be wrong.
                if before := self._catalog.documents_of_file(path):
                    plan.removed.extend(before)
                    plan.gone_files.append(path)
            except DocumentError as error:
                self._fail(path, str(error))
            num_done += 1
            self._on_progress(num_done)
        for document in sources.documents.values():
            try:
                self._add_object(document)
            except DocumentError as error:
                self._fail(document.source, str(error))
            num_done += 1
            self._on_progress(num_done)
        self._find_gone(sources)
        return plan

    def _fail(self, source: str, reason: str) -> None:
        known = self._catalog.digest_of(source) is not None
        if known or self._catalog.documents_of_file(source):
            reason += STAYS
        self._plan.failed.append(FailedDocument(source, reason))

    def _find_gone(self, sources: Sources) -> None:
        present = set(sources.files)
        for folder in sources.folders:
            for path in self._catalog.files_under(folder):
                # One that is hidden or linked to now was not listed but is not gone either.
                if path not in present and not Path(path).exists():
                    self._plan.gone_files.append(path)
                    self._plan.removed.extend(self._catalog.documents_of_file(path))
                    present.add(path)

    def _add_object(self, document: Document) -> None:
        digest = document_digest(document)
        known = self._catalog.digest_of(document.source)
        if known == digest:
            self._plan.unchanged.append(document.source)
            return
        chunks = self._chunk(document)
        (self._plan.added if known is None else self._plan.changed).append(document.source)
        self._add_planned(
            PlannedDocument(
                document.source, digest, document.metadata, None, False, document, chunks
            )
        )

    def _add_file(self, path: str) -> None:
        plan = self._plan
        known = self._catalog.file(path)
        before = self._catalog.documents_of_file(path)
        # Damaged documents have no digest: what the file holds is then compared one by one.
        is_whole = all(before.values())
        state, content = _read_if_changed(path, known if is_whole else None, self._force)
        if content is None:
            plan.unchanged.extend(before)
            if state != known:
                plan.touched.append(state)
            return
        # Cut before anything is planned: a file is taken whole or not at all.
        prepared = []
        for document in load_bytes(path, content):
            digest = document_digest(document)
            if before.pop(document.source, None) == digest:
                plan.unchanged.append(document.source)
                continue
            is_known = self._catalog.digest_of(document.source) is not None
            prepared.append((document, digest, is_known, self._chunk(document)))
        plan.removed.extend(before)
        for document, digest, is_known, chunks in prepared:
            (plan.changed if is_known else plan.added).append(document.source)
            self._add_planned(
                PlannedDocument(
                    document.source,
                    digest,
                    document.metadata,
                    state,
                    document is prepared[-1][0],
                    None,
                    chunks,
                )
            )
        if not prepared:
            plan.touched.append(state)

    def _add_planned(self, planned: PlannedDocument) -> None:
        plan = self._plan
        assert planned.chunks is not None
        for chunk in planned.chunks:
            plan.num_chunks += 1
            plan.num_tokens += len(chunk.token_ids)
            self._num_kept_tokens += len(chunk.token_ids) + sum(map(len, chunk.contexts))
            for one in chunk.encodings():
                key = self._missing_key(one)
                if key is not None and key not in self._new_keys:
                    self._new_keys.add(key)
                    plan.num_records += 1
                    plan.num_tokens_to_compute += len(one.token_ids)
                    plan.num_context_tokens += len(one.contexts[0])
        if self._num_kept_tokens > _MAX_KEPT_TOKENS:
            planned.chunks = None
        plan.documents.append(planned)


def document_digest(document: Document) -> str:
    """Return the digest of all that an index holds of a document."""
    return content_hash(json.dumps([document.text, document.metadata], sort_keys=True, default=str))


def _read_if_changed(
    path: str, known: FileState | None, force: bool
) -> tuple[FileState, bytes | None]:
    """Return a file's state, and its bytes unless they are those that were read before."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read ({error.strerror or error})") from error
    inode = status.st_ino & _MAX_INTEGER
    ctime_ns = status.st_ctime_ns
    # Another change in the same tick of the system's clock would not be seen.
    if time.time_ns() - ctime_ns < _TICK_NS:
        ctime_ns = 0
    state = FileState(path, "", status.st_size, status.st_mtime_ns, inode, ctime_ns)
    if known and not force and ctime_ns and replace(state, digest=known.digest) == known:
        return known, None
    content = read_file(path)
    digest = hashlib.blake2b(content, digest_size=20).hexdigest()
    is_same = known is not None and known.digest == digest
    return replace(state, digest=digest), None if is_same else content
