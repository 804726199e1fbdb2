"""The log of a shared index, and this machine's view of it: an index folder in the cache.

A writer stores what it changes as a segment and then creates the manifest of the next version.
The first one to create it has the version; the others carry it out in their views and try the next.
A view is always what the log says up to some version, since a change reaches it from the log alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import (
    IndexFormatError,
    IndexMismatchError,
    IndexNotFoundError,
    KVRagError,
    ParameterError,
    StoreError,
)
from kvrag.ingest.catalog import FILE_NAME
from kvrag.ingest.catalogfile import is_lost, next_path, write_copy
from kvrag.ingest.config import (
    RUNS_NAME,
    VECTORS_NAME,
    VIEW_OF_NAME,
    WORDS_NAME,
    IndexConfig,
    write_atomically,
)
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.encryption import key_check, require_key
from kvrag.ingest.opening import Given, make_index, open_index
from kvrag.ingest.profiles import ProfileFolder
from kvrag.ingest.report import GcReport
from kvrag.ingest.schema import Change
from kvrag.ingest.settings import IndexSettings
from kvrag.ingest.shared import manifest as m
from kvrag.ingest.shared import place as p
from kvrag.ingest.shared.place import Place, held, in_use_path, lock_path
from kvrag.ingest.storage import Storage
from kvrag.store.base import Store
from kvrag.store.file import store_errors
from kvrag.store.registry import open_store

logger = logging.getLogger("kvrag")

MOST_DELTAS = 64
"""Changes since the base: with more, a writer publishes a new one."""
_LIST_SECONDS = m.VERSIONS_SECONDS / 2
_MOST_PAUSE_SECONDS = 0.05


class SharedLog:
    """The log of one opened index (`kvrag.ingest.storage.Storage.log`).

    Safe to use from several threads; processes that share a view take turns.

    Parameters
    ----------
    place
        The index's URL.
    log, segments
        Its manifests, and the store of its segments.
    storage
        The opened view.
    """

    def __init__(self, place: Place, log: m.Log, segments: Store, storage: Storage) -> None:
        self.url = place.full_url
        self._place = place
        self._log = log
        self._segments = segments
        self._storage = storage
        self._lock = threading.RLock()
        self._head: m.Manifest | None = None
        self._listed = -_LIST_SECONDS
        self._is_held = False
        self._collecting: str | None = None
        self._in_doubt: set[ChunkKey] = set()
        self.on_close = contextlib.ExitStack()

    def close(self) -> None:
        """Close the store of segments, and let the view go."""
        self._segments.close()
        self.on_close.close()

    def owns(self, store: str) -> bool:
        """Return whether the store of records with a URL is this index's alone."""
        return store == self._place.store_url("kv")

    # -- following ---------------------------------------------------------------------------

    def refresh(self) -> int:
        """Bring the view up to the newest version; return it.

        Raises
        ------
        StoreError
            When the bucket cannot be read; the view stays as it was.
        IndexFormatError
            When a manifest or a segment is damaged; the view stays at the version before.
        IndexMismatchError, IndexNotFoundError
            When the index at the URL is another one by now, or gone.
        """
        with self._holding():
            return self._refresh().version

    def rebuild(self) -> None:
        """Replace the view by what the log says: its catalog is damaged."""
        with self._holding():
            self._build(self._newest(-1))
            self._refresh()

    def _refresh(self, *, is_listed: bool = False) -> m.Manifest:
        """Bring the view up to date; list all versions if the next one alone would not do."""
        catalog = self._storage.catalog
        version = catalog.version()[0]
        head = self._newest(version, is_listed=is_listed)
        if self._head is None or head.config != self._head.config:
            self._adopt(head)
        if not self._leads_to(version, head):
            self._build(head)
            version = catalog.version()[0]
        m.note_applied(self._storage.path, head.names())
        for delta in [one for one in head.deltas if version < one.version]:
            if not self._carry_out(delta):
                self._build(head)  # the view was damaged
                for again in head.behind_base:
                    self._carry_out(again)
                break
        if catalog.version()[0] != head.version:
            raise IndexFormatError(
                f"the log of {self._place} lacks a change between its versions "
                f"{catalog.version()[0]} and {head.version}: run 'kvrag verify --repair' on a "
                "machine that has answered at the newest version"
            )
        self._head = head
        return head

    def _leads_to(self, version: int, head: m.Manifest) -> bool:
        """Return whether the view, which is at `version`, comes before the newest version.

        It does not if manifests were removed, and others written in their place.
        """
        following = [one.version for one in head.deltas if version < one.version]
        if following != list(range(version + 1, head.version + 1)):
            return False
        ours = m.applied(self._storage.path).get(version)
        if ours is None:
            return False  # killed while it was made, or made by a kvrag that did not note this
        if ours == head.names().get(version):
            return True
        if version < head.version:  # a kvrag that does not name its predecessor may have written
            with contextlib.suppress(IndexFormatError):
                kept = self._log.read(version)
                if kept is not None and kept.digest == ours:
                    return True
        logger.warning(
            "the log of %s was put back to an earlier version, or its versions were replaced: this "
            "machine's view is made again",
            self._place,
        )
        return False

    def _newest(self, version: int, *, is_listed: bool = False) -> m.Manifest:
        """Return the newest manifest; `version` is the view's."""
        known = self._head
        is_old = is_listed or time.monotonic() - self._listed >= _LIST_SECONDS
        # Almost always there is nothing new: two small requests say so.
        if (
            known is not None
            and known.version == version
            and not is_old
            and self._log.tag(version) == known.tag
            and self._log.read(version + 1) is None
        ):
            return known
        found = self._log.versions(max(version - 1, -1))
        if not found and version > 0:
            found = self._log.versions()  # the view is ahead of a log that was put back
        self._listed = time.monotonic()
        head = self._log.read(found[-1]) if found else None
        if head is None:
            raise IndexNotFoundError(f"there is no index at {self._place} any more")
        if head.index_id != self._storage.config.index_id:
            raise IndexMismatchError(
                f"another index has taken the place of the one at {self._place}: open it again"
            )
        return head

    def _carry_out(self, delta: m.Delta) -> bool:
        """Do to the view what made a version; return whether the view is at it."""
        catalog = self._storage.catalog
        change = self._change_of(delta)
        try:
            catalog.write(change)
        except IndexFormatError:
            return False
        return catalog.version()[0] == delta.version

    def _change_of(self, delta: m.Delta) -> Change:
        if delta.content is None:
            return Change()
        where = f"the segment of version {delta.version} in {self._segments.url}"
        return m.unpack(m.get_bytes(self._segments, delta.content), where)

    def _adopt(self, head: m.Manifest) -> None:
        """Take over the settings and profiles of a version."""
        storage = self._storage
        folder = storage.profiles.folder
        for file in head.profiles:
            if file.name not in storage.profiles.hashes():
                folder.mkdir(exist_ok=True)
                content = m.get_bytes(self._segments, file)
                write_atomically(folder / f"{file.name}.safetensors", content)
        with contextlib.suppress(IndexFormatError):  # damaged: the view's own are the same
            read_config(self._place, self._segments, head).save(storage.path)
        storage.reload_codec()

    def _build(self, head: m.Manifest) -> None:
        """Replace the view's catalog by the newest whole one, with its caches."""
        storage, catalog = self._storage, self._storage.catalog
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=storage.path) as scratch:
            made = Path(scratch)
            m.build(made, storage.config, head, self._segments, storage.store)
            m.forget_applied(storage.path)
            (made / catalog.path.name).replace(next_path(catalog.path))
            catalog.use_next(catalog.cipher_key)
            for cache in made.iterdir():
                cache.replace(storage.path / cache.name)
        m.note_applied(storage.path, head.names())
        storage.vectors.forget()

    # -- writing -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Say that an ingestion begins, which will rely on records that it finds in the store."""
        self._collecting = self._log.collecting()

    def in_doubt(self) -> set[ChunkKey]:
        """Return the records of committed chunks that a `gc` meanwhile may have removed.

        The caller takes out those that it has looked for.
        """
        return self._in_doubt

    def commit(self, change: Change) -> int:
        """Write a change to the log, and carry it out here; return the single chunks removed.

        Raises
        ------
        StoreError
            When the bucket refuses. If it does not answer, the change may be there or not; the
            next ingestion completes it.
        """
        if change:
            self._commit(m.pack(change))
        collecting = self._log.collecting()
        if collecting != self._collecting or collecting.startswith(m.RUNNING):
            key_of = self._storage.config.key_of
            for *_, rows in change.put:
                self._in_doubt |= {key_of(one) for row in rows for one in row.chunk.required()}
        return len(change.remove_chunks)

    def save_config(self, changes: Mapping[str, Any], codec: str | None = None) -> None:
        """Record some settings, and the profiles of this view that the log does not have.

        Parameters
        ----------
        changes
            The new values; the other settings stay as other writers have recorded them.
        codec
            If given, nothing changes where another writer has chosen another codec.
        """
        stored: list[m.File] = []

        def alter(one: m.Manifest) -> m.Manifest:
            config = self._settings(one)
            if codec in (None, config.codec):
                config = replace(config, **changes)
            file = put_config(self._place, self._segments, config)
            known = () if stored else one.profiles
            new = put_profiles(self._segments, self._storage.profiles, known)
            stored[:] = [file, *new]
            return replace(one, config=file, profiles=_with_profiles(one.profiles, new))

        self._commit(None, alter)
        while not m.is_stored(self._segments, stored):  # this process slept, and gc removed them
            self._commit(None, alter)

    def compact(self, *, is_forced: bool) -> None:
        """Publish a whole catalog with its caches, if that is due or forced.

        The caller holds the writer's lock.
        """
        with self._holding():
            head = self._refresh()
            behind = [one.content for one in head.behind_base if one.content is not None]
            sizes = sum(one.size for one in behind)
            is_due = len(behind) > MOST_DELTAS or (head.base and 8 * sizes > head.base.size)
            if not behind or not (is_forced or is_due):
                return
            former = 0 if head.base is None else head.base.version
            base = self._put_base(head.version)
        self._commit(None, lambda one: _with_base(one, base, former))
        # This process may have slept, and gc removed them.
        if not m.is_stored(self._segments, self._named(base.files)):
            self.mend()

    def mend(self) -> None:
        """Publish all that the newest version names again, from this view."""
        with self._holding():
            while not self._publish_all():
                pass

    def _publish_all(self) -> bool:
        """Do the work of `mend`; return False if `gc` was faster, since this process slept."""
        head = self._refresh()
        file = put_config(self._place, self._segments, self._settings(head))
        new = put_profiles(self._segments, self._storage.profiles)
        base = self._put_base(head.version)

        def alter(one: m.Manifest) -> m.Manifest:
            config = file if one.config == head.config else one.config
            one = replace(one, config=config, profiles=_with_profiles(one.profiles, new))
            if one.base is not None and one.base.version > base.version:
                return one  # another writer's is newer, and has changes that no delta has any more
            deltas = tuple(delta for delta in one.deltas if delta.version > base.version)
            return replace(one, base=base, deltas=deltas)

        self._commit(None, alter)
        return m.is_stored(self._segments, self._named([file, *new, *base.files]))

    def _commit(
        self, packed: bytes | None, alter: Callable[[m.Manifest], m.Manifest] = lambda one: one
    ) -> None:
        """Create the next version; another writer may be faster, any number of times."""
        content = None if packed is None else m.put_bytes(self._segments, m.CHANGE, packed)
        while True:
            with self._holding():
                # Nobody may write to another index that has taken this one's place.
                ours = alter(self._refresh(is_listed=True).follow(content))
                # A request that was repeated is refused, although the first one wrote.
                written = self._log.create(ours) or self._log.read(ours.version)
                if written is not None and written == ours:
                    if content is not None and packed is not None:
                        # Again: `gc` takes what nothing names yet.
                        self._segments.put(ChunkKey(content.parts[0].key), packed)
                    if self._is_in_log(written):
                        return
            time.sleep(random.uniform(0, _MOST_PAUSE_SECONDS))

    def _is_in_log(self, written: m.Manifest) -> bool:
        """Return whether the newest version comes after a manifest that was written just now.

        It does not if this process slept so long that `gc` has removed the manifest that another
        writer gave the same number.

        Raises
        ------
        StoreError
            When that cannot be known any more.
        """
        head = self._refresh(is_listed=True)
        if written.version in head.names():
            return head.has(written)
        following = self._log.read(written.version + 1)  # the newest no longer says it
        if following is not None:
            return following.has(written)
        if self._log.tag(written.version) is None:  # gc removed both, the older one first
            raise StoreError(
                f"this process stood still for so long that {self._place} no longer says whether "
                f"version {written.version} is its own: look at what the index holds, and ingest "
                "or delete again if it is not what you meant"
            )
        return False

    def _named(self, files: Sequence[m.File]) -> list[m.File]:
        """Return those of some files that the newest version seen names."""
        named = set() if self._head is None else set(self._head.files())
        return [one for one in files if one in named]

    def _settings(self, one: m.Manifest) -> IndexConfig:
        """Return a version's settings, or this view's copy of them if they are damaged."""
        try:
            return read_config(self._place, self._segments, one)
        except IndexFormatError:
            return IndexConfig.load(self._storage.path)

    def _put_base(self, version: int) -> m.Base:
        """Store the view's catalog and its caches, which are brought up to date first."""
        storage, catalog = self._storage, self._storage.catalog
        catalog.words.search("kvrag", 1)  # makes the index of words
        storage.vectors.get()
        storage.refresh_vectors()
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=storage.path) as scratch:
            copy = Path(scratch)
            write_copy(catalog, copy / catalog.path.name, catalog.cipher_key)
            for name in (VECTORS_NAME, WORDS_NAME, RUNS_NAME):
                with contextlib.suppress(FileNotFoundError):
                    os.link(storage.path / name, copy / name)  # it may be replaced meanwhile
            return m.Base(
                version, tuple(m.put_file(self._segments, one) for one in sorted(copy.iterdir()))
            )

    # -- upkeep ------------------------------------------------------------------------------

    def damage(self) -> list[str]:
        """Return what is wrong with the segments that the newest version names."""
        return m.damage_of(self._segments, self._newest(-1).files())

    def collect_garbage(
        self,
        needed: Callable[[], Collection[str]],
        restore: Callable[[str], None],
        grace_seconds: float,
        *,
        all_records: bool,
    ) -> GcReport:
        """Remove what no version has needed for `grace_seconds` (`kvrag.ingest.shared.manifest`).

        The caller holds the writer's lock.

        Parameters
        ----------
        needed
            Returns the digests of the records that the view needs.
        restore
            Computes the record of a digest again.
        all_records
            Whether records may be removed at all: other indexes may share their store.
        """
        records = self._storage.store if all_records else None
        removed: set[str] = set()
        self._log.note_collecting(m.RUNNING)
        try:
            return self._remove_garbage(records, needed, grace_seconds, removed)
        finally:
            try:
                self._log.note_collecting("over")
            finally:
                if removed:
                    self._put_back(removed, needed, restore)

    def _remove_garbage(
        self,
        records: Store | None,
        needed: Callable[[], Collection[str]],
        grace_seconds: float,
        removed: set[str],
    ) -> GcReport:
        """Remove old garbage, which `removed` receives by name, and list the rest."""
        log, segments = self._log, self._segments
        # Listed before the log is read: what is written and committed meanwhile is no garbage.
        sizes = {f"segment {key}": size for key, size in segments.sizes()}
        if records is not None:
            sizes |= {f"record {key}": size for key, size in records.sizes()}
        head = self._current()
        used = {f"segment {part.key}" for file in head.files() for part in file.parts}
        if records is not None:
            used |= {f"record {digest}" for digest in needed()}
        sizes = {name: size for name, size in sizes.items() if name not in used}
        sizes |= {f"version {one}": 0 for one in log.versions() if one < head.version}
        listed, now = log.garbage(), time.time()
        since = {name: min(listed.get(name, now), now) for name in sizes}
        if again := [name for name in sizes if name in listed and name.startswith("record ")]:
            # What was needed again since then has been garbage for less time than the list says.
            put = self._put_since(int(listed[m.NEWEST]), head) if m.NEWEST in listed else None
            since |= {one: now for one in again if put is None or one.split()[1] in put}
        graces = {"version": max(grace_seconds, m.VERSIONS_SECONDS)}
        gone: list[str] = []
        for name, first in list(since.items()):
            kind, what = name.split()
            if now - first < graces.get(kind, grace_seconds):
                continue
            if kind == "version":
                log.delete(int(what))
                gone.append(name)
            else:
                removed.add(name)
                store = segments if records is None or kind == "segment" else records
                if store.delete(ChunkKey(what)):
                    gone.append(name)
            del since[name]
        log.list_garbage({**since, m.NEWEST: head.version})
        num_records = sum(name.startswith("record ") for name in gone)
        size_bytes = sum(sizes[name] for name in gone if name.startswith("record "))
        return GcReport(num_records, size_bytes, len(gone) - num_records)

    def _put_back(
        self,
        removed: set[str],
        needed: Callable[[], Collection[str]],
        restore: Callable[[str], None],
    ) -> None:
        """Store again what a commit needs that came while garbage was removed."""
        parts = (part for file in self._current().files() for part in file.parts)
        if not removed.isdisjoint(f"segment {part.key}" for part in parts):
            self.mend()
        digests = {one.removeprefix("record ") for one in removed if one.startswith("record ")}
        lost: list[KVRagError] = []
        for digest in sorted(digests.intersection(needed()) if digests else ()):
            if self._storage.home.contains(ChunkKey(digest)):
                continue  # the writer was faster
            try:
                restore(digest)
            except KVRagError as error:
                lost.append(error)
        if lost:
            raise StoreError(
                f"{len(lost)} removed records are needed again by what was ingested meanwhile, and "
                f"cannot be computed here ({lost[0]}): run 'kvrag verify --repair --index "
                f"{self._place}' on a machine that can"
            ) from lost[0]

    def _current(self) -> m.Manifest:
        with self._holding():
            return self._refresh(is_listed=True)

    def _put_since(self, version: int, head: m.Manifest) -> set[str] | None:
        """Return the digests of the records that the versions after one put; None if unknown."""
        deltas = {one.version: one for one in head.deltas}
        found: set[str] = set()
        try:
            for number in range(version + 1, head.version + 1):
                if number not in deltas:  # a whole catalog took its place; the manifest is kept
                    manifest = self._log.read(number)
                    if manifest is None:
                        return None
                    deltas |= {one.version: one for one in manifest.deltas}
                if deltas[number].content is not None:
                    change = self._change_of(deltas[number])
                    found.update(
                        key.digest for *_, rows in change.put for row in rows for key in row.keys
                    )
        except (IndexFormatError, KeyError):
            return None
        return found if version <= head.version else None

    # -- private -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Keep the other threads and processes of this machine from changing the view."""
        with self._lock:
            if self._is_held:
                yield
                return
            with held(lock_path(self._storage.path)):
                self._is_held = True
                try:
                    yield
                finally:
                    self._is_held = False


def _with_base(manifest: m.Manifest, base: m.Base, former: int) -> m.Manifest:
    """Return a manifest with a base, and the deltas since the former one for those who follow."""
    if manifest.base is not None and manifest.base.version >= base.version:
        return manifest  # another writer's
    deltas = tuple(one for one in manifest.deltas if one.version > former)
    return replace(manifest, base=base, deltas=deltas)


def _with_profiles(known: Sequence[m.File], new: Sequence[m.File]) -> tuple[m.File, ...]:
    """Return profiles with others, which replace those of the same name."""
    return tuple({one.name: one for one in (*known, *new)}.values())


def put_profiles(
    segments: Store, profiles: ProfileFolder, known: Sequence[m.File] = ()
) -> list[m.File]:
    """Store the profiles of a view that are not known; return them. A file's name is its hash."""
    names = {one.name for one in known}
    return [
        replace(m.put_file(segments, profiles.folder / f"{one}.safetensors"), name=one)
        for one in profiles.hashes()
        if one not in names
    ]


def put_config(place: Place, segments: Store, config: IndexConfig) -> m.File:
    """Store an index's settings; a store beside the log has no URL in them."""
    if config.store == place.store_url("kv"):
        config = replace(config, store="")
    return m.put_bytes(segments, m.CONFIG, config.to_bytes())


def read_config(place: Place, segments: Store, head: m.Manifest) -> IndexConfig:
    """Return an index's settings. Raises IndexFormatError."""
    path = Path(f"{place}/index.json")
    config = IndexConfig.from_bytes(m.get_bytes(segments, head.config), path)
    return replace(config, store=config.store or place.store_url("kv"))


# -- creating and opening ------------------------------------------------------------------------


def make_shared(url: str, given: Any, settings: IndexSettings) -> tuple[Storage, Encoders]:
    """Create an empty index at a URL. Parameters and errors are those of `Index.create`."""
    place = p.read_place(url)
    with _connected(place) as (log, segments), contextlib.ExitStack() as using:
        if settings.store is None:
            settings = replace(settings, store=place.store_url("kv"))
        with held(lock_path(place.view)):
            if log.versions():
                raise _taken(place)
            _clear(place)
            using.enter_context(held(in_use_path(place.view), shared=True))
            storage, encoders = make_index(place.view, given, settings)
            with _closing_on_error(storage):
                _make_folder(place)
                written = log.create(_first(place, segments, storage))
                if written is None:
                    raise _taken(place)
                m.note_applied(place.view, written.names())
                _attach(place, log, segments, storage, using)
        return storage, encoders


def _first(place: Place, segments: Store, storage: Storage) -> m.Manifest:
    """Return the manifest of a new index. Raises ParameterError if its stores have two keys."""
    config = storage.config
    if config.key_check != key_check(segments):
        raise ParameterError(
            f"{place} and its store of KV need the same key, or none: give ?key_file=PATH "
            "in both URLs"
        )
    return m.Manifest(
        version=0,
        time=time.time(),
        index_id=config.index_id,
        key_check=config.key_check,
        config=put_config(place, segments, config),
        profiles=tuple(put_profiles(segments, storage.profiles)),
    )


def open_shared(url: str, given: Given) -> tuple[Storage, Encoders]:
    """Open the index at a URL. Parameters and errors are those of `Index.open`."""
    place = p.read_place(url)
    with _connected(place) as (log, segments), contextlib.ExitStack() as using:
        versions = log.versions()
        head = log.read(versions[-1]) if versions else None
        if head is None:
            raise IndexNotFoundError(
                f"there is no index at {place}; make one with 'kvrag ingest PATH... --index "
                f"{place} --model MODEL' or Index.create"
            )
        _check_key(place, head, segments)
        p.make_room(place.view)
        with held(lock_path(place.view)):
            config = _config(place, segments, head)
            p.remove_scratch(place.view)
            using.enter_context(held(in_use_path(place.view), shared=True))
            _make_folder(place)  # the view may have made room meanwhile
            config.save(place.view)
            if is_lost(place.view / FILE_NAME):
                _make_view(place, config, head, segments)
        try:
            storage, encoders = open_index(place.view, given, mend=False, is_view=True)
        except IndexFormatError as error:
            logger.warning("the view of %s is made again: %s", place, error)
            with held(lock_path(place.view)):
                _make_view(place, config, head, segments)
            storage, encoders = open_index(place.view, given, mend=False, is_view=True)
        with _closing_on_error(storage):
            _attach(place, log, segments, storage, using).refresh()
            encoders.check_writer()
        return storage, encoders


@contextlib.contextmanager
def _connected(place: Place) -> Iterator[tuple[m.Log, Store]]:
    """Open the log and the store of segments; close the store if the block fails."""
    log = m.Log(place.bucket("log"))
    log.check()
    segments = open_store(place.store_url("segments"))
    with _closing_on_error(segments):
        yield log, segments


@contextlib.contextmanager
def _closing_on_error(opened: Store | Storage) -> Iterator[None]:
    try:
        yield
    except BaseException:
        opened.close()
        raise


def _attach(
    place: Place, log: m.Log, segments: Store, storage: Storage, using: contextlib.ExitStack
) -> SharedLog:
    """Return the log of an opened view; it takes over what says that the view is in use."""
    shared = SharedLog(place, log, segments, storage)
    shared.on_close = using.pop_all()
    storage.log = shared
    return shared


def _clear(place: Place) -> None:
    """Remove the view of an index that was at a place. Raises IndexMismatchError if it is used."""
    if not p.remove_view(place.view):
        raise IndexMismatchError(
            f"a process of this machine has the index that was at {place} before open: end it, or "
            "set KVRAG_VIEWS to another folder for this process"
        )


def _config(place: Place, segments: Store, head: m.Manifest) -> IndexConfig:
    """Return a version's settings; another index's view goes."""
    known: IndexConfig | None = None
    with contextlib.suppress(KVRagError):
        known = IndexConfig.load(place.view)
    if known is not None and known.index_id != head.index_id:
        known = None
    try:
        config = read_config(place, segments, head)
    except IndexFormatError:
        if known is None:
            raise
        config = known  # 'kvrag verify --repair' publishes it again
    if known is None:
        _clear(place)
    return config


def _make_folder(place: Place) -> None:
    """Make the folder of a view, if there is none, and say that it is one."""
    with store_errors("make the folder", place.view):
        place.view.mkdir(parents=True, exist_ok=True)
    write_atomically(place.view / VIEW_OF_NAME, f"{place}\n".encode())


def _make_view(place: Place, config: IndexConfig, head: m.Manifest, segments: Store) -> None:
    """Write the catalog of a view that has none, or a damaged one."""
    with (
        tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=place.view) as scratch,
        contextlib.closing(open_store(config.store, must_answer=False)) as store,
    ):
        made = Path(scratch)
        m.build(made, config, head, segments, store)
        m.forget_applied(place.view)
        for path in place.view.glob(f"{FILE_NAME}*"):
            path.unlink()
        for path in sorted(made.iterdir(), reverse=True):  # the catalog last: it makes the view
            path.replace(place.view / path.name)
        m.note_applied(place.view, head.names())


def _check_key(place: Place, head: m.Manifest, segments: Store) -> None:
    """Raise IndexMismatchError unless a URL has the index's key, or neither has one."""
    found = key_check(segments)
    if found and not head.key_check:
        raise IndexMismatchError(
            f"the index at {place} is not encrypted: leave ?key_file= out of its URL"
        )
    require_key(f"the index at {place}", head.key_check, found, "add ?key_file=PATH to its URL")


def _taken(place: Place) -> ParameterError:
    return ParameterError(
        f"there is an index at {place} already: open it with Index.open, or use another URL"
    )
