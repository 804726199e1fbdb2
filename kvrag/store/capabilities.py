"""Optional store capabilities: one protocol for each, and how a caller finds them.

`Store` has what every store can do. A caller that needs more asks for a capability::

    pins = capability(store, Pins)
    if pins is not None:
        pins.pin(keys)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from kvrag import arguments
from kvrag.chunk import ChunkKey
from kvrag.errors import StoreError
from kvrag.store.base import Store, StoreWrapper

Capability = TypeVar("Capability")


@runtime_checkable
class Pins(Protocol):
    """Keeps records that it would otherwise remove."""

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Protect these records from removal until `unpin` is called as often."""
        ...

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Undo one `pin` of these records."""
        ...


@runtime_checkable
class Limits(Protocol):
    """Limits the total size of its records."""

    limit_bytes: int


@runtime_checkable
class Admits(Protocol):
    """Decides which records of other tiers it copies."""

    def admits(self, key: ChunkKey, size_bytes: int) -> bool:
        """Return whether a copy of a record is worth the records it would push out."""
        ...


@runtime_checkable
class HasTiers(Protocol):
    """Consists of several stores, the fastest first."""

    @property
    def tiers(self) -> Sequence[Store]: ...


@runtime_checkable
class Flushes(Protocol):
    """Writes in the background."""

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is written; return whether it is."""
        ...


@runtime_checkable
class DerivesKeys(Protocol):
    """Holds a tenant's key."""

    def derive(self, purpose: bytes) -> bytes:
        """Return 32 bytes derived from the key, different for each purpose."""
        ...


@runtime_checkable
class ChecksWritable(Protocol):
    """Checks whether it is writable, without writing."""

    def check_writable(self) -> None:
        """Raise StoreError if no record could be written."""
        ...


@runtime_checkable
class InFolder(Protocol):
    """Keeps its records in a local folder, where other files can be kept beside them."""

    @property
    def path(self) -> Path: ...


@runtime_checkable
class InMemory(Protocol):
    """Keeps its records in this process: fast to write, and gone when the process ends."""

    @property
    def is_in_memory(self) -> bool: ...


_VALUES: dict[str, tuple[tuple[type, ...], str]] = {
    "is_in_memory": ((bool,), "True or False"),
    "limit_bytes": ((int,), "a number of bytes, as an int"),
    "path": ((Path,), "a pathlib.Path"),
    "tiers": ((list, tuple), "a list or tuple of stores"),
}
_METHODS = (
    *("admits", "check_writable", "derive", "flush"),
    *("pin", "unpin"),
)
_KEY_BYTES = 32


def wrong_capability(store: object) -> tuple[str, str, str] | None:
    """Return an attribute that is named as a capability's but is not what the capability needs.

    Returns
    -------
    tuple of str or None
        The attribute's name, what is expected and what was found; None if all are right.
    """
    for name in (*_VALUES, *_METHODS):
        if not hasattr(store, name):
            continue
        value = getattr(store, name)
        kinds, expected = _VALUES.get(name, ((), "a method"))
        is_right = isinstance(value, kinds) if kinds else callable(value)
        if not is_right or (isinstance(value, bool) and bool not in kinds):  # a bool is an int
            return name, expected, arguments.shown(value)
    if isinstance(store, DerivesKeys):
        key = store.derive(b"kvrag length check")
        if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
            # The bytes themselves are secret.
            found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            return "derive", f"a method that returns {_KEY_BYTES} bytes", found
    return None


def capability(store: Store, kind: type[Capability]) -> Capability | None:
    """Return the outermost of a store and the stores it wraps that has a capability.

    This does not look into tiers: a capability of one tier need not be a capability of the whole.
    Ask each store of `tiers_of`.

    Parameters
    ----------
    kind
        One of this module's protocols, or another that is ``runtime_checkable``.
    """
    while not isinstance(store, kind):
        if not isinstance(store, StoreWrapper):
            return None
        store = store.inner
    return store


def is_in_memory(store: Store) -> bool:
    """Return whether a store says that its records end with this process."""
    found = capability(store, InMemory)
    return found is not None and found.is_in_memory


def tiers_of(store: Store) -> Sequence[Store]:
    """Return the tiers of a store, the fastest first; a store without tiers is its only one."""
    found = capability(store, HasTiers)
    return (store,) if found is None else found.tiers


def tier_of(store: Store, key: ChunkKey) -> int:
    """Return the number of the tier that would deliver a record, without reading it.

    The last tier is not asked: a record in none of the others is there or nowhere.
    """
    tiers = tiers_of(store)
    for number, tier in enumerate(tiers[:-1]):
        with contextlib.suppress(StoreError):
            if tier.contains(key):
                return number
    return len(tiers) - 1


def pins_of(store: Store) -> list[Pins]:
    """Return what can keep the records of a store: itself, or each of its tiers that can."""
    own = capability(store, Pins)
    if own is not None:
        return [own]
    found = [capability(tier, Pins) for tier in tiers_of(store)]
    return [pins for pins in found if pins is not None]
