"""`Index`: a folder of documents' chunks with their KV, and the door to it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey, Document, chunk_key
from kvrag.codec.names import parse_codec
from kvrag.errors import (
    AnchorsError,
    IndexClosedError,
    IndexFormatError,
    IndexMismatchError,
    ModelLoadError,
    ParameterError,
    RecordError,
    StoreError,
)
from kvrag.fusion.compression.spec import NO_COMPRESSION, key_options, parse_compression
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import config as configs
from kvrag.ingest import lock, profiles
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.config import FORMAT_VERSION, IndexConfig
from kvrag.ingest.contexts import NO_CONTEXT, add_contexts, context_limit, encoded_behind
from kvrag.ingest.counting import IndexCounters
from kvrag.ingest.encryption import (
    catalog_key,
    key_check,
    open_catalog,
    replace_catalog,
    secret_salt,
)
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import is_storable
from kvrag.ingest.making import (
    KV_FOLDER,
    check_device,
    check_embedding,
    check_limit,
    check_settings,
    make_config,
    require_free,
)
from kvrag.ingest.parsing import Parser
from kvrag.ingest.pipeline import Outcome, Work, check_space, run_plan
from kvrag.ingest.plan import Plan, Planner, Sources, gather
from kvrag.ingest.refusal import refuse_control
from kvrag.ingest.report import (
    IngestProgress,
    IngestReport,
)
from kvrag.ingest.rows import Change, DocumentRow
from kvrag.ingest.seals import seal_key
from kvrag.ingest.upkeep import IndexUpkeep
from kvrag.models.control import KEEP, REFUSE, ControlTokens, check_control_tokens
from kvrag.store.base import Store
from kvrag.store.capabilities import ChecksWritable, LocatesTier, Pins, capability
from kvrag.store.registry import open_store

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvrag.codec.base import EncodedChunk
    from kvrag.codec.profile import Profile
    from kvrag.fusion.compression.encoding import Compressor
    from kvrag.fusion.segments import ChunkMatcher
    from kvrag.ingest.embedding import Embedding
    from kvrag.ingest.vectors import VectorIndex
    from kvrag.kvcache import ChunkKV
    from kvrag.models.kv_model import KVModel

logger = logging.getLogger("kvrag")

_DEFAULT_SALT = b"kvrag"
_MAX_RECENT = 256
_MOST_CHUNKS = 2**31 - 1
_MOST_CHARACTERS = 100_000  # of a question; embeddings read far less


@dataclass(frozen=True)
class SearchHit:
    """A chunk found, and the inner product of its vector with the question's."""

    chunk: Chunk
    score: float


class Index(IndexUpkeep):
    """Chunks of documents with precomputed position-free KV, in one folder.

    Made by `create`, opened by `open`. Reading is safe from several threads and processes, also
    while one process writes; writing takes the index's lock.

    Attributes
    ----------
    path
        The folder.
    config
        What it was made with.
    catalog, store, coding
        Where chunks and their KV are, and how the KV is encoded.
    counters
        What is counted while it is used.
    """

    def __init__(
        self,
        path: Path,
        config: IndexConfig,
        catalog: Catalog,
        *,
        model: KVModel | PreTrainedModel | str | Path | None,
        embedding: Embedding | None,
        device: str | None,
        store: Store,
    ) -> None:
        self.path = path
        self.config = config
        self._catalog = catalog
        self.store = store
        self._given_model = model
        self._given_embedding = embedding
        self._device = device
        self._lazy = threading.RLock()
        self._is_closed = False
        self._vectors: VectorIndex | None = None
        self._matcher: tuple[int, ChunkMatcher] | None = None
        self._recent: deque[str] = deque(maxlen=_MAX_RECENT)
        self._neutralised: dict[str, int] = {}  # by document, in an ingestion
        self._is_swept = False
        self._num_noted = 0
        self._lost = ""
        self.counters = IndexCounters(path, lambda: self.store.counts())
        catalog.on_damage = self._note_damage

    # -- making and opening ------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        model: KVModel | PreTrainedModel | str | Path,
        embedding: str | Path | Embedding | Any = "minilm",
        codec: str = "raw",
        profile: Profile | None = None,
        chunk_tokens: int = 512,
        context: str = NO_CONTEXT,
        context_tokens: int | None = None,
        compression: str = NO_COMPRESSION,
        dtype: torch.dtype | str | None = None,
        tenant_salt: bytes | None = None,
        device: str | None = None,
        store: str | None = None,
        control_tokens: str | None = None,
    ) -> Index:
        """Make an empty index in a new or empty folder.

        Parameters
        ----------
        path
            The folder.
        model
            The decoder whose KV is stored: a folder, a hub name, a loaded object, a `KVModel`.
        embedding
            See `kvrag.ingest.embedding.get_embedding`.
        codec
            How KV is encoded: ``raw``, ``lossless``, ``cachegen:LEVEL`` or ``transform:BITS``.
        profile
            What the codec was fitted to this model with; None fits one to the first documents.
        chunk_tokens
            Most tokens a chunk may have; with the shared prefix it must fit into the model's
            context.
        context
            What a chunk is encoded behind: ``none``, or text of its own document whose KV is not
            stored: ``document`` (what comes before it) or ``neighbours`` (its predecessor, in a
            second record that is used where the predecessor stands before it).
        context_tokens
            Tokens of ``document`` context at the most; None means 256.
        compression
            How chunks are stored as fewer rows than they have tokens: ``drop:RATE`` (tokens that
            say little are left out), ``anchors:RATE`` (trained tokens stand for blocks;
            ``kvrag train anchors``), RATE the share not stored; ``none`` stores all.
        dtype
            Type of weights and KV of a model that is loaded here; None keeps the checkpoint's.
        tenant_salt
            1 to 64 bytes that key the chunk keys, so that tenants who share a store cannot
            guess each other's; None means a public one, or of an encrypted index one that follows
            from its key.
        device
            Where a model that is loaded here runs, such as ``"cuda"``; None means the CPU. It is
            not recorded: stored KV is the same kind wherever it is computed.
        store
            URL of where KV is kept (`kvrag.store.registry.open_store`), recorded without its
            password; None means a folder in the index's own. With ``key_file=PATH`` in it the
            catalog is encrypted too.
        control_tokens
            What becomes of the model's control strings (``<|im_end|>``) in documents and prompts:
            ``neutralise`` reads them as text, ``refuse`` does not index documents that hold any,
            ``keep`` leaves them their power. None neutralises them for models with a chat template
            and keeps them for others.

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
        check_settings(codec, chunk_tokens, _DEFAULT_SALT if tenant_salt is None else tenant_salt)
        check_control_tokens(control_tokens)
        context_limit(context, context_tokens)
        parse_compression(compression)
        check_device(device)
        the_embedding = get_embedding(embedding)
        loaded = KVModel.load(model, dtype=dtype, device=device)
        check_device(device, loaded)
        config = make_config(
            model,
            loaded,
            dtype=dtype,
            embedding=the_embedding,
            codec=codec,
            profile=profile,
            chunk_tokens=chunk_tokens,
            context=context,
            context_tokens=context_tokens,
            compression=compression,
            tenant_salt=_DEFAULT_SALT if tenant_salt is None else tenant_salt,
            control_tokens=control_tokens,
        )
        with contextlib.ExitStack() as undoing:
            opened = None if store is None else open_store(store)
            if opened is not None:
                undoing.callback(opened.close)
                config = replace(config, store=opened.url, key_check=key_check(opened))
                if tenant_salt is None and (salt := secret_salt(opened)) is not None:
                    config = replace(config, tenant_salt=salt.hex())
                check_limit(opened, config)
                if (checks := capability(opened, ChecksWritable)) is not None:
                    checks.check_writable()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"cannot make the folder {folder}: {error.strerror or error}; use another one"
                ) from error
            with lock.writer_lock(folder):
                require_free(folder)
                catalog = Catalog.create(
                    folder / catalogs.FILE_NAME,
                    seal_key=seal_key(bytes.fromhex(config.tenant_salt), config.index_id),
                    cipher_key=None if opened is None else catalog_key(opened),
                )
                if profile is not None:
                    profiles.ProfileFolder(folder / profiles.FOLDER_NAME).add(profile)
                # Last, since it is what makes the folder an index.
                config.save(folder)
            undoing.pop_all()
        return cls(
            folder,
            config,
            catalog,
            model=loaded,
            embedding=the_embedding,
            device=device,
            store=opened if opened is not None else open_store(f"file:{folder / KV_FOLDER}"),
        )

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
            begin an empty one: all documents are lost from the index, which the reports of `verify`
            and of the next `add` say. Adding them again finds their KV in the store.

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
        config = IndexConfig.load(folder)
        try:
            parse_codec(config.codec)
        except ParameterError as error:
            raise IndexFormatError(f"{folder}: {error}; a newer kvrag may know it") from error
        the_embedding = None
        if embedding is not None:
            from kvrag.ingest.embedding import get_embedding

            the_embedding = get_embedding(embedding)
            check_embedding(config, folder, the_embedding)
        url = store or config.store or f"file:{folder / KV_FOLDER}"
        opened = open_store(url, must_answer=False)
        check_limit(opened, config)
        lost = ""
        try:
            try:
                catalog = open_catalog(folder, config, opened)
            except IndexFormatError as error:
                path = folder / catalogs.FILE_NAME
                is_there = path.exists()
                if not mend or (is_there and error.__cause__ is None):
                    raise  # one of another version is none that is damaged
                with lock.writer_lock(folder):
                    catalog = replace_catalog(folder, config, opened)
                lost = (
                    f"{path} was damaged ({error.__cause__}) and is set aside as "
                    f"{path.name}.damaged"
                    if is_there
                    else f"{path} was missing"
                )
                logger.warning("%s: all documents are lost; ingest all of them again", lost)
        except BaseException:
            opened.close()
            raise
        index = cls(
            folder,
            config,
            catalog,
            model=model,
            embedding=the_embedding,
            device=device,
            store=opened,
        )
        index._lost = lost
        try:
            index._bring_up_to_date()
        except BaseException:
            index.close()
            raise
        if model is not None and not isinstance(model, str | Path):
            try:
                _ = index.model  # loaded already: a mismatch is best told at once
            except BaseException:
                index.close()
                raise
        return index

    def close(self) -> None:
        """Close the catalog and the store, and keep what was counted."""
        if self._is_closed:
            return
        self._is_closed = True
        self.counters.keep()
        self._catalog.close()
        self.store.close()

    def require_open(self) -> None:
        """Raise IndexClosedError when the index was closed."""
        if self._is_closed:
            raise IndexClosedError(
                f"the index in {self.path} was closed: open it again, with Index.open"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, model={self.config.model!r})"

    # -- what it is made of ------------------------------------------------------------------

    @cached_property
    def model(self) -> KVModel:
        """The decoder, loaded on first use.

        Raises
        ------
        ModelLoadError
            When it cannot be loaded.
        IndexMismatchError
            When its weights or tokenizer are not those the index was made with.
        ParameterError
            When it was given as an object that is on another device than the one asked for.
        """
        from kvrag.models.kv_model import KVModel

        with self._lazy:
            config = self.config
            model = KVModel.load(self._model_source(), dtype=config.dtype, device=self._device)
            check_device(self._device, model)
            if model.fingerprint != config.model_fingerprint:
                raise self._mismatch("model", model.name, model.fingerprint)
            if model.tokenizer_fingerprint != config.tokenizer_fingerprint:
                raise self._mismatch("tokenizer", model.name, model.tokenizer_fingerprint)
            return model

    @property
    def model_folder(self) -> Path | None:
        """The folder of the model's files; None of a hub's model, or one made in memory.

        Loads no weights. Raises ModelLoadError when the folder is gone.
        """
        from kvrag.models.loading import resolve_model

        source = self._model_source()
        if "model" in self.__dict__ or not isinstance(source, str | Path):
            return self.model.folder
        path = Path(resolve_model(source))
        return path if path.is_absolute() else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded without the weights. Raises as `model` does."""
        if "model" in self.__dict__:
            return self.model.tokenizer
        from kvrag.models.loading import load_tokenizer, tokenizer_fingerprint

        with self._lazy:
            source = self._model_source()
            if not isinstance(source, str | Path):
                return self.model.tokenizer
            tokenizer = load_tokenizer(source)
            found = tokenizer_fingerprint(tokenizer)
            if found != self.config.tokenizer_fingerprint:
                raise self._mismatch("tokenizer", str(source), found)
            return tokenizer

    @cached_property
    def control(self) -> ControlTokens | None:
        """The model's control strings, or None where they are kept. Raises as `tokenizer` does."""
        if self.config.control_tokens == KEEP:
            return None
        return ControlTokens(self.tokenizer)

    @cached_property
    def embedding(self) -> Embedding:
        """The embedding, loaded on first use. Raises IndexMismatchError."""
        if self._given_embedding is not None:
            return self._given_embedding
        from kvrag.ingest.embedding import get_embedding

        with self._lazy:
            try:
                embedding = get_embedding(self.config.embedding)
            except ParameterError as error:
                raise IndexMismatchError(
                    f"{self.path} was made with the embedding {self.config.embedding!r}, which "
                    "cannot be found by name: pass it, Index.open(path, embedding=...)"
                ) from error
            check_embedding(self.config, self.path, embedding)
            return embedding

    @property
    def catalog(self) -> Catalog:
        """Documents and chunks. Raises IndexClosedError when the index was closed."""
        self.require_open()
        return self._catalog

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids every chunk is encoded behind."""
        return self.config.prefix_ids

    @property
    def matcher(self) -> ChunkMatcher:
        """Finds the index's chunks in a prompt; a new one after every change of the catalog."""
        from kvrag.fusion.segments import ChunkMatcher

        with self._lazy:
            if self._matcher is None or self._matcher[0] != self.catalog.generation():
                # Made anew rather than altered: other threads may be searching with the old one.
                matcher = ChunkMatcher(self.catalog.text_of)
                self._matcher = self.catalog.each_text(matcher.add), matcher
            return self._matcher[1]

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
        self.require_open()
        arguments.flag(dry_run, "dry_run")
        arguments.flag(force, "force")
        parser = Parser(limits, loaders)
        sources = gather(paths_or_documents, self.path, parser.suffixes)
        lock_taken = contextlib.nullcontext() if dry_run else lock.writer_lock(self.path)
        with parser, lock_taken:
            return self._add(sources, parser, dry_run, force, on_progress)

    def _add_files(self, paths: Sequence[str]) -> IngestReport:
        with Parser(None, None) as parser:
            return self._add(Sources(list(paths), [], {}, []), parser, False, True, None)

    def _add(
        self,
        sources: Sources,
        parser: Parser,
        dry_run: bool,
        force: bool,
        on_progress: Callable[[IngestProgress], None] | None,
    ) -> IngestReport:
        """Do what `add` does; call with the writer's lock held, but for a dry run."""
        started = time.perf_counter()
        self._reload_codec()
        self._neutralised.clear()
        is_sound = self._is_swept or self.catalog.has_sound_tables()
        before: tuple[int, set[str]] | None = None
        if not dry_run:
            self._encrypt_catalog()
            if not is_sound:
                before = self._heal_first()
        num_noted = self._num_noted
        plan = self._plan(sources, parser, force or not is_sound, on_progress)
        if self._num_noted > num_noted and not dry_run and before is None:
            # What is damaged elsewhere must not stand in the way of writing.
            before = self._heal_first()
            plan = self._plan(sources, parser, True, on_progress)
        outcome = self._foretell(plan) if dry_run else self._run(plan, parser, on_progress)
        if not dry_run:
            self.catalog.refresh_words()
        self._is_swept = self._is_swept or not dry_run
        note = self._codec_note() if outcome.num_records and not dry_run else ""
        if before is not None:
            said = (
                "the catalog was damaged and has been mended",
                *self._lost_since(before, len(plan.removed)),
            )
            note = "; ".join((*said, *filter(None, (note,))))
        if self._lost and not dry_run:
            loss = (
                f"{self._lost}: all documents were lost; ingest again what this run was not given"
            )
            note = "; ".join(filter(None, (loss, note)))
            self._lost = ""
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
            num_context_tokens=outcome.num_context_tokens,
            size_bytes=outcome.size_bytes,
            seconds=time.perf_counter() - started,
            compute_seconds=seconds,
            prefill_seconds=outcome.prefill_seconds,
            tokens_per_second=outcome.num_tokens_computed / seconds if seconds else 0.0,
            dry_run=dry_run,
            note=note,
            compression=self.config.compression,
            control_strings=self._num_control_strings([*plan.added, *plan.changed]),
        )

    def _foretell(self, plan: Plan) -> Outcome:
        return Outcome(
            num_records=plan.num_records,
            num_tokens_computed=plan.num_tokens_to_compute,
            num_context_tokens=plan.num_context_tokens,
            size_bytes=plan.num_tokens_to_compute * self.expected_bytes_per_token,
        )

    def _run(
        self,
        plan: Plan,
        parser: Parser,
        on_progress: Callable[[IngestProgress], None] | None,
    ) -> Outcome:
        # What a shared store takes is not on this disk.
        room = 0 if self.is_store_shared else self.expected_bytes_per_token
        check_space(plan, self.path, room, self.config.embedding_dim)
        return run_plan(plan, self._work(parser), on_progress)

    def _heal_first(self) -> tuple[int, set[str]]:
        """Mend a damaged catalog before it is written to; return what it held."""
        self._is_swept = True
        audit = self._audit()
        before = self._held(audit)
        self._heal(audit)
        return before

    def delete(self, *, sources: Sequence[str] = (), chunk_ids: Sequence[str] = ()) -> int:
        """Remove documents and single chunks; their KV goes with the next `gc`.

        Nothing of their text stays: chunks that were encoded behind a single chunk that is removed
        are from now on encoded alone. Where the store has no such KV (context ``document``), they
        are computed with each prompt and counted, until `verify` with ``repair=True`` stores it.

        Returns
        -------
        int
            Chunks removed. Sources and ids that are not known are skipped.
        """
        self.require_open()
        sources = arguments.texts(sources, "sources")
        chunk_ids = arguments.texts(chunk_ids, "chunk_ids")
        with lock.writer_lock(self.path):
            known = {
                source: self.catalog.chunk_ids_of(source)
                for source in dict.fromkeys(sources)
                if is_storable(source)
            }
            num_removed = sum(map(len, known.values()))
            if known:
                self.catalog.apply(Change(remove=list(known)))
            if chunk_ids:
                num_removed += self.catalog.remove_chunks(
                    dict.fromkeys(filter(is_storable, chunk_ids)),
                    lambda ordinal, later: encoded_behind(
                        ordinal, later, self.config.context, self.config.context_tokens
                    ),
                    self.key_of,
                )
            self.catalog.refresh_words()
            return num_removed

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
        query, k = self._checked_search(query, k)
        return self.search_by_vector(self.embedding.embed([query])[0], k)

    def search_by_vector(
        self, vector: NDArray[np.float32] | Sequence[float], k: int = 4
    ) -> list[SearchHit]:
        """Return the `k` chunks nearest to a vector ``[dim]``, best first."""
        self.require_open()
        k = arguments.whole(k, "k", 1, _MOST_CHUNKS)
        from kvrag.ingest.vectors import VectorIndex

        with self._lazy:
            if self._vectors is None:
                self._vectors = VectorIndex.load(self.path, self.catalog, self.config.embedding_dim)
            elif self._vectors.generation != self.catalog.generation():
                self._vectors = VectorIndex.refresh(self.catalog, self.config.embedding_dim)
            vectors = self._vectors
        asked = _as_vector(vector)
        return self._hits(lambda most: vectors.search(asked, most), k)

    def _checked_search(self, query: Any, k: Any) -> tuple[str, int]:
        self.require_open()
        k = arguments.whole(k, "k", 1, _MOST_CHUNKS)
        if len(arguments.text(query, "the question")) > _MOST_CHARACTERS:
            raise ParameterError(
                f"the question has {len(query):,} characters: expected at most "
                f"{_MOST_CHARACTERS:,}; search for a part of it"
            )
        if not query.strip():
            raise ParameterError("the question is empty: there is nothing to search for")
        return query, k

    def _hits(self, search: Callable[[int], list[tuple[int, float]]], k: int) -> list[SearchHit]:
        """Return the `k` best chunks that `search` finds and that are whole."""
        hits: list[SearchHit] = []
        seen: set[int] = set()
        # Where a chunk is damaged or gone, the next one takes its place.
        while len(hits) < k:
            found = [one for one in search(max(k, 2 * len(seen))) if one[0] not in seen]
            if not found:
                break
            chunks = self.catalog.chunks_at([row for row, _ in found])
            hits += [SearchHit(chunks[row], score) for row, score in found if row in chunks]
            seen.update(row for row, _ in found)
        hits = hits[:k]
        self._recent.extend(hit.chunk.chunk_id for hit in reversed(hits))
        return hits

    def search_words(self, query: str, k: int = 4) -> list[SearchHit]:
        """Return the `k` chunks that say most of a question's words (BM25), best first.

        No model is needed. A question without words finds nothing. Raises as `search` does.
        """
        query, k = self._checked_search(query, k)
        return self._hits(lambda most: self.catalog.search_words(query, most), k)

    @property
    def recent_chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks found by the latest searches, the latest and best first."""
        return tuple(dict.fromkeys(reversed(self._recent.copy())))

    def get_chunks(self, chunk_ids: Sequence[str]) -> list[Chunk]:
        """Return chunks by id, in that order; ids that are not known are skipped."""
        return self.catalog.chunks(arguments.texts(chunk_ids, "chunk_ids"))

    def documents(self) -> list[DocumentRow]:
        """Return the indexed documents, by source."""
        return self.catalog.documents(self.expected_bytes_per_token)

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, of those it has (`Chunk.encodings`) the first."""
        config = self.config
        return chunk_key(
            tenant_salt=bytes.fromhex(config.tenant_salt),
            model_fingerprint=config.model_fingerprint,
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            prefix_ids=config.prefix_ids,
            token_ids=chunk.token_ids,
            context_ids=chunk.contexts[0],
            options=key_options(self.compression, config.anchors),
        )

    def open_kv(
        self, chunk_id: str, context_ids: tuple[int, ...] | None = None
    ) -> EncodedChunk | None:
        """Open a chunk's KV, or return None where there is none.

        Parameters
        ----------
        chunk_id
            The chunk.
        context_ids
            Which of its records: the one that was encoded behind these tokens; None means the
            first of them.

        Raises
        ------
        RecordError
            When its record is damaged or foreign, or the catalog names another chunk's.
        IndexFormatError
            When the catalog is damaged.
        StoreError
            When the store cannot be read.
        """
        from kvrag.ingest.watched import WatchedChunk

        found = self.catalog.chunk_and_keys(chunk_id)
        if found is None:
            return None
        chunk, stored_keys = found
        # Made from the tokens: a damaged name must not lead to the KV of other tokens.
        keys = {one.contexts[0]: self.key_of(one) for one in chunk.encodings()}
        if stored_keys != [key.digest for key in keys.values()]:
            raise RecordError(
                f"chunk {chunk_id} names the KV {' '.join(stored_keys)!r}, expected "
                + " ".join(map(str, keys.values()))
            )
        if context_ids is None:
            context_ids = chunk.contexts[0]
        # Its document may have changed since the prompt was laid out.
        key = keys.get(context_ids)
        if key is None:
            return None
        try:
            record = self.store.open(key)
        except RecordError:
            self.store.note_damage(key)
            raise
        if record is None:
            return None
        try:
            encoded = self.coding.open(key, record, self.config.spec)
            expected = self.num_rows(len(chunk.token_ids))
            if encoded.num_tokens != expected:
                raise RecordError(
                    f"the record of chunk {chunk_id} holds {encoded.num_tokens} tokens, expected "
                    f"{expected}"
                )
        except RecordError:
            record.close()
            self.store.note_damage(key)
            raise
        except BaseException:
            record.close()
            raise
        return WatchedChunk(encoded, key, self.store)

    def tier_of(self, chunk_id: str, context_ids: tuple[int, ...] | None = None) -> int | None:
        """Return the number of the store's tier that would deliver a chunk's KV, 0 the fastest.

        Nothing is read of it. None where the catalog does not tell which record is meant.

        Parameters
        ----------
        chunk_id, context_ids
            As for `open_kv`.
        """
        tiers = capability(self.store, LocatesTier)
        if tiers is None:
            return 0
        try:
            found = self.catalog.chunk_and_keys(chunk_id)
        except (IndexFormatError, StoreError):
            return None
        for one in found[0].encodings() if found is not None else ():
            if context_ids is None or one.contexts[0] == context_ids:
                return tiers.tier_of(self.key_of(one))
        return None

    def pin(self, sources: Sequence[str]) -> int:
        """Keep the KV of documents in every tier it is in, until the index is closed.

        Returns
        -------
        int
            Records pinned; none where the store has no limit to keep within.
        """
        sources = arguments.texts(sources, "sources")
        chunk_ids = [chunk_id for one in sources for chunk_id in self.catalog.chunk_ids_of(one)]
        keys = {
            self.key_of(one) for chunk in self.get_chunks(chunk_ids) for one in chunk.encodings()
        }
        pins = capability(self.store, Pins)
        if pins is None:
            return 0
        pins.pin(keys)
        return len(keys)

    # -- private -----------------------------------------------------------------------------

    def _chunk(self, document: Document) -> list[Chunk]:
        config, control = self.config, self.control
        chunks = chunk_document(document, self.tokenizer, config.chunk_tokens, control)
        if control is not None and config.control_tokens == REFUSE:
            refuse_control(document, chunks, control)
        elif control is not None and (
            found := sum(len(control.find_any(chunk.text)) for chunk in chunks)
        ):
            self._neutralised[document.source] = found
        room = config.max_positions - len(config.prefix_ids) - self._room_to_compress
        return add_contexts(
            chunks, self.tokenizer, config.context, config.context_tokens, room, control
        )

    def _num_control_strings(self, sources: Sequence[str]) -> dict[str, int]:
        """Return how many control strings were read as text, of those documents that held any."""
        return {
            source: self._neutralised[source] for source in sources if source in self._neutralised
        }

    def _missing_key(self, chunk: Chunk) -> str | None:
        key = self.key_of(chunk)
        return None if self.store.contains(key) else key.digest

    def _prefill(self, chunk: Chunk) -> ChunkKV:
        before = (*self.prefix_ids, *chunk.contexts[0])
        if self.compression is None:
            return self.model.prefill(before, [chunk.token_ids])[0]
        return self._compressor.encode(before, chunk.token_ids)

    @cached_property
    def _room_to_compress(self) -> int:
        """Positions that a chunk leaves free, for what compressing it computes behind it."""
        if self.compression is None:
            return 0
        from kvrag.fusion.compression.encoding import room_behind

        return room_behind(self.compression, self.tokenizer, self.config.chunk_tokens)

    @cached_property
    def _compressor(self) -> Compressor:
        """What compresses chunks, loaded on first use. Raises as `model` does, and AnchorsError."""
        from kvrag.fusion.compression.encoding import Compressor

        assert self.compression is not None
        compressor = Compressor(self.model, self.compression)
        if compressor.anchors_digest != self.config.anchors:
            raise AnchorsError(
                f"{self.path} was made with other anchors (digest {self.config.anchors}) than "
                f"those beside the model now ({compressor.anchors_digest}): put them back, or "
                "ingest into a new folder"
            )
        return compressor

    def _plan(
        self,
        sources: Sources,
        parser: Parser,
        force: bool,
        on_progress: Callable[[IngestProgress], None] | None,
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

        planner = Planner(self.catalog, parser, self._chunk, self._missing_key, report, force)
        return planner.run(sources)

    def _bring_up_to_date(self) -> None:
        """Seal what was written before rows and `index.json` were sealed."""
        if not self.catalog.is_old:
            if self.config.format_version < FORMAT_VERSION:
                raise IndexFormatError(
                    f"{self.path / configs.FILE_NAME} is older than the catalog beside it: it was "
                    "exchanged. Put back the file as it was, from a copy; without one, ingest into "
                    "a new folder"
                )
            return
        logger.warning("%s was made by an older kvrag: its rows are sealed now", self.path)
        with lock.writer_lock(self.path):
            self.config.save(self.path)
            self.catalog.upgrade(self.key_of)

    def _note_damage(self, what: str) -> None:
        """Count a row that was left out; say it once."""
        self.counters.note_damage()
        self._num_noted += 1
        if self._num_noted == 1:
            logger.warning(
                "%s (damaged and left out: it is not found until 'kvrag verify --repair' or "
                "'kvrag ingest' mends it)",
                what,
            )

    def _work(self, parser: Parser) -> Work:
        return Work(
            catalog=self.catalog,
            store=self.store,
            codec_for=self._codec_for,
            embedding=self.embedding,
            parser=parser,
            chunk=self._chunk,
            key_of=self.key_of,
            prefill=self._prefill,
            bytes_per_token=self.expected_bytes_per_token,
        )

    def _model_source(self) -> KVModel | PreTrainedModel | str | Path:
        if self._given_model is not None:
            return self._given_model
        if not self.config.model:
            raise ModelLoadError(
                f"{self.path} was made with a model object built in memory: pass it, "
                "Index.open(path, model=...)"
            )
        return self.config.model

    def _mismatch(self, what: str, name: str, found: str) -> IndexMismatchError:
        expected = getattr(self.config, f"{what}_fingerprint")
        return IndexMismatchError(
            f"{self.path} was made with the {what} of {self.config.model or 'a model object'!r} "
            f"(fingerprint {expected}), but that of {name!r} has fingerprint {found}; give the "
            "model it was made with, or ingest into a new folder"
        )


def _as_vector(vector: Any) -> NDArray[np.float32]:
    import numpy as np

    try:
        found = np.asarray(vector, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"vector: expected numbers, found {str(vector)[:60]!r}") from error
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ParameterError(
            f"vector: expected finite numbers in one dimension, found shape {found.shape}"
        )
    return found
