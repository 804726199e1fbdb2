"""The first half of ingestion: what is new, changed or gone, and how much work it is.

Files are read and split into chunks here. Nothing is written, and no weights are needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvrag.chunk import Chunk, Document, content_hash
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest import files as f
from kvrag.ingest.catalog import Documents
from kvrag.ingest.chunker import Cutter
from kvrag.ingest.files import read_file
from kvrag.ingest.limits import MAX_REPEATED_CHARACTERS
from kvrag.ingest.loaders import AsCut, NoTextError, to_document
from kvrag.ingest.parsing import Parser
from kvrag.ingest.report import FailedDocument
from kvrag.ingest.schema import FileState
from kvrag.plugins import document_failures

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STAYS = "; the version indexed before stays"
"""The end of a failure's reason when the old version stays in the index."""

# Chunks kept from planning for computing; others are read and split once more.
_MAX_KEPT_TOKENS = 1 << 20
_MAX_LIST_DEPTH = 100
_TICK_NS = 50_000_000
_MAX_INTEGER = (1 << 63) - 1  # of SQLite


@dataclass
class PlannedDocument:
    """A document on its way into the index; each stage adds to it.

    Attributes
    ----------
    source, digest, metadata
        The content of its row in the catalog.
    file
        The file it came from, if any.
    is_last_of_file
        Whether the file is complete in the catalog once this document is written.
    is_known
        Whether an older version is indexed.
    document
        The document, if the caller gave it as an object.
    num_chunks, num_tokens
        Number of its chunks, and of their tokens, whether they are kept or not.
    num_control_strings
        Number of the model's control strings in it that were read as text.
    chunks
        Its chunks; none while there are too many to keep.
    vectors
        Their vectors ``[num_windows, dim]``, once they are embedded.
    reason
        Why it cannot be indexed; "" if it can.
    """

    source: str
    digest: str
    metadata: Mapping[str, Any]
    file: FileState | None = None
    is_last_of_file: bool = False
    is_known: bool = False
    document: Document | None = None
    num_chunks: int = 0
    num_tokens: int = 0
    num_control_strings: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    vectors: list[NDArray[np.float32]] = field(default_factory=list)
    reason: str = ""


@dataclass
class Plan:
    """Everything that an ingestion will do.

    Attributes
    ----------
    touched
        Files whose documents are unchanged but whose state must be updated.
    missing
        Tokens of the KV that the store lacks, and of what precedes it but is not stored, by key.
    control_strings
        Number of control strings that were read as text, for each document with any.
    """

    documents: list[PlannedDocument] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: list[FailedDocument] = field(default_factory=list)
    gone_files: list[str] = field(default_factory=list)
    touched: list[FileState] = field(default_factory=list)
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)
    control_strings: dict[str, int] = field(default_factory=dict)
    num_chunks: int = 0
    num_tokens: int = 0

    def note(self, document: PlannedDocument) -> None:
        """Count a document that will be written."""
        (self.changed if document.is_known else self.added).append(document.source)
        self.num_chunks += document.num_chunks
        self.num_tokens += document.num_tokens
        if document.num_control_strings:
            self.control_strings[document.source] = document.num_control_strings

    @property
    def num_tokens_to_compute(self) -> int:
        """Number of tokens of the KV that the store lacks."""
        return sum(num_tokens for num_tokens, _ in self.missing.values())

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens that are computed before it and not stored."""
        return sum(num_tokens for _, num_tokens in self.missing.values())


@dataclass(frozen=True)
class Sources:
    """The arguments of `Index.add`, sorted.

    Attributes
    ----------
    files
        Absolute paths, each once.
    folders
        The given folders, in which files may have disappeared.
    documents
        Document objects by source; of several different ones with one source, the last.
    failed
        Objects, paths and folders that cannot be used.
    unlisted
        Folders that cannot be listed: their files may still exist.
    """

    files: list[str]
    folders: list[str]
    documents: dict[str, Document]
    failed: list[FailedDocument]
    unlisted: list[str] = field(default_factory=list)


def gather(given: Any, index_folder: Path, suffixes: Collection[str]) -> Sources:
    """Sort paths, documents and iterables of them.

    Parameters
    ----------
    given
        The argument of `Index.add`.
    index_folder
        The index folder; skipped if it is inside a given folder.
    suffixes
        Suffixes of the files to look for in folders.

    Raises
    ------
    DocumentError
        When a path does not exist; raised before anything is done.
    ParameterError
        When a value is neither a path nor a document, or a list contains itself.
    """
    files: dict[str, None] = {}
    folders: list[str] = []
    documents: dict[str, Document] = {}
    failed: list[FailedDocument] = []
    unlisted: list[str] = []

    def refuse(place: str, reason: str) -> None:
        failed.append(FailedDocument(f.printable(place), reason))

    for number, value in enumerate(_flatten(given), 1):
        if not isinstance(value, str | Path):
            reasons: list[str] = []
            with document_failures(reasons.append):
                document = to_document(value)
                source = document.source
                if documents.get(source, document) != document:
                    reasons.append(
                        f"{f.printable(source)}: a later document in this call has the same source "
                        "and is used instead; give each document a different source"
                    )
                documents[source] = document
            shown = _shown_source(value, number) if reasons else ""
            failed.extend(FailedDocument(shown, reason) for reason in reasons)
            continue
        path, status = f.resolve_path(value)
        found = [str(path)]
        try:
            f.check_source(str(path))
            if not stat.S_ISDIR(status.st_mode):
                f.check_regular(str(path), status.st_mode)
        except DocumentError as error:
            refuse(str(path), str(error))
            continue
        if stat.S_ISDIR(status.st_mode):
            folders.append(str(path))
            inside = f.find_files(path, index_folder, suffixes)
            found = inside.files
            unlisted.extend(inside.unlisted)
            for place, reason in inside.unlisted.items():
                refuse(place, f"{f.printable(place)}: {reason}")
        for name in found:
            try:
                f.check_source(name)
                files[name] = None
            except DocumentError as error:
                refuse(name, str(error))
    return Sources(list(files), folders, documents, failed, unlisted)


def _shown_source(value: Any, number: int) -> str:
    value = value.value if isinstance(value, AsCut) else value
    for name in ("source", "id", "node_id"):
        with contextlib.suppress(Exception):  # foreign objects may raise anything
            if source := getattr(value, name, None):
                return f.printable(str(source))
    return f"input {number} ({type(value).__name__})"


def _flatten(given: Any, depth: int = 0) -> Iterator[Any]:
    if depth > _MAX_LIST_DEPTH:
        raise ParameterError(
            f"lists of documents are nested more than {_MAX_LIST_DEPTH} deep; give one list"
        )
    is_one = isinstance(given, str | Path | Document | Mapping) or hasattr(given, "page_content")
    if is_one or hasattr(given, "get_content") or not isinstance(given, Iterable):
        yield given
        return
    for value in given:
        yield from _flatten(value, depth + 1)


class Known(Protocol):
    """What is indexed: a catalog's `Documents`, or the part that concerns some documents."""

    def file(self, path: str) -> FileState | None: ...

    def documents_of_file(self, path: str) -> dict[str, str]: ...

    def digest_of(self, source: str) -> str | None: ...


class Planner:
    """Compares the given documents with the catalog.

    Parameters
    ----------
    catalog
        What is indexed.
    parser
        Parses files.
    cutter
        Splits documents into chunks.
    missing_key
        Returns the name of a chunk's (first) KV if the store lacks it, None otherwise.
    on_progress
        Called with the number of inputs examined.
    force
        Read and parse every file, even an unchanged one.
    """

    def __init__(
        self,
        catalog: Known,
        parser: Parser,
        cutter: Cutter,
        missing_key: Callable[[Chunk], str | None],
        on_progress: Callable[[int], None],
        force: bool = False,
    ) -> None:
        self._force = force
        self._catalog = catalog
        self._parser = parser
        self._cutter = cutter
        self._missing_key = missing_key
        self._on_progress = on_progress
        self._plan = Plan()
        self._num_kept_tokens = 0

    def run(self, sources: Sources) -> Plan:
        """Return the plan; writes nothing."""
        plan = self._plan
        for failed in sources.failed:
            if failed.source in sources.documents:  # the old version does not stay
                plan.failed.append(failed)
            else:
                self._fail(failed.source, failed.reason)
        num_done = 0
        for path in sources.files:
            with document_failures(functools.partial(self._fail, path)):
                try:
                    self._add_file(path)
                except NoTextError as error:
                    plan.failed.append(FailedDocument(path, str(error)))
                    # The file was read whole: answers from its old text would be wrong.
                    if before := self._catalog.documents_of_file(path):
                        plan.removed.extend(before)
                        plan.gone_files.append(path)
            num_done += 1
            self._on_progress(num_done)
        for document in sources.documents.values():
            with document_failures(functools.partial(self._fail, document.source)):
                self._add_object(document)
            num_done += 1
            self._on_progress(num_done)
        return plan

    def _fail(self, source: str, reason: str) -> None:
        known = self._catalog.digest_of(source) is not None
        if known or self._catalog.documents_of_file(source):
            reason += STAYS
        self._plan.failed.append(FailedDocument(source, reason))

    def _add_object(self, document: Document) -> None:
        digest = document_digest(document)
        known = self._catalog.digest_of(document.source)
        if known == digest:
            self._plan.unchanged.append(document.source)
            return
        self._add_planned(self._cut(document, digest, None, known is not None))

    def _add_file(self, path: str) -> None:
        plan = self._plan
        known = self._catalog.file(path)
        before = self._catalog.documents_of_file(path)
        # Damaged documents have no digest: the file's documents are then compared one by one.
        is_whole = all(before.values())
        state, content = _read_if_changed(
            path, known if is_whole else None, self._force, self._parser.limits.max_file_bytes
        )
        if content is None:
            plan.unchanged.extend(before)
            if state != known:
                plan.touched.append(state)
            return
        # Split before anything is planned: a file is ingested whole or not at all.
        prepared = []
        unchanged = []
        num_kept = self._num_kept_tokens
        try:
            for document in self._parser.parse(path, content):
                digest = document_digest(document)
                if before.pop(document.source, None) == digest:
                    unchanged.append(document.source)
                    continue
                is_known = self._catalog.digest_of(document.source) is not None
                prepared.append(self._cut(document, digest, state, is_known))
        except BaseException:
            self._num_kept_tokens = num_kept
            raise
        plan.removed.extend(before)
        plan.unchanged.extend(unchanged)
        for made in prepared:
            made[0].is_last_of_file = made is prepared[-1]
            self._add_planned(made)
        if not prepared:
            plan.touched.append(state)

    def _cut(
        self, document: Document, digest: str, file: FileState | None, is_known: bool
    ) -> _Planned:
        """Return a document with its chunks, unless there are too many to keep, and its KV."""
        chunks = self._cutter.cut(document)
        check_repeated(document, len(chunks))
        missing: dict[str, tuple[int, int]] = {}
        for chunk in chunks:
            for one in chunk.required():
                key = self._missing_key(one)
                if key is not None:
                    missing[key] = len(one.token_ids), len(one.contexts[0])
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self._num_kept_tokens += num_tokens + sum(
            len(context) for chunk in chunks for context in chunk.contexts
        )
        planned = PlannedDocument(
            source=document.source,
            digest=digest,
            metadata=document.metadata,
            file=file,
            is_known=is_known,
            document=document if file is None else None,
            num_chunks=len(chunks),
            num_tokens=num_tokens,
            num_control_strings=self._cutter.num_control_strings(chunks),
            chunks=chunks if self._num_kept_tokens <= _MAX_KEPT_TOKENS else [],
        )
        return planned, missing

    def _add_planned(self, made: _Planned) -> None:
        planned, missing = made
        self._plan.note(planned)
        self._plan.documents.append(planned)
        self._plan.missing |= missing


_Planned = tuple[PlannedDocument, dict[str, tuple[int, int]]]
"""A document, and what it adds to a plan's `missing`."""


def find_gone(documents: Documents, sources: Sources, plan: Plan) -> None:
    """Add to a plan the files that the given folders held before, but no longer hold."""
    present = set(sources.files)
    unknown = tuple(os.path.join(folder, "") for folder in sources.unlisted)  # noqa: PTH118
    for folder in sources.folders:
        for path in documents.files_under(folder):
            # A file that is hidden or a link now was not listed, but is not gone either.
            if path in present or path.startswith(unknown):
                continue
            if not Path(path).exists():
                plan.gone_files.append(path)
                plan.removed.extend(documents.documents_of_file(path))
                present.add(path)


def check_repeated(document: Document, num_chunks: int) -> None:
    """Raise DocumentError if the data that each chunk repeats would fill the catalog."""
    num_characters = len(document.source) + len(json.dumps(document.metadata, default=str))
    if num_chunks * num_characters > MAX_REPEATED_CHARACTERS:
        raise DocumentError(
            f"{document.source}: metadata of {num_characters:,} characters would be stored with "
            f"each of {num_chunks:,} chunks, and at most {MAX_REPEATED_CHARACTERS:,} characters "
            "are stored in all; shorten it, or split the document"
        )


def document_digest(document: Document) -> str:
    """Return the digest of everything that an index stores of a document."""
    said: list[Any] = [document.text, document.metadata]
    said += ["whole"] if document.is_whole else []
    said += [document.outline] if document.outline else []
    return content_hash(json.dumps(said, sort_keys=True, default=str))


def _read_if_changed(
    path: str, known: FileState | None, force: bool, max_bytes: int
) -> tuple[FileState, bytes | None]:
    """Return a file's state, and its bytes if they must be parsed: new ones, or forced."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read ({error.strerror or error})") from error
    inode = status.st_ino & _MAX_INTEGER
    ctime_ns = status.st_ctime_ns
    # Another change in the same tick of the system's clock would go unnoticed.
    if time.time_ns() - ctime_ns < _TICK_NS:
        ctime_ns = 0
    state = FileState(path, "", status.st_size, status.st_mtime_ns, inode, ctime_ns)
    if known and not force and ctime_ns and replace(state, digest=known.digest) == known:
        return known, None
    content = read_file(path, max_bytes)
    digest = hashlib.blake2b(content, digest_size=20).hexdigest()
    # A loader may have changed while the bytes did not: `force` parses them again.
    is_same = known is not None and known.digest == digest and not force
    return replace(state, digest=digest), None if is_same else content
