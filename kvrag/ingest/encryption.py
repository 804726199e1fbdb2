"""The key of an encrypted index: its store encrypts records with the same key.

A key derived from it encrypts the catalog too (SQLCipher: AES-256 and an HMAC for each page).
``index.json`` stores a check value, another derivation, which distinguishes a wrong key from
damage.
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
    """Return the last tier of a store that has a key, and the key; None if no tier has one."""
    for tier in reversed(tiers_of(store)):
        key = capability(tier, DerivesKeys)
        if key is not None:
            return tier, key
    return None


def _derived(store: Store, purpose: bytes) -> bytes | None:
    """Return bytes derived from the key of a store; None if nothing is encrypted."""
    found = _key_of(store)
    return None if found is None else found[1].derive(purpose)


def catalog_key(store: Store) -> bytes | None:
    """Return the key of a store's catalog; None if nothing is encrypted."""
    return _derived(store, _CATALOG)


def key_check(store: Store) -> str:
    """Return the check value of a store's key; "" if nothing is encrypted."""
    return (_derived(store, _CHECK) or b"")[:_CHECK_BYTES].hex()


def secret_salt(store: Store) -> bytes | None:
    """Return a tenant's salt derived from a store's key; None if nothing is encrypted."""
    return _derived(store, _SALT)


def open_catalog(folder: Path, config: IndexConfig, store: Store) -> Catalog:
    """Open an index's catalog with the key of its store.

    Raises
    ------
    IndexMismatchError
        When the store has no key, or not the index's key.
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
        # The holder of the lock will put it in place, or was killed.
        with contextlib.suppress(StoreError, OSError), lock.writer_lock(folder):
            finish_placing(path)
    try:
        return Catalog(path, seal_key=the_seal_key, cipher_key=key)
    except IndexFormatError:
        # A process was killed after it recorded another key and before it replaced the catalog.
        following = next_path(path)
        if not following.is_file():
            raise
        with contextlib.suppress(IndexFormatError):
            Catalog(following, seal_key=the_seal_key, cipher_key=key).close()
            (folder / words.FILE_NAME).unlink(missing_ok=True)  # under the former key, or none
            put_in_place(path)
        return Catalog(path, seal_key=the_seal_key, cipher_key=key)


def replace_catalog(folder: Path, config: IndexConfig, store: Store) -> Catalog:
    """Rename a catalog that cannot be opened and return an empty one; the caller holds the lock."""
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
    """Raise IndexMismatchError unless a store has the index's key."""
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
    """Raise IndexMismatchError if a store holds records and its key opens none of a sample."""
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
