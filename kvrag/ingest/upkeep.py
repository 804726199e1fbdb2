"""What an index does for itself: numbers, checks, repairs, and another codec for what it holds."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvrag.chunk import Chunk, ChunkKey
from kvrag.codec.base import Codec
from kvrag.codec.presets import CodecChoice, choose_codec, expected_bytes_per_token
from kvrag.codec.profile import Profile
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import lock, vectors
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.coding import (
    SAMPLE_TOKENS,
    RecordCoding,
    check_profile,
    fit_to,
    read_exact,
    recode_records,
)
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.maintenance import collect_garbage, verify_records
from kvrag.ingest.report import GcReport, IndexStats, RecodeReport, VerifyReport
from kvrag.kvcache import ChunkKV
from kvrag.store.base import Store


class IndexUpkeep(ABC):
    """The part of `Index` that looks after what is stored.

    Attributes
    ----------
    path, config, catalog, store, coding
        See `Index`.
    """

    path: Path
    config: IndexConfig
    catalog: Catalog
    store: Store
    coding: RecordCoding

    @abstractmethod
    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV."""

    @abstractmethod
    def _prefill(self, chunk: Chunk) -> ChunkKV:
        """Return the KV of a chunk by the model."""

    @property
    def codec(self) -> Codec:
        """What records are written with. Raises ParameterError before its profile is fitted."""
        return self.coding.codec

    @property
    def expected_bytes_per_token(self) -> int:
        """About what a token's KV takes in the store."""
        return expected_bytes_per_token(choose_codec(self.config.codec), self.config.spec)

    def stats(self) -> IndexStats:
        """Return what the index holds, in numbers."""
        config = self.config
        num_documents, num_chunks, num_tokens = self.catalog.counts()
        needed = self.catalog.keys()
        stored = sorted(map(str, self.store.keys()))
        size_bytes = self.store.size_bytes()
        # Of chunks alike one record is stored.
        stored_tokens = sum(needed[digest] for digest in stored if digest in needed)
        return IndexStats(
            path=str(self.path),
            model=config.model,
            dtype=config.dtype,
            codec=config.codec,
            embedding=config.embedding,
            chunk_tokens=config.chunk_tokens,
            num_prefix_tokens=len(config.prefix_ids),
            num_documents=num_documents,
            num_chunks=num_chunks,
            num_tokens=num_tokens,
            num_records=len(stored),
            num_unreferenced_records=sum(digest not in needed for digest in stored),
            size_bytes=size_bytes,
            bytes_per_token=config.spec.bytes_per_token,
            stored_bytes_per_token=size_bytes / stored_tokens if stored_tokens else 0.0,
            catalog_bytes=_size_of(self.path / catalogs.FILE_NAME),
            vectors_bytes=_size_of(self.path / vectors.FILE_NAME),
            generation=self.catalog.generation(),
        )

    def verify(
        self,
        *,
        repair: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport:
        """Read every layer of every record, compare checksums, and check the catalog's rows.

        Parameters
        ----------
        repair
            Compute missing and damaged records anew, and let the next ingestion write documents
            with damaged rows anew; loads the model and takes the lock.
        on_progress
            Called with the number of records read, and of how many.
        """
        with lock.writer_lock(self.path) if repair else contextlib.nullcontext():
            return verify_records(
                self.catalog,
                self.store,
                self.coding,
                self.config.spec,
                key_of=self.key_of,
                repair=self._repair if repair else None,
                on_progress=on_progress,
            )

    def fit_profile(
        self,
        codec: str = "transform",
        *,
        num_tokens: int = SAMPLE_TOKENS,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Profile:
        """Fit a codec to the index's model and documents, and keep its profile with the index.

        Parameters
        ----------
        codec
            ``transform``, ``transform:BITS``, ``cachegen`` or ``lossless``.
        num_tokens
            Of the sample, which is taken evenly from the index.
        on_progress
            Receives a line whenever there is something new to say.

        Raises
        ------
        ParameterError
            When the codec needs no profile, or the index holds fewer than 64 tokens.
        """
        keys, lengths, kv_of = self._codable()
        del keys
        profile = self._fit(codec, lengths, kv_of, on_progress, num_tokens)
        self.coding.profiles.add(profile)
        return profile

    def recode(
        self,
        codec: str,
        *,
        profile: Profile | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_profile: Callable[[str], None] = lambda _: None,
    ) -> RecodeReport:
        """Write all records anew with another codec; a second run completes one that was killed.

        Questions are answered meanwhile: every record names the codec that reads it.

        Parameters
        ----------
        codec
            ``raw``, ``lossless``, ``cachegen:LEVEL`` or ``transform:BITS``.
        profile
            What the codec was fitted to this model with; None takes the one the index has if it is
            this codec's, and else fits one to a sample of the index.
        on_progress
            Called with the number of records done, and of how many.
        on_profile
            Receives a line whenever fitting has something new to say.

        Raises
        ------
        ParameterError
            When there is no such codec, or the profile is another model's.
        IndexLockedError
            When another process is writing to the index.
        """
        choice = choose_codec(codec)
        with lock.writer_lock(self.path):
            keys, lengths, kv_of = self._codable()
            if profile is None and choice.config is not None:
                profile = self._present_profile(choice) or self._fit(
                    codec, lengths, kv_of, on_profile
                )
            if profile is not None:
                check_profile(profile, codec, self.config.spec, self.config.model_fingerprint)
            self._use_codec(codec, profile if choice.config is not None else None)
            return recode_records(
                keys,
                self.store,
                self.coding,
                self.config.spec,
                compute=lambda key: self._prefill(self.catalog.chunk_with(key, self.key_of)),
                on_progress=on_progress,
            )

    def _codable(self) -> tuple[list[ChunkKey], list[int], Callable[[int], ChunkKV]]:
        """Return the names of all KV, their tokens, and what returns the KV of one by number."""
        needed, _ = self.catalog.audit(self.key_of)
        keys = sorted(needed)

        def kv_of(number: int) -> ChunkKV:
            key = keys[number]
            found = read_exact(key, self.store, self.coding, self.config.spec)
            if found is not None:
                return found
            return self._prefill(self.catalog.chunk_with(key, self.key_of))

        return keys, [needed[key] for key in keys], kv_of

    def _present_profile(self, choice: CodecChoice) -> Profile | None:
        """Return the index's profile if it has the level that a codec names."""
        if not self.config.profile or choice.config is None:
            return None
        profile = self.coding.profiles.get(self.config.profile)
        fits = profile.config.transform == choice.config.transform
        fits = fits and profile.config.quantiser == choice.config.quantiser
        return profile if fits and any(v.name == choice.level for v in profile.levels) else None

    def gc(self) -> GcReport:
        """Remove records that no chunk needs, and files left behind by killed processes."""
        with lock.writer_lock(self.path):
            return collect_garbage(self.path, self.catalog, self.store)

    # -- private -----------------------------------------------------------------------------

    def _repair(self, key: ChunkKey) -> None:
        chunk = self.catalog.chunk_with(key, self.key_of)
        self.store.replace(key, self.codec.encode(key, self._prefill(chunk)))

    def _codec_for(self, chunks: list[Chunk], say: Callable[[str], None]) -> Codec:
        """Return what records are written with; fit its profile to `chunks` if it has none."""
        if self.coding.needs_profile:
            lengths = [len(chunk.token_ids) for chunk in chunks]
            codec = self.config.codec
            profile = self._fit(codec, lengths, lambda number: self._prefill(chunks[number]), say)
            self._use_codec(codec, profile)
        return self.codec

    def _fit(
        self,
        codec: str,
        lengths: Sequence[int],
        kv_of: Callable[[int], ChunkKV],
        say: Callable[[str], None],
        num_tokens: int = SAMPLE_TOKENS,
    ) -> Profile:
        config = self.config
        return fit_to(
            codec,
            lengths,
            kv_of,
            spec=config.spec,
            model_fingerprint=config.model_fingerprint,
            on_progress=say,
            num_tokens=num_tokens,
        )

    def _use_codec(self, codec: str, profile: Profile | None) -> None:
        """Write records with another codec from now on."""
        if profile is not None:
            self.coding.profiles.add(profile)
        name = choose_codec(codec).label
        config = replace(self.config, codec=name, profile="" if profile is None else profile.hash)
        config.save(self.path)
        self.config = config
        self.coding = RecordCoding(self.coding.profiles, config.codec, config.profile)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
