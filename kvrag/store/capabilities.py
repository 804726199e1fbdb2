"""What only some stores can do: one protocol for each, and how a caller finds who can.

`Store` has what every store does. A caller that wants more asks for just that::

    pins = capability(store, Pins)
    if pins is not None:
        pins.pin(keys)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from kvrag.chunk import ChunkKey
from kvrag.store.base import Store
from kvrag.store.wrapper import StoreWrapper

Capability = TypeVar("Capability")


@runtime_checkable
class Pins(Protocol):
    """Keeps records that it would otherwise remove."""

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Never remove these records, until `unpin` was called as often."""
        ...

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Take a pin back."""
        ...


@runtime_checkable
class Limits(Protocol):
    """Keeps within a number of bytes."""

    limit_bytes: int


@runtime_checkable
class Admits(Protocol):
    """Chooses which copies of other tiers' records it takes."""

    def admits(self, key: ChunkKey, size_bytes: int) -> bool:
        """Say whether a copy of a record is worth the ones that would have to go for it."""
        ...


@runtime_checkable
class HasTiers(Protocol):
    """Is made of several stores, the fastest first."""

    @property
    def tiers(self) -> Sequence[Store]: ...


@runtime_checkable
class LocatesTier(Protocol):
    """Knows where a record would come from."""

    def tier_of(self, key: ChunkKey) -> int:
        """Return the number of the tier that would deliver a record; nothing is read of it."""
        ...


@runtime_checkable
class Flushes(Protocol):
    """Writes in the background."""

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all is written; say whether it is."""
        ...


@runtime_checkable
class DerivesKeys(Protocol):
    """Has a tenant's key."""

    def derive(self, purpose: bytes) -> bytes:
        """Return 32 bytes that follow from the key, others for each purpose."""
        ...


@runtime_checkable
class ChecksWritable(Protocol):
    """Finds out whether it can be written to without writing."""

    def check_writable(self) -> None:
        """Raise StoreError where no record could be written."""
        ...


@runtime_checkable
class InFolder(Protocol):
    """Keeps its records in a folder of this machine, which has room for a list beside them."""

    @property
    def path(self) -> Path: ...


@runtime_checkable
class InMemory(Protocol):
    """Keeps its records in this process: quick to write, and gone when the process ends."""

    @property
    def is_in_memory(self) -> bool: ...


def capability(store: Store, kind: type[Capability]) -> Capability | None:
    """Return the outermost of a store and those it is wrapped around that has a capability.

    Tiers are not looked into: what one of several tiers can do, their whole need not. Ask each of
    `tiers_of`.

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


def tiers_of(store: Store) -> Sequence[Store]:
    """Return the tiers of a store, the fastest first; a store without tiers is its only one."""
    found = capability(store, HasTiers)
    return (store,) if found is None else found.tiers
