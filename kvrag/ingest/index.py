"""`Index`: a folder with the chunks of documents and their KV, and its public interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey
from kvrag.codec.names import COMPRESSION_GONE
from kvrag.errors import ParameterError
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.encryption import check_key
from kvrag.ingest.fitter import CodecFitter
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.maintenance import stats_of
from kvrag.ingest.opening import Given, make_index, open_index
from kvrag.ingest.parsing import Parser
from kvrag.ingest.report import IndexStats, IngestProgress, IngestReport
from kvrag.ingest.schema import DocumentRow
from kvrag.ingest.search import Search
from kvrag.ingest.settings import IndexSettings
from kvrag.ingest.shared.log import make_shared, open_shared
from kvrag.ingest.storage import Follower, Storage
from kvrag.ingest.upkeep import Upkeep, read_calibration
from kvrag.ingest.writer import Writer
from kvrag.models.control import ControlTokens
from kvrag.store.base import Store, tiers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvrag.fusion.controller import Calibration
    from kvrag.ingest.coding import RecordCoding
    from kvrag.ingest.embedding import Embedding
    from kvrag.ingest.on_demand import OnDemand
    from kvrag.ingest.run_finder import RunFinder
    from kvrag.ingest.stages import Runner
    from kvrag.models.known_text import KnownTexts
    from kvrag.models.kv_model import KVModel


class Index(Search):
    """Chunks of documents with precomputed position-free KV, in one folder.

    `create` makes an index and `open` opens one. Several threads and processes may read while one
    process writes; writing takes the index's lock.

    Attributes
    ----------
    path
        The index folder; for a shared index, this machine's view of it.
    counters
        The counters of this process's use of the index.
    upkeep
        Checks, repairs and tidies the index, and recodes or moves its KV.
    closing
        What `close` calls while catalog and store are still open.
    """

    def __init__(self, storage: Storage, encoders: Encoders) -> None:
        super().__init__(storage, encoders)
        self.path = storage.path
        self.counters = storage.counters
        fitter = CodecFitter(storage, encoders)
        self._follower: Follower | None = None
        self.closing = ExitStack()
        self._writer = Writer(storage, encoders, fitter)
        self.upkeep = Upkeep(storage, encoders, fitter, self._writer)

    # -- making and opening ------------------------------------------------------------------

    @classmethod
    def create(
        cls, path: str | Path, *, model: KVModel | PreTrainedModel | str | Path, **options: Any
    ) -> Index:
        """Create an empty index in a new or empty folder.

        Parameters
        ----------
        path
            The index folder, or the URL of a shared index (`kvrag.ingest.shared`): for example,
            ``s3://BUCKET/INDEX``, with options as in the URL of a store.
        model
            The decoder whose KV is stored: a folder, a hub name, a loaded object, a `KVModel`.
        **options
            The fields of `IndexSettings`: `embedding`, `codec`, `chunk_tokens`, `store` and others.

        Raises
        ------
        ParameterError
            When a value is out of range, the device cannot be used, or the folder is not empty.
        StoreError
            When the folder cannot be written, or the store cannot be used.
        ModelLoadError, UnsupportedModelError
            When the model cannot be loaded or served.
        IndexLockedError
            When another process is creating an index there.
        """
        if options.pop("compression", "none") != "none":
            raise ParameterError(COMPRESSION_GONE)
        settings = IndexSettings(**options)
        if arguments.is_url(path):
            return cls(*make_shared(str(path), model, settings))
        return cls(*make_index(path, model, settings))

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
        compute: str | None = None,
    ) -> Index:
        """Open an index. The weights and the embedding are loaded on first use.

        Parameters
        ----------
        path
            The index folder, or the URL of a shared index, whose view on this machine is brought
            up to date first.
        model
            Where to load the model from; None means the place that the index records. It must be
            the index's own model, which is checked when it is loaded.
        embedding
            Needed only if the index was made with an embedding object.
        device
            Where a model that is loaded here runs, such as ``"cuda"``; None means the CPU.
        store
            URL of the store of KV, in place of the recorded one: for example, the same store with
            other tiers before it. A store that does not answer is no error: chunks are prefilled.
        mend
            If the catalog cannot be opened at all, rename it to ``catalog.sqlite.damaged`` and
            begin an empty one. All documents are then lost, and the reports of `Upkeep.verify` and
            of the next `add` say so. Adding them again finds their KV in the store.
        compute
            What the model's linear layers compute in when prompts are answered: ``"float32"``,
            ``"bfloat16"``, ``"int8"``, ``"int4"`` or ``"auto"`` (see `KVModel.load`). What is
            stored does not depend on it.

        Raises
        ------
        IndexNotFoundError
            When there is no index in the folder.
        IndexFormatError
            When the index has another format version, or is damaged.
        IndexMismatchError
            When `model`, `embedding` or the store's key differ from those that the index was made
            with.
        ParameterError
            When the device cannot be used, the store's URL is wrong, or `compute` is none of these.
        StoreError
            When the store refuses access: a wrong password, a missing bucket.
        """
        given = Given(model, embedding, device, store, compute)
        if arguments.is_url(path):
            return cls(*open_shared(str(path), given))
        return cls(*open_index(path, given, mend=mend))

    def refresh(self) -> int:
        """Bring this machine's view of a shared index up to date; return its version.

        For an index in a folder, return the number of its changes. A change that arrives never
        alters an answer under way, whose text is that of its prompt.

        Raises
        ------
        StoreError
            When the bucket cannot be read; the index stays usable at its present version.
        IndexFormatError
            When the log is damaged there.
        """
        return self._storage.refresh()

    def follow(self, seconds: float = 5.0) -> None:
        """Refresh a shared index every few seconds, in a thread, until it is closed.

        Does nothing for an index in a folder, which needs no refreshing. A bucket that does not
        answer is logged, and asked again.
        """
        seconds = arguments.number(seconds, "seconds", above=0.0)
        if self._storage.log is not None:
            self._follower = Follower(self._storage, seconds)

    def close(self) -> None:
        """Close the catalog and the store, and write the counts to the index folder."""
        if self._follower is not None:
            self._follower.close()
        self.closing.close()
        if "on_demand" in self.__dict__:
            self.on_demand.close()
        self._storage.close()

    def require_open(self) -> None:
        """Raise IndexClosedError if the index is closed."""
        self._storage.require_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, model={self.config.model!r})"

    # -- what it stores ----------------------------------------------------------------------

    @property
    def config(self) -> IndexConfig:
        """The settings that the index was made with."""
        return self._storage.config

    @property
    def catalog(self) -> Catalog:
        """Documents and chunks. Raises IndexClosedError if the index is closed."""
        return self._storage.catalog

    @property
    def store(self) -> Store:
        """The store of the KV; set another one to read through it.

        Raises IndexMismatchError when their keys differ; a tier of the present store needs none.
        """
        return self._storage.store

    @store.setter
    def store(self, store: Store) -> None:
        if store not in tiers_of(self._storage.store):
            check_key(self.path, self.config, store)
        self._storage.store = store

    @property
    def coding(self) -> RecordCoding:
        """The codec and profiles of the index."""
        return self._storage.coding

    @property
    def expected_bytes_per_token(self) -> int:
        """Approximate size of a token's KV in the store, in bytes."""
        return self._storage.config.expected_bytes_per_token

    @property
    def url(self) -> str | None:
        """The URL of a shared index; None for an index in a folder."""
        url: str | None = getattr(self._storage.log, "url", None)
        return url

    @property
    def name(self) -> str:
        """The last part of the index's folder or URL."""
        place = self.url or ""
        return place.partition("?")[0].rpartition("/")[2] or self.path.name

    def stats(self) -> IndexStats:
        """Return the sizes and counts of the index."""
        return stats_of(self._storage)

    @property
    def calibration(self) -> Calibration | None:
        """The stored measurements of the index's model, or None if there are none.

        Measurements of loading are included only if they were made with the store that is open.
        Raises IndexFormatError when they are damaged, IndexMismatchError when of another model.
        """
        return read_calibration(self._storage)

    # -- models ------------------------------------------------------------------------------

    @property
    def model(self) -> KVModel:
        """The decoder, loaded on first use.

        Raises ModelLoadError when it cannot be loaded, IndexMismatchError when its weights or
        tokenizer differ from those that the index was made with, and ParameterError when the caller
        gave a loaded model on another device than the one asked for.
        """
        return self._encoders.model

    @property
    def model_folder(self) -> Path | None:
        """The folder of the model's files; None for a hub's model, or one made in memory.

        Loads no weights. Raises ModelLoadError when the folder is gone.
        """
        return self._encoders.model_folder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded without the weights. Raises as `model` does."""
        return self._encoders.tokenizer

    @property
    def control(self) -> ControlTokens | None:
        """The model's control strings, or None if they are kept. Raises as `tokenizer` does."""
        return self._encoders.control

    @property
    def known_texts(self) -> KnownTexts:
        """Tokenises prompts around the index's own texts. Raises as `tokenizer` does."""
        return self._encoders.known_texts

    @property
    def embedding(self) -> Embedding:
        """The embedding, loaded on first use. Raises IndexMismatchError."""
        return self._encoders.embedding

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids that precede every chunk when it is encoded."""
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
        runner: Runner | None = None,
    ) -> IngestReport:
        """Add files and documents to the index; unchanged ones cost no model time.

        The stored content of the given documents is checked against its seals; damaged content is
        written again.

        Parameters
        ----------
        paths_or_documents
            A path of a file or folder, a `Document`, a LangChain Document, a LlamaIndex node, or
            any iterable of them. Folders are searched at any depth. Files that a folder held
            before, but no longer holds, are removed from the index. A document with a known source
            replaces the old one. If a call has several different documents with one source, the
            last one is used and the others fail.
        dry_run
            Only report what would be done.
        force
            Read and parse every file again, even an unchanged one: for example, after a change
            of a loader. Documents with the same content as before stay unchanged.
        on_progress
            Called from this thread with the progress so far.
        limits
            Limits on the cost of a file; None means the defaults of `ParseLimits`.
        loaders
            Additional loaders by suffix, which take precedence over the built-in ones, as
            ``package.module:function``: a function of a file's path and bytes that yields a
            `Document` for each part of it. It runs in the process that parses, within its limits.
        runner
            Computes on other machines (`kvrag.ingest.ray.RayRunner`); None means here.

        Returns
        -------
        IngestReport
            Its `failed` lists what failed, with the reason; everything else is ingested.

        Raises
        ------
        DocumentError
            When a path does not exist; nothing has been done then.
        ParameterError
            When a value is neither a path nor a document.
        ParserError
            When the process that parses documents, or a loader in it, cannot be started.
        IndexLockedError
            When another process is writing to the index.
        StoreError
            When the disk is too small, full or read-only. Finished work is kept; a second call
            does the rest.
        """
        return self._writer.add(
            paths_or_documents,
            Parser(limits, loaders),
            dry_run=dry_run,
            force=force,
            on_progress=on_progress,
            runner=runner,
        )

    def delete(self, *, sources: Sequence[str] = (), chunk_ids: Sequence[str] = ()) -> int:
        """Remove documents and single chunks; the next `Upkeep.gc` removes their KV.

        Returns the number of removed chunks; skips unknown sources and ids. No trace of the text
        remains: chunks that were encoded after a removed one count as encoded alone from now on.
        If the store has no such KV (context ``document``), each prompt computes and counts it until
        `Upkeep.verify` with ``repair`` stores it.
        """
        return self._writer.delete(sources, chunk_ids)

    # -- reading -----------------------------------------------------------------------------

    @cached_property
    def run_finder(self) -> RunFinder:
        """The finder of runs inside the index's chunks; it follows changes of the catalog."""
        from kvrag.ingest.run_finder import RunFinder

        return RunFinder(self.catalog, lambda ids: str(self.tokenizer.decode(ids)))

    def get_chunks(self, chunk_ids: Sequence[str]) -> list[Chunk]:
        """Return chunks by id, in that order; skips unknown ids."""
        return self.catalog.chunks(arguments.texts(chunk_ids, "chunk_ids", is_utf8=True))

    def documents(self) -> list[DocumentRow]:
        """Return the indexed documents, ordered by source."""
        # A filler's other records are those that prompts make.
        with_others = not self.config.chunk_context.is_shared
        return self.catalog.documents.listed(self.expected_bytes_per_token, with_others=with_others)

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, the first of those in `Chunk.encodings`."""
        return self._storage.config.key_of(chunk)

    @cached_property
    def on_demand(self) -> OnDemand:
        """Makes the records that ingestion leaves out."""
        from kvrag.ingest.on_demand import OnDemand

        return OnDemand(self._storage, self._encoders)
