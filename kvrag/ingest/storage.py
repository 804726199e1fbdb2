"""The storage of an index: configuration, catalog, records, and the coding of the records.

Reading, writing and upkeep share one `Storage`, so that each immediately sees the others' changes:
another codec, another store, a closed catalog.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvrag.chunk import Chunk, ChunkKey, chunk_key
from kvrag.codec.names import parse_codec
from kvrag.errors import IndexClosedError
from kvrag.fusion.compression.spec import Compression, key_options, parse_compression
from kvrag.ingest import profiles, vectorheader
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.catalogfile import next_path, write_copy
from kvrag.ingest.checks import check_unencrypted
from kvrag.ingest.config import RUNS_NAME, VECTORS_NAME, IndexConfig
from kvrag.ingest.counting import IndexCounters
from kvrag.ingest.encryption import catalog_key
from kvrag.ingest.profiles import ProfileFolder
from kvrag.ingest.report import GcReport
from kvrag.ingest.rows import Change, Encoding
from kvrag.process import OfProcess
from kvrag.store.base import Store
from kvrag.store.capabilities import tiers_of

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile
    from kvrag.ingest.coding import RecordCoding
    from kvrag.ingest.vectors import CurrentVectors

logger = logging.getLogger("kvrag")


class Storage(OfProcess):
    """The opened folder of one index.

    Attributes
    ----------
    path
        The index folder.
    config
        The settings of the index.
    store
        The store of the KV.
    compression
        How chunks are stored as fewer rows than they have tokens; None if they are not.
    counters
        The counters of this process's use of the index.
    lost
        Why an empty catalog replaces the index's own; "" if it does not.
    log
        The log of a shared index, whose view the folder is; None for other indexes.
    """

    _kind = "Index"

    def __init__(
        self, path: Path, config: IndexConfig, catalog: Catalog, store: Store, lost: str = ""
    ) -> None:
        self.path = path
        self.config = config
        self.store = store
        self.compression = parse_compression(config.compression)
        self.counters = IndexCounters(path, lambda: self.store.counts())
        self.lost = lost
        self.log: ChangeLog | None = None
        self._catalog = catalog
        self._is_closed = False
        self._is_damage_told = False
        catalog.on_damage = self._note_damage
        catalog.encoding = Encoding(self.key_of, config.chunk_context)

    def close(self) -> None:
        """Close the catalog and the store, and write the counts to the index folder."""
        if self._is_closed:
            return
        self._is_closed = True
        self.counters.keep()
        self._catalog.close()
        self.store.close()
        if self.log is not None:
            self.log.close()

    def require_open(self) -> None:
        """Raise IndexClosedError if the index is closed, ProcessError after a fork."""
        self.require_here()
        if self._is_closed:
            raise IndexClosedError(
                f"the index in {self.path} was closed: open it again, with Index.open"
            )

    @property
    def catalog(self) -> Catalog:
        """Documents and chunks. Raises IndexClosedError if the index is closed."""
        self.require_open()
        return self._catalog

    def apply(self, change: Change) -> int:
        """Write a change to the catalog, or to a shared index's log; as `Catalog.write`."""
        return self.catalog.write(change) if self.log is None else self.log.commit(change)

    def refresh_caches(self) -> None:
        """Bring the files beside the catalog up to date: no removed text stays in one.

        The caller has changed the catalog, and holds the writer's lock.
        """
        from kvrag.ingest.run_finder import forget_removed

        self.catalog.words.refresh()
        self.refresh_vectors()
        forget_removed(self.catalog)
        if self.log is not None:
            self.log.compact(is_forced=False)

    def refresh(self) -> int:
        """Bring the view of a shared index up to date; return the catalog's generation."""
        self.require_open()
        return self.catalog.version()[0] if self.log is None else self.log.refresh()

    def refresh_vectors(self) -> None:
        """Bring a graph of the vectors up to date, or make it if there are many of them now.

        The caller holds the writer's lock.
        """
        catalog = self.catalog
        if catalog.cipher_key is not None:
            return
        cached = vectorheader.vector_stats(self.path)
        num_vectors = catalog.stored.num_vectors
        if cached.is_graph or num_vectors(self.config.embedding_dim) > vectorheader.GRAPH_FROM:
            self.vectors.refresh(cached.of)

    @cached_property
    def vectors(self) -> CurrentVectors:
        """The vectors of the chunks; not needed for listing."""
        from kvrag.ingest.vectors import CurrentVectors

        return CurrentVectors(self.path, self.catalog, self.config.embedding_dim)

    def forget_vectors(self) -> None:
        """Read the vectors again when they are next needed: the catalog's file was replaced."""
        self.__dict__.pop("vectors", None)

    @cached_property
    def profiles(self) -> ProfileFolder:
        """The codec profiles in the index folder."""
        return ProfileFolder(self.path / profiles.FOLDER_NAME)

    @cached_property
    def coding(self) -> RecordCoding:
        """The codec and profiles; not needed for counting and listing."""
        return self._make_coding()

    @property
    def is_store_shared(self) -> bool:
        """Whether the store is outside the index folder, where others may keep their KV too."""
        return bool(self.config.store)

    @property
    def expected_bytes_per_token(self) -> int:
        """Approximate size of a token's KV in the store, in bytes."""
        per_row = self.config.expected_bytes_per_token
        return per_row if self.compression is None else round(per_row * self.compression.share)

    def num_rows(self, num_tokens: int) -> int:
        """Return how many rows of KV the record of a chunk with `num_tokens` tokens has."""
        return num_tokens if self.compression is None else self.compression.num_rows(num_tokens)

    @property
    def home(self) -> Store:
        """The store that new records go to: of a shared index's tiers, the one that all share.

        A faster tier may still have what `gc` of another machine removed, and pass it on only after
        the catalog that names it.
        """
        return self.store if self.log is None else tiers_of(self.store)[-1]

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """Return the name of a chunk's KV, the first of those in `Chunk.encodings`."""
        return key_of(self.config, self.compression, chunk)

    # -- changes; the caller holds the writer's lock -----------------------------------------

    def use_codec(self, codec: str, profile: Profile | None) -> None:
        """Write records with another codec from now on."""
        if profile is not None:
            self.profiles.add(profile)
        name = parse_codec(codec).label
        self.save_config({"codec": name, "profile": "" if profile is None else profile.hash})
        self.coding = self._make_coding()

    def use_profile(self, codec: str, profile: Profile) -> None:
        """Write records with a profile of the index's codec, if it has that codec still."""
        self.profiles.add(profile)
        self.save_config({"profile": profile.hash}, codec)
        self.coding = self._make_coding()

    def save_config(self, changes: Mapping[str, Any], codec: str | None = None) -> None:
        """Record some settings; `codec` as in `ChangeLog.save_config`."""
        config = replace(self.config, **changes)
        if self.log is None:
            config.save(self.path)
            self.config = config
            return
        self.log.save_config(changes, codec)
        self.config = config
        self.reload_codec()  # another machine may have changed that

    def reload_codec(self) -> None:
        """Adopt a change of the index's codec, or its filler, by another process or object."""
        config = IndexConfig.load(self.path)
        # Also where the file has none: what a dry run chose is not recorded.
        self.config = replace(self.config, corpus_filler=config.corpus_filler)
        if (config.codec, config.profile) != (self.config.codec, self.config.profile):
            self.config = replace(self.config, codec=config.codec, profile=config.profile)
            self.coding = self._make_coding()

    def use_key_of(self, store: Store, config: IndexConfig) -> None:
        """Write the catalog under a store's key, or none, and record the configuration."""
        if config.key_check == self.config.key_check:
            self.save_config({"store": config.store})
            return
        check_unencrypted(config)
        key = catalog_key(store) if config.key_check else None
        write_copy(self.catalog, next_path(self.catalog.path), key)
        config.save(self.path)
        self.config = config
        self.catalog.use_next(key)
        for name in (VECTORS_NAME, RUNS_NAME):
            (self.path / name).unlink(missing_ok=True)

    # -- private -----------------------------------------------------------------------------

    def _make_coding(self) -> RecordCoding:
        from kvrag.ingest.coding import RecordCoding

        config = self.config
        return RecordCoding(self.profiles, config.codec, config.profile, config.model_fingerprint)

    def _note_damage(self, what: str) -> None:
        """Count a row that was left out, and log it once."""
        self.counters.note_damage()
        if not self._is_damage_told:
            self._is_damage_told = True
            logger.warning(
                "%s (damaged and left out: it is not found until 'kvrag verify --repair' or "
                "'kvrag ingest' mends it)",
                what,
            )


def key_of(config: IndexConfig, compression: Compression | None, chunk: Chunk) -> ChunkKey:
    """Return the name of a chunk's KV in an index with these settings, the first of several."""
    return chunk_key(
        tenant_salt=bytes.fromhex(config.tenant_salt),
        model_fingerprint=config.model_fingerprint,
        tokenizer_fingerprint=config.tokenizer_fingerprint,
        prefix_ids=config.prefix_ids,
        token_ids=chunk.token_ids,
        context_ids=chunk.contexts[0],
        options=key_options(compression, config.anchors),
    )


class ChangeLog(Protocol):
    """The log of a shared index (`kvrag.ingest.shared.log`), as the rest of the index sees it.

    Attributes
    ----------
    url
        The index's URL, with its options.
    """

    url: str

    def owns(self, store: str) -> bool:
        """Return whether the store of records with a URL is this index's alone."""

    def begin(self) -> None:
        """Say that an ingestion begins, which will rely on records that it finds in the store."""

    def in_doubt(self) -> set[ChunkKey]:
        """Return the records of committed chunks that a `gc` meanwhile may have removed.

        The caller takes out those that it has looked for.
        """

    def commit(self, change: Change) -> int:
        """Write a change to the log, and carry it out here; return the single chunks removed."""

    def save_config(self, changes: Mapping[str, Any], codec: str | None = None) -> None:
        """Record some settings, unless another codec than the given one was chosen meanwhile."""

    def refresh(self) -> int:
        """Bring this machine's view up to date; return its version."""

    def rebuild(self) -> None:
        """Replace this machine's view by what the log says."""

    def compact(self, *, is_forced: bool) -> None:
        """Publish a whole catalog, if that is due or forced."""

    def damage(self) -> list[str]:
        """Return what is wrong with the segments that the newest version names."""

    def mend(self) -> None:
        """Publish all that the newest version names again, from this machine's view."""

    def collect_garbage(
        self,
        needed: Callable[[], Collection[str]],
        restore: Callable[[str], None],
        grace_seconds: float,
        *,
        all_records: bool,
    ) -> GcReport:
        """Remove records and segments that no version has needed for `grace_seconds`."""

    def close(self) -> None:
        """Close the stores of the log."""


class Follower:
    """Refreshes an opened index, and its vectors, so that no question waits for that.

    Parameters
    ----------
    storage
        The index's storage.
    seconds
        The time between two refreshes.
    """

    def __init__(self, storage: Storage, seconds: float) -> None:
        self._storage = storage
        self._seconds = seconds
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrag-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a refresh under way is finished."""
        self._is_ended.set()
        self._thread.join()

    def _run(self) -> None:
        version = self._storage.catalog.version()[0]
        has_failed = False
        while not self._is_ended.wait(self._seconds):
            try:
                found = self._storage.refresh()
                if found != version:
                    self._storage.vectors.get()
                version = found
                has_failed = False
            except Exception as error:  # a full disk too: this thread goes on
                if not has_failed:
                    logger.warning("answers stay at version %s of the index: %s", version, error)
                has_failed = True
