"""The storage of an index: configuration, catalog, records, and the coding of the records.

Reading, writing and upkeep share one `Storage`, so that each immediately sees the others' changes:
another codec, another store, a closed catalog.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.errors import IndexClosedError
from kvrag.ingest import cachefile, profiles
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.counting import IndexCounters
from kvrag.ingest.profiles import ProfileFolder
from kvrag.ingest.schema import Change
from kvrag.process import OfProcess
from kvrag.store.base import Store, tiers_of

if TYPE_CHECKING:
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
    counters
        The counters of this process's use of the index.
    lost
        Why an empty catalog replaces the index's own; "" if it does not.
    log
        The log of a shared index (`kvrag.ingest.shared.log.SharedLog`), whose view the folder is;
        None for other indexes.
    """

    _kind = "Index"

    def __init__(
        self, path: Path, config: IndexConfig, catalog: Catalog, store: Store, lost: str = ""
    ) -> None:
        self.path = path
        self.config = config
        self.store = store
        self.counters = IndexCounters(path, lambda: self.store.counts())
        self.lost = lost
        self.log: Any = None
        self._catalog = catalog
        self._is_closed = False
        self._is_damage_told = False
        catalog.on_damage = self._note_damage
        catalog.config = config

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
        write = self.catalog.write if self.log is None else self.log.commit
        num_removed: int = write(change)
        return num_removed

    def refresh(self) -> int:
        """Bring the view of a shared index up to date; return the catalog's generation."""
        self.require_open()
        found: int = self.catalog.version()[0] if self.log is None else self.log.refresh()
        return found

    def refresh_vectors(self) -> None:
        """Bring a graph of the vectors up to date, or make it if there are many of them now.

        The caller holds the writer's lock.
        """
        catalog = self.catalog
        if catalog.cipher_key is not None:
            return
        cached = cachefile.vector_stats(self.path)
        num_vectors = catalog.stored.num_vectors
        if cached.is_graph or num_vectors(self.config.embedding_dim) > cachefile.GRAPH_FROM:
            self.vectors.refresh(cached.of)

    @cached_property
    def vectors(self) -> CurrentVectors:
        """The vectors of the chunks; not needed for listing."""
        from kvrag.ingest.vectors import CurrentVectors

        return CurrentVectors(self.catalog, self.config.embedding_dim)

    @cached_property
    def profiles(self) -> ProfileFolder:
        """The codec profiles in the index folder."""
        return ProfileFolder(self.path / profiles.FOLDER_NAME)

    @cached_property
    def coding(self) -> RecordCoding:
        """The codec and profiles; not needed for counting and listing."""
        from kvrag.ingest.coding import RecordCoding

        config = self.config
        return RecordCoding(self.profiles, config.codec, config.profile, config.model_fingerprint)

    @property
    def home(self) -> Store:
        """The store that new records go to: of a shared index's tiers, the one that all share.

        A faster tier may still have what `gc` of another machine removed, and pass it on only after
        the catalog that names it.
        """
        return self.store if self.log is None else tiers_of(self.store)[-1]

    # -- changes; the caller holds the writer's lock -----------------------------------------

    def save_config(self, changes: Mapping[str, Any], codec: str | None = None) -> None:
        """Record some settings, and use them from now on; `codec` as in `SharedLog.save_config`."""
        config = replace(self.config, **changes)
        if self.log is None:
            config.save(self.path)
        else:
            self.log.save_config(changes, codec)
        self._use(config)
        if self.log is not None:
            self.reload_codec()  # another machine may have changed that

    def reload_codec(self) -> None:
        """Adopt a change of the index's codec by another process or object."""
        config = IndexConfig.load(self.path)
        self._use(replace(self.config, codec=config.codec, profile=config.profile))

    # -- private -----------------------------------------------------------------------------

    def _use(self, config: IndexConfig) -> None:
        is_same = (config.codec, config.profile) == (self.config.codec, self.config.profile)
        self.config = config
        if not is_same:
            self.__dict__.pop("coding", None)

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
