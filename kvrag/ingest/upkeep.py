"""What an index does for itself: numbers, checks, repairs, and another codec for what it holds."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey, is_key
from kvrag.codec.names import parse_codec
from kvrag.errors import (
    IndexFormatError,
    IndexMismatchError,
    ParameterError,
    ProfileError,
    StoreError,
)
from kvrag.fusion.compression.spec import Compression, parse_compression
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import lock, profiles
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import VECTORS_NAME, IndexConfig, write_atomically
from kvrag.ingest.connection import next_path
from kvrag.ingest.encryption import catalog_key, key_check, require_key_of_records
from kvrag.ingest.kept import kept_keys
from kvrag.ingest.maintenance import collect_garbage, first_of, verify_records
from kvrag.ingest.making import KV_FOLDER, check_lasting, check_limit
from kvrag.ingest.mending import Audit
from kvrag.ingest.moving import MoveReport, copy_records, is_same_store
from kvrag.ingest.profiles import LEAST_TOKENS, SAMPLE_TOKENS, ProfileFolder
from kvrag.ingest.report import GcReport, IndexStats, IngestReport, RecodeReport, VerifyReport
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.store.registry import open_store, without_password

if TYPE_CHECKING:
    from kvrag.codec.base import Codec
    from kvrag.codec.presets import CodecChoice
    from kvrag.codec.profile import Profile
    from kvrag.fusion.calibration import Calibration
    from kvrag.ingest.coding import RecordCoding
    from kvrag.ingest.embedding import Embedding
    from kvrag.kvcache import ChunkKV

CALIBRATION_NAME = "calibration.json"


class IndexUpkeep(ABC):
    """The part of `Index` that looks after what is stored.

    Attributes
    ----------
    path, config, catalog, store, coding
        See `Index`.
    """

    path: Path
    config: IndexConfig
    store: Store
    _lost: str  # why an empty catalog is in place of the index's own; "" where it is not

    @property
    @abstractmethod
    def catalog(self) -> Catalog:
        """Documents and chunks."""

    @abstractmethod
    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, of those it has the first."""

    @property
    @abstractmethod
    def embedding(self) -> Embedding:
        """What makes vectors of texts."""

    @abstractmethod
    def _add_files(self, paths: Sequence[str]) -> IngestReport:
        """Read files again, whatever is known of them; call with the writer's lock held."""

    @abstractmethod
    def _prefill(self, chunk: Chunk) -> ChunkKV:
        """Return the KV of a chunk by the model, behind the first of its contexts."""

    @cached_property
    def coding(self) -> RecordCoding:
        """How KV is encoded; what only counts or lists never needs it."""
        return self._make_coding()

    @cached_property
    def _profiles(self) -> ProfileFolder:
        return ProfileFolder(self.path / profiles.FOLDER_NAME)

    @property
    def is_store_shared(self) -> bool:
        """Whether KV is kept elsewhere than in the index's folder, where others may keep theirs."""
        return bool(self.config.store)

    @property
    def codec(self) -> Codec:
        """What records are written with. Raises ParameterError before its profile is fitted."""
        return self.coding.codec

    @cached_property
    def compression(self) -> Compression | None:
        """How chunks are stored as fewer rows than they have tokens; None where they are not."""
        return parse_compression(self.config.compression)

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows of KV that a record of a chunk of so many tokens has."""
        return num_tokens if self.compression is None else self.compression.num_rows(num_tokens)

    @property
    def expected_bytes_per_token(self) -> int:
        """About what a token's KV takes in the store."""
        per_row = self.config.expected_bytes_per_token
        return per_row if self.compression is None else round(per_row * self.compression.share)

    @property
    def calibration(self) -> Calibration | None:
        """What was measured for the index's model, or None where nothing was.

        What it says of loading holds for the store that is open, or is left out.

        Raises
        ------
        IndexFormatError
            When the file is damaged.
        IndexMismatchError
            When it was measured with another model.
        """
        path = self.path / CALIBRATION_NAME
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        from kvrag.fusion.calibration import Calibration

        found = Calibration.from_json(text, str(path))
        if found.model_fingerprint != self.config.model_fingerprint:
            raise IndexMismatchError(
                f"{path}: measured with another model than the index's; run 'kvrag calibrate' again"
            )
        if found.loading is not None and found.loading.store != without_password(self.store.url):
            # Of another store it says nothing.
            found = replace(found, loading=None)
        return found

    def keep_calibration(self, calibration: Calibration) -> None:
        """Keep what was measured, in place of what was there.

        Raises
        ------
        IndexMismatchError
            When it was measured with another model.
        StoreError
            When the folder refuses it.
        """
        if calibration.model_fingerprint != self.config.model_fingerprint:
            raise IndexMismatchError(
                f"{self.path}: the calibration was measured with another model than the index's"
            )
        write_atomically(self.path / CALIBRATION_NAME, calibration.to_json().encode())

    def stats(self) -> IndexStats:
        """Return what the index holds, in numbers."""
        config = self.config
        num_documents, num_chunks, num_tokens = self.catalog.counts()
        needed = kept_keys(self.path) | self.catalog.keys()
        sizes = {
            key.digest: size
            for key, size in self.store.sizes()
            # What others keep in a shared store is not this index's.
            if not self.is_store_shared or key.digest in needed
        }
        stored = sorted(sizes)
        size_bytes = sum(sizes.values())
        # Of chunks alike one record is stored.
        stored_tokens = sum(needed[digest] for digest in stored if digest in needed)
        return IndexStats(
            path=str(self.path),
            store=self.store.url,
            model=config.model,
            dtype=config.dtype,
            codec=config.codec,
            embedding=config.embedding,
            chunk_tokens=config.chunk_tokens,
            context=config.context,
            context_tokens=config.context_tokens,
            compression=config.compression,
            control_tokens=config.control_tokens,
            num_prefix_tokens=len(config.prefix_ids),
            num_documents=num_documents,
            num_chunks=num_chunks,
            num_tokens=num_tokens,
            num_records=len(stored),
            num_unreferenced_records=sum(digest not in needed for digest in stored),
            size_bytes=size_bytes,
            bytes_per_token=config.bytes_per_token,
            stored_bytes_per_token=size_bytes / stored_tokens if stored_tokens else 0.0,
            catalog_bytes=_size_of(self.path / catalogs.FILE_NAME),
            vectors_bytes=_size_of(self.path / VECTORS_NAME),
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
            Compute missing and damaged records anew, and mend the catalog: what is damaged is read
            again from the files it came from. Loads the model and takes the lock.
        on_progress
            Called with the number of records read, and of how many.
        """
        arguments.flag(repair, "repair")
        with lock.writer_lock(self.path) if repair else contextlib.nullcontext():
            self._reload_codec()
            audit = self._audit()
            found = audit.problems
            not_healed: tuple[str, ...] = ()
            if repair:
                self._encrypt_catalog()
                self._find_profile()
                if found:
                    before = self._held(audit)
                    failed = self._heal(audit).failed
                    not_healed = (
                        *self._lost_since(before),
                        *(f"{one.source}: {one.reason}" for one in failed),
                    )
                    audit = self._audit()
            report = verify_records(
                self.catalog,
                self.store,
                self.coding,
                self.config.spec,
                audit=audit,
                num_rows=self.num_rows,
                repair=self._repair if repair else None,
                on_progress=on_progress,
            )
            if not report.catalog_problems and (words := self.catalog.check_words(repair=repair)):
                report = replace(report, catalog_problems=(words,), is_healed=repair)
            if self._lost:
                found = [self._lost, *found]
                not_healed = ("all documents are lost; ingest all of them again", *not_healed)
            elif not repair or not found:
                return report
            return replace(
                report,
                catalog_problems=first_of(found),
                not_healed=not_healed,
                is_healed=not audit.problems,
            )

    def _audit(self) -> Audit:
        """Hold all that the catalog holds against its seals."""
        audit = self.catalog.audit(self.key_of)
        audit.structure = self.catalog.damage()
        return audit

    def _heal(self, audit: Audit) -> IngestReport:
        """Mend the catalog, and read the files again that are concerned; return what that did."""
        if audit.structure:
            self.catalog.rebuild()
            audit = self.catalog.audit(self.key_of)
            audit.others.append("the file was rebuilt")  # something may be missing
        paths = self.catalog.mend(audit, self.key_of, lambda texts: self.embedding.embed(texts))
        return self._add_files([path for path in paths if Path(path).is_file()])

    def _held(self, audit: Audit) -> tuple[int, set[str]]:
        """Return the number of documents there should be, and those not whole to our knowledge."""
        num_documents = audit.num_documents
        with contextlib.suppress(IndexFormatError):
            num_documents = max(num_documents, self.catalog.counts()[0])
        return num_documents, set(self.catalog.distrusted())

    def _lost_since(self, before: tuple[int, set[str]], num_removed: int = 0) -> list[str]:
        """Return what was lost by damage since `_held`, and what to do about it.

        So many documents were removed because their files are gone.
        """
        num_documents, distrusted = before
        lost = [
            f"{source}: part of it was damaged and is gone; add it again"
            for source in self.catalog.distrusted()
            if source not in distrusted
        ]
        missing = num_documents - num_removed - self.catalog.counts()[0]
        if missing > 0:
            lost.append(
                f"{missing:,} documents are gone with all their chunks; ingest all documents again"
            )
        return lost

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
            When the codec needs no profile, or the index holds fewer than 256 tokens.
        """
        num_tokens = arguments.whole(num_tokens, "num_tokens", 1)
        with lock.writer_lock(self.path):
            self._reload_codec()
            needed, kv_of = self._codable()
            profile = self._fit(codec, list(needed.values()), kv_of, on_progress, num_tokens)
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
        from kvrag.codec.presets import choose_codec
        from kvrag.ingest.coding import check_profile, check_room, recode_records

        choice = choose_codec(codec)
        with lock.writer_lock(self.path):
            self._reload_codec()
            if profile is not None and choice.config is None:
                raise ParameterError(f"codec {codec!r} takes no profile: leave it out")
            needed, kv_of = self._codable()
            if profile is None and choice.config is not None:
                profile = self._present_profile(choice, sum(needed.values())) or self._fit(
                    codec, list(needed.values()), kv_of, on_profile
                )
            if profile is not None:
                check_profile(profile, codec, self.config.spec, self.config.model_fingerprint)
            if not self.is_store_shared:
                check_room(needed, self.store, choice, self.config.spec, self.path)
            self._use_codec(codec, profile)
            return recode_records(
                needed,
                self.store,
                self.coding,
                self.config.spec,
                compute=lambda key: self._prefill(self.catalog.chunk_with(key, self.key_of)),
                on_progress=on_progress,
            )

    def _codable(self) -> tuple[dict[ChunkKey, int], Callable[[int], ChunkKV]]:
        """Return all KV by name, with its rows, and what returns the KV of one by its place."""
        from kvrag.ingest.coding import read_exact

        found = self.catalog.audit(self.key_of).needed
        needed = {key: self.num_rows(found[key]) for key in sorted(found)}
        keys = list(needed)

        def kv_of(number: int) -> ChunkKV:
            key = keys[number]
            found = read_exact(key, needed[key], self.store, self.coding, self.config.spec)
            if found is not None:
                return found
            return self._prefill(self.catalog.chunk_with(key, self.key_of))

        return needed, kv_of

    def _present_profile(self, choice: CodecChoice, num_tokens: int) -> Profile | None:
        """Return the best of the index's profiles that a codec can use, if any is good enough.

        One that was fitted on much less than there is now is not: an index is small at first.
        """
        from kvrag.codec.registry import is_profile_of

        fitting: list[Profile] = []
        for profile_hash in self.coding.profiles.hashes():
            with contextlib.suppress(ProfileError):
                profile = self.coding.profiles.get(profile_hash)
                is_ours = profile.model_fingerprint == self.config.model_fingerprint
                has_level = any(level.name == choice.level for level in profile.levels)
                if is_ours and has_level and is_profile_of(profile, choice):
                    fitting.append(profile)
        best = max(fitting, key=lambda profile: (profile.num_tokens, profile.hash), default=None)
        if best is None or best.num_tokens < min(SAMPLE_TOKENS, num_tokens) / 2:
            return None
        return best

    def move(
        self, store: str, *, on_progress: Callable[[int, int], None] | None = None
    ) -> MoveReport:
        """Keep the index's KV in another store from now on; what is whole is copied there.

        Records in the index's own folder are then removed; what was kept elsewhere stays, since
        others may need it. Questions are answered meanwhile; whoever has the index open goes on
        with the old store until it is opened again. A second call completes one that was killed.

        Parameters
        ----------
        store
            Its URL; it is recorded without its password.
        on_progress
            Called with the number of records done, and of how many.

        Raises
        ------
        ParameterError
            When the URL is wrong, or the store is limited to less than a chunk, or in memory.
        StoreError
            When a store refuses; the index then stays where it is.
        IndexLockedError
            When another process is writing to the index.
        """
        with lock.writer_lock(self.path):
            self._reload_codec()
            target = open_store(store)
            check_limit(target, self.config)
            try:
                check_lasting(target)
                needed = {ChunkKey(one) for one in self._needed_keys()}
                report = copy_records(needed, self.store, target, on_progress)
                own = f"file:{self.path / KV_FOLDER}"
                url = "" if target.url == own else target.url
                left = self._left_by_moving(own, report.num_lost) if url else None
                if left is not None and is_same_store(left, target):
                    left = None
                config = replace(self.config, store=url, key_check=key_check(target))
                self._use_key_of(target, config)
            except BaseException:
                target.close()
                raise
            source, self.store = self.store, target
            num_removed = 0
            if left is not None:
                num_removed = sum(map(left.delete, needed))
                left.collect_garbage()  # gives back their room
                left.close()
            source.close()
            return replace(report, store=without_password(report.store), num_removed=num_removed)

    def gc(self, *, delete_shared: bool = False) -> GcReport:
        """Remove records that no chunk needs, codec profiles that no record needs, and what killed
        processes left behind.

        Parameters
        ----------
        delete_shared
            Also of a store outside the index's folder remove every record that this index does
            not need. Without, its records stay: other indexes may need them.
        """
        arguments.flag(delete_shared, "delete_shared")
        with lock.writer_lock(self.path):
            self._reload_codec()
            return collect_garbage(
                self.path,
                self.store,
                self._profiles,
                self.config.profile,
                needed=self._needed_keys(),
                keeps_unknown=self.is_store_shared and not delete_shared,
            )

    # -- private -----------------------------------------------------------------------------

    def _needed_keys(self) -> set[str]:
        """Return the names of all KV that is needed: those noted, and those that must be."""
        noted = set(filter(is_key, self.catalog.keys()))
        must_be = {key.digest for key in self.catalog.audit(self.key_of).needed}
        return noted | must_be | kept_keys(self.path).keys()

    def _encrypt_catalog(self) -> None:
        """Encrypt the catalog of an index whose records were encrypted before catalogs were."""
        if self.config.key_check or "key_file=" not in self.config.store:
            return
        require_key_of_records(self.store)
        self._use_key_of(self.store, replace(self.config, key_check=key_check(self.store)))

    def _use_key_of(self, store: Store, config: IndexConfig) -> None:
        """Write the catalog under a store's key, or none, and note a configuration with it."""
        if config.key_check == self.config.key_check:
            config.save(self.path)
            self.config = config
            return
        key = catalog_key(store) if config.key_check else None
        self.catalog.write_copy(next_path(self.catalog.path), key)
        config.save(self.path)
        self.config = config
        self.catalog.use_next(key)
        (self.path / VECTORS_NAME).unlink(missing_ok=True)

    def _left_by_moving(self, own: str, num_lost: int) -> Store | None:
        """Return the store in the index's folder, where its records are not needed any more."""
        if not self.config.store:
            # Not what this object was opened with: that may be another store than recorded.
            return self.store if self.store.url == own else None
        # A move that was killed while it removed them: the last copies of what is lost stay.
        is_left = not num_lost and (self.path / KV_FOLDER).is_dir()
        return FileStore(self.path / KV_FOLDER) if is_left else None

    def _repair(self, key: ChunkKey) -> None:
        chunk = self.catalog.chunk_with(key, self.key_of)
        self.store.replace(key, self.codec.encode(key, self._prefill(chunk)))

    def _codec_for(self, chunks: list[Chunk], say: Callable[[str], None]) -> Codec:
        """Return what records are written with; fit its profile to `chunks` if it has none.

        Too few of them are stored raw: `recode` finds them when there is more to fit to.
        """
        if not self.coding.needs_profile:
            return self.codec
        lengths = [self.num_rows(len(chunk.token_ids)) for chunk in chunks]
        if sum(lengths) < LEAST_TOKENS:
            from kvrag.codec.raw import RawCodec

            return RawCodec()
        codec = self.config.codec
        profile = self._fit(codec, lengths, lambda number: self._prefill(chunks[number]), say)
        self._use_codec(codec, profile)
        return self.codec

    def _codec_note(self) -> str:
        """Return what to know after an ingestion of how KV was stored; "" for nothing."""
        codec = self.config.codec
        again = f"'kvrag recode --codec {codec}' fits it again when the index holds more"
        if self.coding.needs_profile:
            return f"KV was stored raw: {codec} is fitted on {LEAST_TOKENS} tokens or more; {again}"
        if self.config.profile:
            num_tokens = self.coding.profiles.get(self.config.profile).num_tokens
            if num_tokens < SAMPLE_TOKENS // 4:
                return f"{codec} was fitted on {num_tokens:,} tokens only; {again}"
        return ""

    def _find_profile(self) -> None:
        """Fit another profile if the one that records are written with is lost."""
        if self.coding.needs_profile:
            return
        try:
            _ = self.codec
        except ProfileError:
            needed, kv_of = self._codable()
            codec = self.config.codec
            self._use_codec(codec, self._fit(codec, list(needed.values()), kv_of, lambda _: None))

    def _reload_codec(self) -> None:
        """Take over what another process or object has made of the index's codec since."""
        config = IndexConfig.load(self.path)
        if (config.codec, config.profile) != (self.config.codec, self.config.profile):
            self.config = replace(self.config, codec=config.codec, profile=config.profile)
            self.coding = self._make_coding()

    def _make_coding(self) -> RecordCoding:
        from kvrag.ingest.coding import RecordCoding

        config = self.config
        return RecordCoding(self._profiles, config.codec, config.profile, config.model_fingerprint)

    def _fit(
        self,
        codec: str,
        lengths: Sequence[int],
        kv_of: Callable[[int], ChunkKV],
        say: Callable[[str], None],
        num_tokens: int = SAMPLE_TOKENS,
    ) -> Profile:
        config = self.config
        from kvrag.ingest.coding import fit_to

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
        name = parse_codec(codec).label
        config = replace(self.config, codec=name, profile="" if profile is None else profile.hash)
        config.save(self.path)
        self.config = config
        self.coding = self._make_coding()


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
