"""Creating a shared index, and opening it: this machine's view is made or brought up to date."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrag.errors import (
    IndexFormatError,
    IndexMismatchError,
    IndexNotFoundError,
    KVRagError,
    ParameterError,
)
from kvrag.ingest.catalog import FILE_NAME
from kvrag.ingest.catalogfile import is_lost
from kvrag.ingest.config import VIEW_OF_NAME, IndexConfig, write_atomically
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.encryption import key_check
from kvrag.ingest.opening import Given, make_index, open_index
from kvrag.ingest.settings import IndexSettings
from kvrag.ingest.shared import place as p
from kvrag.ingest.shared.log import SharedLog, put_config, put_profiles, read_config
from kvrag.ingest.shared.manifest import Log, Manifest, build, forget_applied, note_applied
from kvrag.ingest.shared.place import lock_path
from kvrag.ingest.storage import Storage
from kvrag.store.base import Store
from kvrag.store.file import store_error
from kvrag.store.registry import open_store

logger = logging.getLogger("kvrag")


def make_shared(url: str, given: Any, settings: IndexSettings) -> tuple[Storage, Encoders]:
    """Create an empty index at a URL. Parameters and errors are those of `Index.create`."""
    place = p.read_place(url)
    with _connected(place) as (log, segments), contextlib.ExitStack() as using:
        if settings.store is None:
            settings = replace(settings, store=place.store_url("kv"))
        with p.held(lock_path(place.view)):
            if log.versions():
                raise _taken(place)
            _clear(place)
            using.enter_context(p.held(p.in_use_path(place.view), shared=True))
            storage, encoders = make_index(place.view, given, settings)
            with _closing_on_error(storage):
                _make_folder(place)
                written = log.create(_first(place, segments, storage))
                if written is None:
                    raise _taken(place)
                note_applied(place.view, written.names())
                _attach(place, log, segments, storage, using)
        return storage, encoders


def _first(place: p.Place, segments: Store, storage: Storage) -> Manifest:
    """Return the manifest of a new index. Raises ParameterError if its stores have two keys."""
    config = storage.config
    if config.key_check != key_check(segments):
        raise ParameterError(
            f"{place} and its store of KV need the same key, or none: give ?key_file=PATH "
            "in both URLs"
        )
    return Manifest(
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
        with p.held(lock_path(place.view)):
            config = _config(place, segments, head)
            p.remove_scratch(place.view)
            using.enter_context(p.held(p.in_use_path(place.view), shared=True))
            _make_folder(place)  # the view may have made room meanwhile
            config.save(place.view)
            if is_lost(place.view / FILE_NAME):
                _make_view(place, config, head, segments)
        try:
            storage, encoders = open_index(place.view, given, mend=False, is_view=True)
        except IndexFormatError as error:
            logger.warning("the view of %s is made again: %s", place, error)
            with p.held(lock_path(place.view)):
                _make_view(place, config, head, segments)
            storage, encoders = open_index(place.view, given, mend=False, is_view=True)
        with _closing_on_error(storage):
            _attach(place, log, segments, storage, using).refresh()
        return storage, encoders


@contextmanager
def _connected(place: p.Place) -> Iterator[tuple[Log, Store]]:
    """Open the log and the store of segments; close the store if the block fails."""
    log = Log(place.bucket("log"))
    log.check()
    segments = open_store(place.store_url("segments"))
    with _closing_on_error(segments):
        yield log, segments


@contextmanager
def _closing_on_error(opened: Store | Storage) -> Iterator[None]:
    try:
        yield
    except BaseException:
        opened.close()
        raise


def _attach(
    place: p.Place, log: Log, segments: Store, storage: Storage, using: contextlib.ExitStack
) -> SharedLog:
    """Return the log of an opened view; it takes over what says that the view is in use."""
    shared = SharedLog(place, log, segments, storage)
    shared.on_close = using.pop_all()
    storage.log = shared
    return shared


def _clear(place: p.Place) -> None:
    """Remove the view of an index that was at a place. Raises IndexMismatchError if it is used."""
    if not p.remove_view(place.view):
        raise IndexMismatchError(
            f"a process of this machine has the index that was at {place} before open: end it, or "
            "set KVRAG_VIEWS to another folder for this process"
        )


def _config(place: p.Place, segments: Store, head: Manifest) -> IndexConfig:
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


def _make_folder(place: p.Place) -> None:
    """Make the folder of a view, if there is none, and say that it is one."""
    try:
        place.view.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store_error("make the folder", place.view, error) from error
    write_atomically(place.view / VIEW_OF_NAME, f"{place}\n".encode())


def _make_view(place: p.Place, config: IndexConfig, head: Manifest, segments: Store) -> None:
    """Write the catalog of a view that has none, or a damaged one."""
    with (
        tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=place.view) as scratch,
        contextlib.closing(open_store(config.store, must_answer=False)) as store,
    ):
        made = Path(scratch)
        build(made, config, head, segments, store)
        forget_applied(place.view)
        for path in place.view.glob(f"{FILE_NAME}*"):
            path.unlink()
        for path in sorted(made.iterdir(), reverse=True):  # the catalog last: it makes the view
            path.replace(place.view / path.name)
        note_applied(place.view, head.names())


def _check_key(place: p.Place, head: Manifest, segments: Store) -> None:
    """Raise IndexMismatchError unless a URL has the index's key, or neither has one."""
    found = key_check(segments)
    if found == head.key_check:
        return
    if not head.key_check:
        raise IndexMismatchError(
            f"the index at {place} is not encrypted: leave ?key_file= out of its URL"
        )
    if not found:
        raise IndexMismatchError(
            f"the index at {place} is encrypted, and no key was given: add ?key_file=PATH to its "
            "URL"
        )
    raise IndexMismatchError(
        f"wrong key: the index at {place} was encrypted with another key; give the key file that "
        "it was made with. Nothing is damaged"
    )


def _taken(place: p.Place) -> ParameterError:
    return ParameterError(
        f"there is an index at {place} already: open it with Index.open, or use another URL"
    )
