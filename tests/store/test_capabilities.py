"""Who can do what, however it is wrapped."""

from contextlib import closing
from pathlib import Path

from kvrag.store import base as b
from kvrag.store.base import is_in_memory
from kvrag.store.encrypted import EncryptedStore
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore
from kvrag.store.memory import MemoryStore
from kvrag.store.tiered import TieredStore
from kvrag_testing.store_contract import key_number

ALL = {
    *(
        b.Admits,
        b.ChecksWritable,
        b.DerivesKeys,
        b.Flushes,
        b.HasTiers,
        b.InFolder,
        b.InMemory,
        b.Limits,
    ),
    b.Pins,
}
KEY = b"k" * 32


def of(store: object) -> set[object]:
    return {kind for kind in ALL if b.capability(store, kind) is not None}


def test_what_stores_can_do(tmp_path: Path) -> None:
    memory, folder = MemoryStore(), FileStore(tmp_path)
    assert of(memory) == {b.InMemory}
    assert of(folder) == {b.InFolder, b.ChecksWritable}
    with closing(TieredStore([memory, folder])) as tiers:
        assert of(tiers) == {b.HasTiers, b.Flushes}


def test_wrappers_add_and_hide_nothing(tmp_path: Path) -> None:
    folder = FileStore(tmp_path)
    limited = LimitedStore(folder, 1000)
    assert of(limited) == {b.InFolder, b.ChecksWritable, b.Limits, b.Pins, b.Admits}
    for store in (
        EncryptedStore(limited, KEY),
        LimitedStore(EncryptedStore(folder, KEY), 1000),
        b.StoreWrapper(LimitedStore(b.StoreWrapper(EncryptedStore(folder, KEY)), 1000)),
    ):
        assert of(store) == of(limited) | {b.DerivesKeys}
        assert b.capability(store, FileStore) is folder


def test_tiers() -> None:
    memory, other = MemoryStore(), MemoryStore()
    assert b.tiers_of(memory) == (memory,)
    with closing(TieredStore([memory, other])) as tiers:
        assert b.tiers_of(tiers) == b.tiers_of(b.StoreWrapper(tiers)) == (memory, other)
        # What one tier can do, the whole need not.
        assert b.capability(tiers, b.InMemory) is None


def test_a_tier_is_pinned_inside_what_encrypts_it() -> None:
    """What is asked of tiers reaches the one that can do it, in whatever order it is wrapped."""
    limited = LimitedStore(MemoryStore(), 1500)
    with closing(TieredStore([EncryptedStore(limited, KEY), MemoryStore()])) as store:
        pinned, other = key_number(0), key_number(1)
        store.tiers[0].put(pinned, b"x" * 600)
        (pins,) = b.pins_of(store)
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

    assert is_in_memory(b.StoreWrapper(MemoryStore()))
    assert not is_in_memory(b.StoreWrapper(Lasting()))
