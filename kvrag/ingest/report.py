"""What ingestion and maintenance tell their callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingestion is, handed to the progress callback.

    Attributes
    ----------
    stage
        "read" (files and cutting), then "profile" where a codec is fitted first, then "compute"
        (embedding, KV, writing).
    num_documents_done, num_documents
        Files and documents looked at (reading) or committed (computing), and of how many.
    num_tokens_done, num_tokens
        Tokens whose KV was computed, and of how many; 0 while reading.
    size_bytes_done
        Bytes of records handed to the store.
    size_bytes_estimate
        Bytes that all records will take, known once reading is done.
    seconds
        Since the stage began.
    tokens_per_second
        0 before the first chunk is done.
    eta_seconds
        None while it cannot be told.
    doing
        In stage "profile", what is being done; else "".
    """

    stage: str
    num_documents_done: int
    num_documents: int
    num_tokens_done: int
    num_tokens: int
    size_bytes_done: int
    size_bytes_estimate: int
    seconds: float
    tokens_per_second: float
    eta_seconds: float | None
    doing: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class FailedDocument:
    """A file or document that was not ingested, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class IngestReport:
    """What `Index.add` did; with ``dry_run``, what it would do.

    Attributes
    ----------
    added, changed, removed, unchanged
        Sources of documents that are new, replaced, no longer there, or as they were.
    failed
        Those that could not be read, or hold no text. What the index held of unreadable ones
        stays; of files that hold no text any more it is removed.
    num_chunks, num_tokens
        Of the added and changed documents.
    num_records, num_tokens_computed
        Chunks, and their tokens, whose KV was not in the store yet.
    num_context_tokens
        Computed beside, and not stored: what these chunks were encoded behind.
    size_bytes
        Of these records; an estimate without headers and compression for a dry run.
    seconds
        In all.
    compute_seconds
        From the first to the last chunk: embedding, prefill, encoding, writing.
    prefill_seconds
        Of these, the model's own time.
    tokens_per_second
        Tokens computed over `compute_seconds`.
    note
        What to know of how KV was stored; "" for nothing.
    compression
        How chunks are stored as fewer rows than they have tokens; ``none`` where they are not.
    control_strings
        Control strings of the model (``<|im_end|>``) that were read as text: how many in each
        added or changed document that holds any.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    failed: tuple[FailedDocument, ...] = ()
    num_chunks: int = 0
    num_tokens: int = 0
    num_records: int = 0
    num_tokens_computed: int = 0
    num_context_tokens: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    prefill_seconds: float = 0.0
    tokens_per_second: float = 0.0
    dry_run: bool = False
    note: str = ""
    compression: str = "none"
    control_strings: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every document could be read."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class IndexStats:
    """What an index holds.

    Attributes
    ----------
    store
        URL of where KV is kept, without a password.
    context, context_tokens
        What chunks are encoded behind, and how much of it at the most (0: no such limit).
    compression
        How chunks are stored as fewer rows than they have tokens; ``none`` where they are not.
    control_tokens
        What becomes of the model's control strings in documents.
    num_records
        KV records in the store.
    num_unreferenced_records
        Of these, records that no chunk needs any more; `Upkeep.gc` removes them.
    size_bytes
        Of all records.
    bytes_per_token
        What the KV of a token takes in the model's own type.
    stored_bytes_per_token
        What it takes in the store, headers included and compression counted.
    catalog_bytes, vectors_bytes
        Of the catalog and of the vectors' cache.
    """

    path: str
    store: str
    model: str
    dtype: str
    codec: str
    embedding: str
    chunk_tokens: int
    context: str
    context_tokens: int
    compression: str
    control_tokens: str
    num_prefix_tokens: int
    num_documents: int
    num_chunks: int
    num_tokens: int
    num_records: int
    num_unreferenced_records: int
    size_bytes: int
    bytes_per_token: int
    stored_bytes_per_token: float
    catalog_bytes: int
    vectors_bytes: int
    generation: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class RecordProblem:
    """A chunk whose KV cannot be used."""

    chunk_id: str
    source: str
    ordinal: int
    key: str
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """What reading every record brought to light.

    Attributes
    ----------
    num_records, size_bytes
        Read whole and compared with their checksums.
    problems
        Chunks whose record is missing or damaged. Answers stay right: their
        tokens are computed as if they had never been indexed.
    num_repaired
        Records among them that were computed anew.
    catalog_problems
        What is not as it was written in the catalog, row by row. Such rows are never used: they are
        left out and counted, and a chunk whose text, vector or metadata is damaged is not found
        until it is mended.
    not_healed
        After a repair, what is lost, and what to do about it: documents with damage that could not
        be read again. What was sound of them stays.
    is_healed
        Whether the catalog was mended; what is in `not_healed` aside.
    """

    num_chunks: int
    num_records: int
    size_bytes: int
    problems: tuple[RecordProblem, ...]
    num_repaired: int
    catalog_problems: tuple[str, ...]
    seconds: float
    not_healed: tuple[str, ...] = ()
    is_healed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong (any more)."""
        broken = {problem.key for problem in self.problems}
        is_sound = not self.catalog_problems or (self.is_healed and not self.not_healed)
        return is_sound and len(broken) == self.num_repaired

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, `ok` among them."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True)
class GcReport:
    """What `Upkeep.gc` removed: records no chunk needs, codec profiles no record needs, and files
    left by killed processes.
    """

    num_records: int
    size_bytes: int
    num_temporary_files: int
    num_profiles: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class RecodeReport:
    """What `Upkeep.recode` did.

    Attributes
    ----------
    codec
        What all records are coded with now.
    num_records
        In the index.
    num_recoded
        Of these, records written anew; the others were coded so already.
    num_computed
        Of the recoded ones, those whose KV was computed again: what they held was lossy, damaged
        or missing.
    size_bytes_before, size_bytes
        Of all records.
    """

    codec: str
    num_records: int
    num_recoded: int
    num_computed: int
    size_bytes_before: int
    size_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)
