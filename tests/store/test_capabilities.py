"""Who can do what, however it is wrapped."""

from contextlib import closing
from pathlib import Path

from kvrag.store.base import (
    Admits,
    ChecksWritable,
    DerivesKeys,
    Flushes,
    HasTiers,
    InFolder,
    InMemory,
    Limits,
    Pins,
    StoreWrapper,
    capability,
    is_in_memory,
    pins_of,
    tiers_of,
)
from kvrag.store.encrypted import EncryptedStore
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore
from kvrag.store.memory import MemoryStore
from kvrag.store.tiered import TieredStore
from kvrag_testing.store_contract import key_number

ALL = {
    *(Admits, ChecksWritable, DerivesKeys, Flushes, HasTiers, InFolder, InMemory, Limits),
    Pins,
}
KEY = b"k" * 32


def of(store: object) -> set[object]:
    return {kind for kind in ALL if capability(store, kind) is not None}


def test_what_stores_can_do(tmp_path: Path) -> None:
    memory, folder = MemoryStore(), FileStore(tmp_path)
    assert of(memory) == {InMemory}
    assert of(folder) == {InFolder, ChecksWritable}
    with closing(TieredStore([memory, folder])) as tiers:
        assert of(tiers) == {HasTiers, Flushes}


def test_wrappers_add_and_hide_nothing(tmp_path: Path) -> None:
    folder = FileStore(tmp_path)
    limited = LimitedStore(folder, 1000)
    assert of(limited) == {InFolder, ChecksWritable, Limits, Pins, Admits}
    for store in (
        EncryptedStore(limited, KEY),
        LimitedStore(EncryptedStore(folder, KEY), 1000),
        StoreWrapper(LimitedStore(StoreWrapper(EncryptedStore(folder, KEY)), 1000)),
    ):
        assert of(store) == of(limited) | {DerivesKeys}
        assert capability(store, FileStore) is folder


def test_tiers() -> None:
    memory, other = MemoryStore(), MemoryStore()
    assert tiers_of(memory) == (memory,)
    with closing(TieredStore([memory, other])) as tiers:
        assert tiers_of(tiers) == tiers_of(StoreWrapper(tiers)) == (memory, other)
        # What one tier can do, the whole need not.
        assert capability(tiers, InMemory) is None


def test_a_tier_is_pinned_inside_what_encrypts_it() -> None:
    """What is asked of tiers reaches the one that can do it, in whatever order it is wrapped."""
    limited = LimitedStore(MemoryStore(), 1500)
    with closing(TieredStore([EncryptedStore(limited, KEY), MemoryStore()])) as store:
        pinned, other = key_number(0), key_number(1)
        store.tiers[0].put(pinned, b"x" * 600)
        (pins,) = pins_of(store)
        pins.pin([pinned])
        store.tiers[0].put(other, b"x" * 600)
        store.tiers[0].put(key_number(2), b"x" * 600)
        assert limited.contains(pinned)
        assert not limited.contains(other)
        pins.unpin([pinned])
        store.tiers[0].put(key_number(3), b"x" * 600)
        assert not limited.contains(pinned)


def test_what_says_that_it_is_not_in_memory_is_not() -> None:
    class Lasting(MemoryStore):
        is_in_memory = False

    assert is_in_memory(StoreWrapper(MemoryStore()))
    assert not is_in_memory(StoreWrapper(Lasting()))
