"""The key of an encrypted index: its store encrypts records with the same key.

A key derived from it encrypts the catalog too (SQLCipher: AES-256 and an HMAC for each page).
``index.json`` stores a check value, another derivation, which distinguishes a wrong key from
damage.
"""

from __future__ import annotations

import contextlib
import hmac
from pathlib import Path
from typing import Any

from kvrag.errors import IndexFormatError, IndexMismatchError, StoreError
from kvrag.ingest.catalog import FILE_NAME, Catalog
from kvrag.ingest.catalogfile import finish_placing, next_path, put_in_place, ready_path
from kvrag.ingest.config import WORDS_NAME, IndexConfig, writer_lock
from kvrag.ingest.schema import checksum_key
from kvrag.store.base import Store, capability, tiers_of
from kvrag.store.encrypted import EncryptedStore

_CATALOG = b"kvrag catalog"
_CHECK = b"kvrag key check"
_SALT = b"kvrag tenant salt"
_CONVERSATIONS = b"kvrag conversations"
_CHECK_BYTES = 16


def _derived(store: Store, purpose: bytes) -> bytes | None:
    """Return bytes derived from the key of the last tier that has one; None if none has."""
    for tier in reversed(tiers_of(store)):
        if (key := capability(tier, EncryptedStore)) is not None:
            return key.derive(purpose)
    return None


def catalog_key(store: Store) -> bytes | None:
    """Return the key of a store's catalog; None if nothing is encrypted."""
    return _derived(store, _CATALOG)


def key_check(store: Store) -> str:
    """Return the check value of a store's key; "" if nothing is encrypted."""
    return (_derived(store, _CHECK) or b"")[:_CHECK_BYTES].hex()


def secret_salt(store: Store) -> bytes | None:
    """Return a tenant's salt derived from a store's key; None if nothing is encrypted."""
    return _derived(store, _SALT)


def conversations_key(store: Store) -> bytes | None:
    """Return the key of the conversations about an index; None if nothing is encrypted."""
    return _derived(store, _CONVERSATIONS)


def open_catalog(folder: Path, config: IndexConfig, store: Store) -> Catalog:
    """Open an index's catalog with the key of its store.

    Raises
    ------
    IndexMismatchError
        When the store's key is not the index's, or only one of them has a key; when the catalog is
        that of another index.
    IndexFormatError
        When the catalog is missing, damaged, or of another schema.
    ParameterError
        When the catalog is encrypted and SQLCipher is not installed.
    """
    path = folder / FILE_NAME
    check_key(folder, config, store)
    keys = _keys(config, store)
    if ready_path(path).is_file():
        # The holder of the lock will put it in place, or was killed.
        with contextlib.suppress(StoreError, OSError), writer_lock(folder):
            finish_placing(path)
    try:
        catalog = Catalog(path, **keys)
    except (IndexFormatError, IndexMismatchError):
        # A process was killed after it recorded another key and before it replaced the catalog.
        following = next_path(path)
        if not following.is_file():
            raise
        with contextlib.suppress(IndexFormatError, IndexMismatchError):
            Catalog(following, **keys).close()
            (folder / WORDS_NAME).unlink(missing_ok=True)  # under the former key, or none
            put_in_place(path)
        catalog = Catalog(path, **keys)
    if catalog.stored.is_foreign():
        catalog.close()
        raise IndexMismatchError(
            f"{path} is the catalog of another index than index.json beside it: none of its rows "
            "was written by this index. Move it back to its own index, and put the right file "
            "here; if there is none, ingest all documents again. Nothing was changed"
        )
    return catalog


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
    return make_catalog(folder, config, store)


def make_catalog(folder: Path, config: IndexConfig, store: Store) -> Catalog:
    """Return a new, empty catalog in a folder, with the key of a store if that has the index's."""
    return Catalog.create(folder / FILE_NAME, **_keys(config, store))


def _keys(config: IndexConfig, store: Store) -> dict[str, Any]:
    return {
        "checksum_key": checksum_key(bytes.fromhex(config.tenant_salt), config.index_id),
        "cipher_key": catalog_key(store) if config.key_check else None,
    }


def check_key(folder: Path, config: IndexConfig, store: Store) -> None:
    """Raise IndexMismatchError unless a store has the index's key, or neither has one."""
    found = key_check(store)
    if found and not config.key_check:
        raise IndexMismatchError(
            f"the index in {folder} is not encrypted, and {store.url} has a key: only part of "
            "the index would be encrypted. Leave the key out, or encrypt the whole index: "
            "'kvrag choose-store --move --stores URL?key_file=PATH' (index.upkeep.move in "
            "Python)"
        )
    remedy = "open it with the key file that it was made with, --store '...?key_file=PATH'"
    require_key(f"the index in {folder}", config.key_check, found, f"{remedy} (store= in Python)")


def require_key(place: str, expected: str, found: str, remedy: str) -> None:
    """Raise IndexMismatchError unless the check value of an encrypted index's key is found."""
    if expected and not found:
        raise IndexMismatchError(f"{place} is encrypted, and no key was given: {remedy}")
    if not hmac.compare_digest(found, expected):
        raise IndexMismatchError(
            f"wrong key: {place} was encrypted with another key; give the key file that it was "
            "made with. Nothing is damaged"
        )
