"""Reports of ingestion and maintenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class Report:
    """A dataclass that can be printed as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class IngestProgress(Report):
    """The progress of an ingestion, as passed to the progress callback.

    Attributes
    ----------
    stage
        "read" (reading and splitting files), then "profile" if a codec must be fitted, then
        "compute" (embedding, KV, writing).
    num_documents_done, num_documents
        Files and documents examined (reading) or committed (computing), and their total.
    num_tokens_done, num_tokens
        Tokens whose KV was computed, and their total; 0 while reading.
    size_bytes_done
        Bytes of records passed to the store.
    size_bytes_estimate
        Estimated bytes of all records, known once reading is done.
    seconds
        Time since the stage began.
    tokens_per_second
        Speed of computing; 0 before the first chunk is done.
    eta_seconds
        Estimated time left; None while it is unknown.
    doing
        The current step in stage "profile"; otherwise "".
    """

    stage: str
    num_documents_done: int
    num_documents: int
    num_tokens_done: int = 0
    num_tokens: int = 0
    size_bytes_done: int = 0
    size_bytes_estimate: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    eta_seconds: float | None = None
    doing: str = ""


@dataclass(frozen=True)
class FailedDocument:
    """A file or document that was not ingested, with the reason."""

    source: str
    reason: str


@dataclass(frozen=True)
class IngestReport(Report):
    """The result of `Index.add`; with ``dry_run``, its expected result.

    Attributes
    ----------
    added, changed, removed, unchanged
        Sources of the new, replaced, deleted and unchanged documents.
    failed
        Files and documents that could not be read, or hold no text. The index keeps its version
        of unreadable ones, and removes its version of files that hold no text any more.
    num_chunks, num_tokens
        Number of chunks and tokens in the added and changed documents.
    num_records, num_tokens_computed
        Number of chunks whose KV the store lacked, and of their tokens.
    num_context_tokens
        Additional tokens that were computed but not stored: the contexts of these chunks. A
        filler counts once, for all of them.
    size_bytes
        Size of these records; in a dry run, an estimate without headers.
    seconds
        Total time.
    compute_seconds
        Time from the first to the last chunk: embedding, prefill, encoding, writing.
    prefill_seconds
        The model's share of that time.
    tokens_per_second
        Tokens computed, divided by `compute_seconds`.
    note
        A note on how KV was stored; "" if there is nothing to say.
    control_strings
        Number of the model's control strings (``<|im_end|>``) that were read as text, for each
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
    control_strings: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every document could be read."""
        return not self.failed


@dataclass(frozen=True)
class IndexStats(Report):
    """The content of an index in numbers.

    Attributes
    ----------
    store
        URL of the store of KV, without a password.
    context, context_tokens
        What precedes chunks when they are encoded, and its largest size in tokens (0: no limit).
    trust, writer
        From where `similar` takes it, and the fingerprint of the writer, "" without one.
    control_tokens
        What happens to the model's control strings in documents.
    num_records
        Number of KV records in the store.
    num_unreferenced_records
        Number of those that no chunk needs any more; `Upkeep.gc` removes them.
    size_bytes
        Size of all records.
    bytes_per_token
        Size of a token's KV in the model's own type; 0 if the index stores none.
    stored_bytes_per_token
        Size of a token's KV in the store, with headers and compression.
    catalog_bytes, vectors_bytes
        Size of the catalog, and of the vectors' cache.
    num_vectors, vectors_memory_bytes
        Number of the chunks' vectors, and the memory that they take in each process that
        searches.
    has_graph
        Whether a graph finds the nearest vectors; otherwise all are compared.
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
    trust: str
    writer: str
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
    num_vectors: int
    vectors_memory_bytes: int
    has_graph: bool
    generation: int


@dataclass(frozen=True)
class RecordProblem:
    """A chunk whose KV cannot be used."""

    chunk_id: str
    source: str
    ordinal: int
    key: str
    reason: str


@dataclass(frozen=True)
class VerifyReport(Report):
    """The result of reading every record.

    Attributes
    ----------
    num_records, size_bytes
        Number and size of the records that were read whole and compared with their checksums.
    problems
        Chunks whose record is missing or damaged. Answers stay correct: their tokens are
        computed as if they had never been indexed.
    num_repaired
        Number of those records that were computed again.
    catalog_problems
        Differences between the catalog and what was written, row by row. Damaged rows are never
        used: they are left out and counted, and a chunk with a damaged text, vector or metadata is
        not found until it is repaired.
    not_healed
        After a repair, what is lost, and what to do about it: damaged documents that could not be
        read again. Their sound chunks stay.
    is_healed
        Whether the catalog was repaired, except for what `not_healed` lists.
    store_problems
        What is wrong with the store's own list of its records. Records that it does not name are
        computed as if they had never been stored.
    is_store_mended
        Whether that list was mended.
    num_later
        Missing records of chunks that were encoded after a text that was deleted. A server makes
        them while nobody asks, a repair at once; until then, prompts compute their tokens.
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
    store_problems: tuple[str, ...] = ()
    is_store_mended: bool = False
    num_later: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything is in order, after a repair if there was one."""
        broken = {problem.key for problem in self.problems}
        is_sound = not self.catalog_problems or (self.is_healed and not self.not_healed)
        is_store_sound = not self.store_problems or self.is_store_mended
        return is_sound and is_store_sound and len(broken) == self.num_repaired

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, including `ok`."""
        return {"ok": self.ok, **super().to_dict()}


@dataclass(frozen=True)
class GcReport(Report):
    """What `Upkeep.gc` removed: records that no chunk needs, codec profiles that no record needs,
    and files of killed processes.
    """

    num_records: int
    size_bytes: int
    num_temporary_files: int
    num_profiles: int = 0


@dataclass(frozen=True)
class RecodeReport(Report):
    """The result of `Upkeep.recode`.

    Attributes
    ----------
    codec
        The codec that all records have now.
    num_records
        Number of records in the index.
    num_recoded
        Number of records that were rewritten; the others had this codec already.
    num_computed
        Number of rewritten records whose KV was computed again, since the old record was lossy,
        damaged or missing.
    size_bytes_before, size_bytes
        Size of all records, before and after.
    """

    codec: str
    num_records: int
    num_recoded: int
    num_computed: int
    size_bytes_before: int
    size_bytes: int
    seconds: float
