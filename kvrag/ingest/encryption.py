"""The key of an encrypted index: the one that its store encrypts records with.

With it the catalog is encrypted too (SQLCipher: AES-256 and an HMAC for each page), under a key
derived from it. ``index.json`` keeps a check value, another derivation, by which a wrong key is
told from damage.
"""

from __future__ import annotations

import contextlib
import hmac
from pathlib import Path

from kvrag.errors import IndexFormatError, IndexMismatchError, RecordError, StoreError
from kvrag.ingest import lock, words
from kvrag.ingest.catalog import FILE_NAME, Catalog
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.connection import finish_placing, next_path, put_in_place, ready_path
from kvrag.ingest.seals import seal_key
from kvrag.store.base import Store
from kvrag.store.capabilities import DerivesKeys, capability, tiers_of
from kvrag.store.wrapper import read_whole

_CATALOG = b"kvrag catalog"
_CHECK = b"kvrag key check"
_SALT = b"kvrag tenant salt"
_CHECK_BYTES = 16
_NUM_PROBES = 8


def _key_of(store: Store) -> tuple[Store, DerivesKeys] | None:
    """Return the last tier of a store that has a key, and the key; None where none has one."""
    for tier in reversed(tiers_of(store)):
        key = capability(tier, DerivesKeys)
        if key is not None:
            return tier, key
    return None


def _derived(store: Store, purpose: bytes) -> bytes | None:
    """Return what follows from the key of a store; None where nothing is encrypted."""
    found = _key_of(store)
    return None if found is None else found[1].derive(purpose)


def catalog_key(store: Store) -> bytes | None:
    """Return the key of a catalog beside a store; None where nothing is encrypted."""
    return _derived(store, _CATALOG)


def key_check(store: Store) -> str:
    """Return by what the key of a store is known again; "" where nothing is encrypted."""
    return (_derived(store, _CHECK) or b"")[:_CHECK_BYTES].hex()


def secret_salt(store: Store) -> bytes | None:
    """Return a tenant's salt that follows from a store's key; None where nothing is encrypted."""
    return _derived(store, _SALT)


def open_catalog(folder: Path, config: IndexConfig, store: Store) -> Catalog:
    """Open an index's catalog with the key of its store.

    Raises
    ------
    IndexMismatchError
        When the store has no key, or another one than the index.
    IndexFormatError
        When the catalog is missing, damaged, or of another schema.
    ParameterError
        When the catalog is encrypted and SQLCipher is not installed.
    """
    path = folder / FILE_NAME
    key = catalog_key(store) if config.key_check else None
    if config.key_check:
        require_key(folder, config, store)
    the_seal_key = seal_key(bytes.fromhex(config.tenant_salt), config.index_id)
    if ready_path(path).is_file():
        # Somebody who holds the lock is about to, or was killed.
        with contextlib.suppress(StoreError, OSError), lock.writer_lock(folder):
            finish_placing(path)
    try:
        return Catalog(path, seal_key=the_seal_key, cipher_key=key)
    except IndexFormatError:
        # A process was killed between noting another key and putting its catalog in place.
        following = next_path(path)
        if not following.is_file():
            raise
        with contextlib.suppress(IndexFormatError):
            Catalog(following, seal_key=the_seal_key, cipher_key=key).close()
            (folder / words.FILE_NAME).unlink(missing_ok=True)  # under the former key, or none
            put_in_place(path)
        return Catalog(path, seal_key=the_seal_key, cipher_key=key)


def replace_catalog(folder: Path, config: IndexConfig, store: Store) -> Catalog:
    """Set a catalog aside that cannot be opened, and return an empty one; hold the lock."""
    path = folder / FILE_NAME
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while aside.exists():  # an earlier one may hold what this one does not
        number += 1
        aside = path.with_name(f"{path.name}.damaged.{number}")
    with contextlib.suppress(FileNotFoundError):
        path.replace(aside)
    return Catalog.create(
        path,
        seal_key=seal_key(bytes.fromhex(config.tenant_salt), config.index_id),
        cipher_key=catalog_key(store) if config.key_check else None,
    )


def require_key(folder: Path, config: IndexConfig, store: Store) -> None:
    """Raise IndexMismatchError unless a store has the key that an index was made with."""
    found = key_check(store)
    if not found:
        raise IndexMismatchError(
            f"the index in {folder} is encrypted, and no key was given: open it with the key file "
            "that it was made with, --store '...?key_file=PATH' (store= in Python)"
        )
    if not hmac.compare_digest(found, config.key_check):
        raise IndexMismatchError(
            f"wrong key: the index in {folder} was encrypted with another key than that of "
            f"{store.url}; give the key file that it was made with. Nothing is damaged"
        )


def require_key_of_records(store: Store) -> None:
    """Raise IndexMismatchError when a store holds records, and its key opens none of some."""
    found = _key_of(store)
    if found is None:
        return
    tier, _ = found
    tried = 0
    for key in tier.keys():  # noqa: SIM118  a store, no mapping
        if tried == _NUM_PROBES:
            break
        tried += 1
        with contextlib.suppress(RecordError, StoreError):
            record = tier.open(key)
            if record is not None:
                with contextlib.closing(record):
                    read_whole(record)
                return
    if tried:
        raise IndexMismatchError(
            f"wrong key: it opens none of the records that {store.url} holds; give the key file "
            "that they were stored with"
        )
