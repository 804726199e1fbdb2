"""`Index`: a folder of documents' chunks with their KV, and the door to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey
from kvrag.fusion.compression.spec import Compression
from kvrag.ingest.calibrations import read_calibration
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.checks import check_device, check_embedding
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.fitter import CodecFitter
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.making import make_config, make_storage, require_free
from kvrag.ingest.opening import load_config, open_storage
from kvrag.ingest.report import IndexStats, IngestProgress, IngestReport
from kvrag.ingest.rows import DocumentRow
from kvrag.ingest.search import Search, SearchHit
from kvrag.ingest.settings import IndexOptions, IndexSettings
from kvrag.ingest.stats import stats_of
from kvrag.ingest.storage import Storage
from kvrag.ingest.upkeep import Upkeep
from kvrag.ingest.writer import Writer
from kvrag.models.control import ControlTokens
from kvrag.store.base import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvrag.codec.base import EncodedChunk
    from kvrag.fusion.calibration import Calibration
    from kvrag.fusion.segments import ChunkMatcher
    from kvrag.ingest.coding import RecordCoding
    from kvrag.ingest.embedding import Embedding
    from kvrag.models.kv_model import KVModel


class Index:
    """Chunks of documents with precomputed position-free KV, in one folder.

    Made by `create`, opened by `open`. Reading is safe from several threads and processes, also
    while one process writes; writing takes the index's lock.

    Attributes
    ----------
    path
        The folder.
    compression
        How chunks are stored as fewer rows than they have tokens; None where they are not.
    counters
        What is counted while it is used.
    upkeep
        Checks, repairs and tidies it, and codes or moves its KV anew.
    """

    def __init__(self, storage: Storage, encoders: Encoders) -> None:
        self.path = storage.path
        self.compression: Compression | None = storage.compression
        self.counters = storage.counters
        fitter = CodecFitter(storage, encoders)
        self._storage = storage
        self._encoders = encoders
        self._search = Search(storage, encoders)
        self._writer = Writer(storage, encoders, fitter)
        self.upkeep = Upkeep(storage, encoders, fitter, self._writer)

    # -- making and opening ------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        model: KVModel | PreTrainedModel | str | Path,
        **options: Unpack[IndexOptions],
    ) -> Index:
        """Make an empty index in a new or empty folder.

        Parameters
        ----------
        path
            The folder.
        model
            The decoder whose KV is stored: a folder, a hub name, a loaded object, a `KVModel`.
        **options
            The fields of `IndexSettings`: `embedding`, `codec`, `chunk_tokens`, `store` and others.

        Raises
        ------
        ParameterError
            When a value is out of range or the device cannot be used, or the folder holds
            something already.
        StoreError
            When the folder cannot be written, or the store cannot be used.
        ModelLoadError, UnsupportedModelError
            When the model cannot be loaded or served.
        AnchorsError
            When chunks are to be compressed with anchors that the model does not have.
        IndexLockedError
            When another process is making an index there.
        """
        from kvrag.ingest.embedding import get_embedding
        from kvrag.models.kv_model import KVModel

        folder = arguments.path(path, "path").expanduser().resolve()
        require_free(folder)
        settings = IndexSettings(**options)
        device = settings.device
        embedding = get_embedding(settings.embedding)
        loaded = KVModel.load(model, dtype=settings.dtype, device=device)
        check_device(device, loaded)
        config = make_config(model, loaded, embedding, settings)
        encoders = Encoders(folder, config, model=loaded, embedding=embedding, device=device)
        return cls(make_storage(folder, config, settings), encoders)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: KVModel | PreTrainedModel | str | Path | None = None,
        embedding: Embedding | Any | None = None,
        device: str | None = None,
        store: str | None = None,
        mend: bool = False,
    ) -> Index:
        """Open an index. Neither weights nor the embedding are loaded before they are needed.

        Parameters
        ----------
        path
            Its folder.
        model
            Where to take the model from; None means where the index says. It must be the model
            the index was made with, which is checked when it is loaded.
        embedding
            Needed only when the index was made with an embedding object.
        device
            Where a model that is loaded here runs, such as ``"cuda"``; None means the CPU.
        store
            URL of where KV is kept, in place of the one recorded: the same store with other tiers
            before it, say. One that does not answer is no error: chunks are then prefilled.
        mend
            Where the catalog cannot be opened at all, set it aside (``catalog.sqlite.damaged``) and
            begin an empty one: all documents are lost, which the reports of `Upkeep.verify` and of
            the next `add` say. Adding them again finds their KV in the store.

        Raises
        ------
        IndexNotFoundError
            When there is no index.
        IndexFormatError
            When there is one of another version, or a damaged one.
        IndexMismatchError
            When `model` or `embedding` are not those the index was made with.
        ParameterError
            When the device cannot be used, or the store's URL is wrong.
        StoreError
            When the store refuses: a wrong password, a missing bucket.
        """
        check_device(device)
        folder = arguments.path(path, "path").expanduser().resolve()
        config = load_config(folder)
        the_embedding = None
        if embedding is not None:
            from kvrag.ingest.embedding import get_embedding

            the_embedding = get_embedding(embedding)
            check_embedding(config, folder, the_embedding)
        encoders = Encoders(folder, config, model=model, embedding=the_embedding, device=device)
        index = cls(open_storage(folder, config, store, mend=mend), encoders)
        try:
            encoders.compare_given()
        except BaseException:
            index.close()
            raise
        return index

    def close(self) -> None:
        """Close the catalog and the store, and keep what was counted."""
        self._storage.close()

    def require_open(self) -> None:
        """Raise IndexClosedError when the index was closed."""
        self._storage.require_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, model={self.config.model!r})"

    # -- what it keeps -----------------------------------------------------------------------

    @property
    def config(self) -> IndexConfig:
        """What it was made with."""
        return self._storage.config

    @property
    def catalog(self) -> Catalog:
        """Documents and chunks. Raises IndexClosedError when the index was closed."""
        return self._storage.catalog

    @property
    def store(self) -> Store:
        """Where the KV is; another one may be set, to read through it."""
        return self._storage.store

    @store.setter
    def store(self, store: Store) -> None:
        self._storage.store = store

    @property
    def coding(self) -> RecordCoding:
        """How KV is encoded."""
        return self._storage.coding

    @property
    def expected_bytes_per_token(self) -> int:
        """About what a token's KV takes in the store."""
        return self._storage.expected_bytes_per_token

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows of KV that a record of a chunk of so many tokens has."""
        return self._storage.num_rows(num_tokens)

    def stats(self) -> IndexStats:
        """Return what the index holds, in numbers."""
        return stats_of(self._storage)

    @property
    def calibration(self) -> Calibration | None:
        """What was measured for the index's model, or None where nothing was.

        What it says of loading holds for the store that is open, or is left out. Raises
        IndexFormatError when the file is damaged, IndexMismatchError when it was measured with
        another model.
        """
        return read_calibration(self._storage)

    # -- what it computes with ---------------------------------------------------------------

    @property
    def model(self) -> KVModel:
        """The decoder, loaded on first use.

        Raises ModelLoadError when it cannot be loaded, IndexMismatchError when its weights or
        tokenizer are not those the index was made with, and ParameterError when it was given as an
        object that is on another device than the one asked for.
        """
        return self._encoders.model

    @property
    def model_folder(self) -> Path | None:
        """The folder of the model's files; None of a hub's model, or one made in memory.

        Loads no weights. Raises ModelLoadError when the folder is gone.
        """
        return self._encoders.model_folder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded without the weights. Raises as `model` does."""
        return self._encoders.tokenizer

    @property
    def control(self) -> ControlTokens | None:
        """The model's control strings, or None where they are kept. Raises as `tokenizer` does."""
        return self._encoders.control

    @property
    def embedding(self) -> Embedding:
        """The embedding, loaded on first use. Raises IndexMismatchError."""
        return self._encoders.embedding

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids every chunk is encoded behind."""
        return self.config.prefix_ids

    # -- writing -----------------------------------------------------------------------------

    def add(
        self,
        paths_or_documents: Any,
        *,
        dry_run: bool = False,
        force: bool = False,
        on_progress: Callable[[IngestProgress], None] | None = None,
        limits: ParseLimits | None = None,
        loaders: Mapping[str, str] | None = None,
    ) -> IngestReport:
        """Bring files and documents into the index; what is unchanged costs no model time.

        What the index holds of the documents given is held against its seals; what is damaged is
        written anew.

        Parameters
        ----------
        paths_or_documents
            A path of a file or folder, a `Document`, a LangChain Document, a LlamaIndex node, or
            any iterable of them. Folders are searched at any depth; files formerly found in one
            that are gone are removed from the index. A document of a known source replaces it; of
            several different ones with one source in a call, the last is taken, the others fail.
        dry_run
            Only say what would be done.
        force
            Read and parse every file again, also one that is as it was: after a loader changed,
            say. Documents that come out as they were stay unchanged.
        on_progress
            Called from this thread as the work goes on.
        limits
            What a file may cost; None means `ParseLimits` as it is.
        loaders
            Further loaders by suffix, or others than ours, as ``package.module:function``: a
            function of a file's path and bytes that yields a `Document` for each part of it. It
            is called in the process that parses, within its limits.

        Returns
        -------
        IngestReport
            Files and documents at which anything failed are in its `failed`, with the reason; the
            others are ingested.

        Raises
        ------
        DocumentError
            When a path does not exist; nothing is done then.
        ParameterError
            When something is neither a path nor a document.
        ParserError
            When the process that parses documents, or a loader in it, cannot be started.
        IndexLockedError
            When another process is writing to the index.
        StoreError
            When the disk is too small, full or read-only. What was done is kept; a second call
            completes it.
        """
        return self._writer.add(
            paths_or_documents,
            dry_run=dry_run,
            force=force,
            on_progress=on_progress,
            limits=limits,
            loaders=loaders,
        )

    def delete(self, *, sources: Sequence[str] = (), chunk_ids: Sequence[str] = ()) -> int:
        """Remove documents and single chunks; their KV goes with the next `Upkeep.gc`.

        Returns the number of chunks removed; sources and ids that are not known are skipped.
        Nothing of their text stays: chunks that were encoded behind a single chunk that is removed
        are from now on encoded alone. Where the store has no such KV (context ``document``), they
        are computed with each prompt and counted, until `Upkeep.verify` with ``repair`` stores it.
        """
        return self._writer.delete(sources, chunk_ids)

    # -- reading -----------------------------------------------------------------------------

    def search(self, query: str, k: int = 4) -> list[SearchHit]:
        """Return the `k` chunks nearest to a question, best first.

        Raises
        ------
        ParameterError
            When the question is no text, blank, or longer than 100,000 characters, or `k` is no
            whole number from 1 on.
        IndexClosedError
            When the index was closed.
        """
        return self._search.by_text(query, k)

    def search_by_vector(
        self, vector: NDArray[np.float32] | Sequence[float], k: int = 4
    ) -> list[SearchHit]:
        """Return the `k` chunks nearest to a vector ``[dim]``, best first."""
        return self._search.by_vector(vector, k)

    def search_words(self, query: str, k: int = 4) -> list[SearchHit]:
        """Return the `k` chunks that say most of a question's words (BM25), best first.

        No model is needed. A question without words finds nothing. Raises as `search` does.
        """
        return self._search.by_words(query, k)

    @property
    def matcher(self) -> ChunkMatcher:
        """Finds the index's chunks in a prompt; a new one after every change of the catalog."""
        return self._search.matcher

    @property
    def recent_chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks found by the latest searches, the latest and best first."""
        return self._search.recent_chunk_ids

    def get_chunks(self, chunk_ids: Sequence[str]) -> list[Chunk]:
        """Return chunks by id, in that order; ids that are not known are skipped."""
        return self.catalog.chunks(arguments.texts(chunk_ids, "chunk_ids"))

    def documents(self) -> list[DocumentRow]:
        """Return the indexed documents, by source."""
        return self.catalog.documents(self.expected_bytes_per_token)

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, of those it has (`Chunk.encodings`) the first."""
        return self._storage.key_of(chunk)

    def open_kv(
        self, chunk_id: str, context_ids: tuple[int, ...] | None = None
    ) -> EncodedChunk | None:
        """Open a chunk's KV, or return None where there is none.

        Of its records it is the one that was encoded behind `context_ids`; None means the first.

        Raises
        ------
        RecordError
            When its record is damaged or foreign, or the catalog names another chunk's.
        IndexFormatError
            When the catalog is damaged.
        StoreError
            When the store cannot be read.
        """
        return self._storage.open_kv(chunk_id, context_ids)

    def tier_of(self, chunk_id: str, context_ids: tuple[int, ...] | None = None) -> int | None:
        """Return the number of the store's tier that would deliver a chunk's KV, 0 the fastest.

        The record is named as for `open_kv`, and nothing is read of it. None where the catalog
        does not tell which one is meant.
        """
        return self._storage.tier_of(chunk_id, context_ids)

    def pin(self, sources: Sequence[str]) -> int:
        """Keep the KV of documents in every tier it is in, until the index is closed.

        Returns the number of records: 0 where the store has no limit to keep within.
        """
        return self._storage.pin(arguments.texts(sources, "sources"))
