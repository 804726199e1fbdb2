"""Checks, repairs and cleanup of an index, changes of its codec or store, and its calibration."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey, is_key
from kvrag.errors import IndexFormatError, IndexMismatchError, ParameterError, StoreError
from kvrag.ingest import maintenance as m
from kvrag.ingest.catalogfile import next_path, write_copy
from kvrag.ingest.config import (
    KV_FOLDER,
    RUNS_NAME,
    VECTORS_NAME,
    IndexConfig,
    write_atomically,
    writer_lock,
)
from kvrag.ingest.encoders import Encoders, check_lasting, check_limit
from kvrag.ingest.encryption import catalog_key, key_check
from kvrag.ingest.fitter import CodecFitter
from kvrag.ingest.report import GcReport, RecodeReport, VerifyReport
from kvrag.ingest.storage import Storage
from kvrag.ingest.writer import Writer
from kvrag.regularfile import read_regular
from kvrag.store.base import Store
from kvrag.store.file import store_errors
from kvrag.store.registry import open_store, without_password

if TYPE_CHECKING:
    from kvrag.codec.base import Codec
    from kvrag.codec.profile import Profile
    from kvrag.fusion.controller import Calibration

CALIBRATION_NAME = "calibration.json"


def read_calibration(storage: Storage) -> Calibration | None:
    """Return the stored measurements (`Index.calibration`)."""
    storage.require_open()
    path = storage.path / CALIBRATION_NAME
    try:
        text = read_regular(path).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    from kvrag.fusion.controller import Calibration

    found = Calibration.from_json(text, str(path))
    if found.model_fingerprint != storage.config.model_fingerprint:
        raise IndexMismatchError(
            f"{path}: measured with another model than the index's; run 'kvrag calibrate' again"
        )
    if found.loading is not None and found.loading.store != without_password(storage.store.url):
        # A calibration of another store says nothing about this one.
        found = replace(found, loading=None)
    return found


def calibration_problem(storage: Storage, *, repair: bool) -> str:
    """Return what is wrong with the stored measurements, or "".

    Parameters
    ----------
    repair
        Set a damaged file aside: only ``kvrag calibrate`` can measure again.
    """
    try:
        read_calibration(storage)
    except (IndexFormatError, IndexMismatchError, StoreError) as error:
        path = storage.path / CALIBRATION_NAME
        if repair:
            with store_errors("set aside", path):
                path.replace(path.with_name(f"{CALIBRATION_NAME}.damaged"))
        return str(error)
    return ""


def check_can_keep(folder: Path) -> None:
    """Raise StoreError if an index folder takes no measurements, before they take minutes."""
    path = folder / CALIBRATION_NAME
    with store_errors("write", path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass


GRACE_SECONDS = 86_400.0
"""How long a shared index keeps what its newest version does not need."""


class Upkeep:
    """Looks after the stored content of one index; see `Index.upkeep`.

    Parameters
    ----------
    storage, encoders, fitter, writer
        The storage, encoders, fitter and writer of the index.

    Attributes
    ----------
    guests
        What else of this process keeps records in the store.
    """

    def __init__(
        self, storage: Storage, encoders: Encoders, fitter: CodecFitter, writer: Writer
    ) -> None:
        self._storage = storage
        self._encoders = encoders
        self._fitter = fitter
        self._writer = writer
        self.guests: weakref.WeakSet[m.Guest] = weakref.WeakSet()

    def verify(
        self, *, repair: bool = False, on_progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read every layer of every record, compare checksums, and check the catalog's rows.

        Parameters
        ----------
        repair
            Compute missing and damaged records again, and repair the catalog: damaged documents are
            read again from their files. Loads the model and takes the lock.
        on_progress
            Called with the number of records read so far, and the number to read.
        """
        arguments.flag(repair, "repair")
        with writer_lock(self._storage.path) if repair else contextlib.nullcontext():
            return self._verify(repair, on_progress)

    def fit_profile(
        self,
        codec: str = "transform",
        *,
        num_tokens: int | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Profile:
        """Fit a codec to the index's model and documents, and store its profile in the index.

        Parameters
        ----------
        codec
            ``packed``, ``transform``, ``transform:BITS``, ``cachegen`` or ``lossless``.
        num_tokens
            Tokens in the sample, which is spread evenly over the index; None for as many as suit
            the codec.
        on_progress
            Receives a line of text for each step.

        Raises
        ------
        ParameterError
            When the codec needs no profile, or the index holds fewer than 256 tokens.
        """
        if num_tokens is not None:
            num_tokens = arguments.whole(num_tokens, "num_tokens", 1)
        storage, fitter = self._storage, self._fitter
        with writer_lock(storage.path):
            storage.reload_codec()
            profile = fitter.fit(codec, fitter.needed(), on_progress, num_tokens)
            storage.profiles.add(profile)
            if storage.log is not None:
                storage.save_config({})
            return profile

    def recode(
        self,
        codec: str,
        *,
        profile: Profile | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_profile: Callable[[str], None] = lambda _: None,
    ) -> RecodeReport:
        """Rewrite all records with another codec; a second run completes one that was killed.

        Questions can be answered meanwhile: every record names the codec that reads it.

        Parameters
        ----------
        codec
            ``raw``, ``lossless``, ``cachegen:LEVEL`` or ``transform:BITS``.
        profile
            The profile fitted for codec and model. None uses the index's profile if it belongs to
            this codec, and otherwise fits one to a sample of the index.
        on_progress
            Called with the number of finished records, and the number of all.
        on_profile
            Receives a line of text for each step of fitting.

        Raises
        ------
        ParameterError
            When there is no such codec, or the profile belongs to another model.
        IndexLockedError
            When another process is writing to the index.
        """
        from kvrag.codec.config import choose_codec
        from kvrag.ingest.coding import check_profile

        choice = choose_codec(codec)
        storage, fitter = self._storage, self._fitter
        with writer_lock(storage.path):
            storage.reload_codec()
            if profile is not None and choice.config is None:
                raise ParameterError(
                    f"codec {arguments.shown(codec)} takes no profile: leave it out"
                )
            needed = fitter.needed()
            if profile is None and choice.config is not None:
                profile = fitter.present_profile(choice, sum(needed.values())) or fitter.fit(
                    codec, needed, on_profile
                )
            if profile is not None:
                config = storage.config
                check_profile(profile, codec, config.spec, config.model_fingerprint)
            if not storage.config.store:
                m.check_room(storage, needed, choice.label)
            profile_hash = ""
            if profile is not None:
                storage.profiles.add(profile)
                profile_hash = profile.hash
            storage.save_config({"codec": choice.label, "profile": profile_hash})
            return m.recode_records(storage, needed, fitter.compute, on_progress)

    def codec_for(self, chunks: list[Chunk]) -> Codec:
        """Return the codec for records of chunks; fits its profile to them if necessary.

        The caller holds the writer's lock.
        """
        self._storage.reload_codec()
        return self._fitter.codec_for(chunks, lambda _: None)

    def move(
        self, store: str, *, on_progress: Callable[[int, int], None] | None = None
    ) -> m.MoveReport:
        """Move the index's KV to another store: copy sound records there and use it from now on.

        Records in the index's own folder are then removed. Records elsewhere stay, since others may
        need them. Questions can be answered meanwhile. A process that has the index open uses the
        old store until it opens the index again. A second call completes one that was killed.

        Parameters
        ----------
        store
            The store's URL; it is recorded without its password.
        on_progress
            Called with the number of finished records, and the number of all.

        Raises
        ------
        ParameterError
            When the URL is wrong, or the store cannot hold a single chunk, or is in memory.
        StoreError
            When a store refuses access; the index then stays where it is.
        IndexLockedError
            When another process is writing to the index.
        """
        storage = self._storage
        if storage.log is not None:
            raise ParameterError(
                f"the index at {storage.log.url.partition('?')[0]} is shared: its machines read "
                "its KV where it was created; ingest the documents into an index at another URL"
            )
        with writer_lock(storage.path):
            storage.reload_codec()
            target = open_store(store)
            check_limit(target, storage.config)
            try:
                check_lasting(target)
                needed = {ChunkKey(one) for one in self._needed_keys()}
                optional = m.audit_rows(storage.catalog).optional
                report = m.copy_records(needed, storage.store, target, on_progress, optional)
                url = "" if target.url == f"file:{storage.path / KV_FOLDER}" else target.url
                config = replace(storage.config, store=url, key_check=key_check(target))
                _use_key_of(target, storage, config)
            except BaseException:
                target.close()
                raise
            with contextlib.ExitStack() as stack:
                for guest in list(self.guests):
                    stack.enter_context(guest.leaving())
                source, storage.store = storage.store, target
            source.close()
            num_removed, _ = m.clear_left(storage, {key.digest for key in needed})
            return replace(report, store=without_password(report.store), num_removed=num_removed)

    def gc(self, *, delete_shared: bool = False, grace_seconds: float = GRACE_SECONDS) -> GcReport:
        """Remove records that no chunk needs, codec profiles that no record needs, and files of
        killed processes; make a missing graph of the vectors, or one with many removed vectors.

        Parameters
        ----------
        delete_shared
            Also remove every record that this index does not need from a store outside the index
            folder. By default such records stay: other indexes may need them.
        grace_seconds
            A shared index's records, segments and versions stay for so long after a `gc` first
            found that the newest version does not need them: machines may lag by that time.
        """
        arguments.flag(delete_shared, "delete_shared")
        grace_seconds = arguments.number(grace_seconds, "grace_seconds", least=0)
        storage = self._storage
        with writer_lock(storage.path):
            storage.refresh()
            storage.reload_codec()
            if storage.log is not None:
                storage.log.compact(is_forced=True)
                all_records = delete_shared or storage.log.owns(storage.config.store)
                of_log: GcReport = storage.log.collect_garbage(
                    self._needed_keys, self._restore, grace_seconds, all_records=all_records
                )
                return of_log
            needed = self._needed_keys()
            keeps_unknown = bool(storage.config.store) and not delete_shared
            report = m.collect_garbage(storage, needed, keeps_unknown=keeps_unknown)
            storage.refresh_vectors()
            return report

    def keep_calibration(self, calibration: Calibration) -> None:
        """Store a calibration in place of the old one.

        Raises
        ------
        IndexMismatchError
            When it was measured with another model.
        StoreError
            When the folder refuses the write.
        """
        storage = self._storage
        if calibration.model_fingerprint != storage.config.model_fingerprint:
            raise IndexMismatchError(
                f"{storage.path}: the calibration was measured with another model than the index's"
            )
        write_atomically(storage.path / CALIBRATION_NAME, calibration.to_json().encode())

    # -- private -----------------------------------------------------------------------------

    def _verify(self, repair: bool, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
        storage = self._storage
        storage.refresh()
        storage.reload_codec()
        log, words = storage.log, storage.catalog.words
        audit = m.audit_catalog(storage)
        found = audit.problems
        of_store = [] if log is None else log.damage()
        lost: list[str] = []
        if repair:
            self._fitter.replace_lost_profile()
            if found:
                losses = m.losses(storage, audit)
                failed = self._writer.read_again(m.mend_catalog(storage, self._encoders)).failed
                lost += losses(0)
                lost += [f"{one.source}: {one.reason}" for one in failed]
                audit = m.audit_catalog(storage)
            if log is not None and of_store and not audit.problems:
                log.mend()
        report = m.verify_records(
            storage, audit, self._fitter.repair if repair else None, on_progress
        )
        if not found and (damage := words.damage()):
            found = [damage]
            if repair:
                words.discard()  # the next search makes it again
        if storage.lost:
            found = [storage.lost, *found]
            lost.insert(0, "all documents are lost; ingest all of them again")
        told = m.first_of(found)
        if problem := calibration_problem(storage, repair=repair):
            told = (*told, problem)
            if repair:
                lost.append(
                    "the measurements for 'auto' are set aside; run 'kvrag calibrate' again"
                )
        return replace(
            report,
            catalog_problems=told,
            not_healed=tuple(lost),
            is_healed=repair and bool(told) and not audit.problems,
            store_problems=m.first_of(of_store),
            is_store_mended=repair and (log is None or not log.damage()),
        )

    def _needed_keys(self) -> set[str]:
        """Return the names of all needed KV: those in rows, and those that rows should have."""
        catalog = self._storage.catalog
        noted = set(filter(is_key, catalog.stored.keys()))
        audit = m.audit_rows(catalog)
        must_be = {key.digest for key in (*audit.needed, *audit.optional)}
        return noted | must_be | m.kept_keys(self._storage.path).keys()

    def _restore(self, digest: str) -> None:
        with contextlib.suppress(IndexFormatError):  # it is not needed any more
            self._fitter.repair(ChunkKey(digest))


def _use_key_of(store: Store, storage: Storage, config: IndexConfig) -> None:
    """Write the catalog under a store's key, or none, and record the configuration."""
    if config.key_check == storage.config.key_check:
        storage.save_config({"store": config.store})
        return
    key, catalog = catalog_key(store) if config.key_check else None, storage.catalog
    write_copy(catalog, next_path(catalog.path), key)
    config.save(storage.path)
    storage.config = config
    catalog.use_next(key)
    for name in (VECTORS_NAME, RUNS_NAME):
        (storage.path / name).unlink(missing_ok=True)
