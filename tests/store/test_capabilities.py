"""Who can do what, however it is wrapped."""

from contextlib import closing
from pathlib import Path

from kvrag.store import base as b
from kvrag.store.encrypted import EncryptedStore
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore, limits_of
from kvrag.store.memory import MemoryStore
from kvrag.store.tiered import TieredStore
from kvrag_testing.store_contract import key_number

KEY = b"k" * 32


def test_wrappers_hide_nothing(tmp_path: Path) -> None:
    folder = FileStore(tmp_path)
    for store in (
        EncryptedStore(LimitedStore(folder, 1000), KEY),
        LimitedStore(EncryptedStore(folder, KEY), 1000),
        b.StoreWrapper(LimitedStore(b.StoreWrapper(EncryptedStore(folder, KEY)), 1000)),
    ):
        assert b.capability(store, FileStore) is folder
        assert b.capability(store, EncryptedStore) is not None
        assert b.capability(store, LimitedStore) is not None
        assert not b.is_in_memory(store)
    assert b.is_in_memory(b.StoreWrapper(MemoryStore()))


def test_tiers() -> None:
    memory, other = MemoryStore(), MemoryStore()
    assert b.tiers_of(memory) == (memory,)
    with closing(TieredStore([memory, other])) as tiers:
        assert b.tiers_of(tiers) == b.tiers_of(b.StoreWrapper(tiers)) == (memory, other)
        assert not b.is_in_memory(tiers)  # what one tier can do, the whole need not


def test_a_tier_is_pinned_inside_what_encrypts_it() -> None:
    limited = LimitedStore(MemoryStore(), 1500)
    with closing(TieredStore([EncryptedStore(limited, KEY), MemoryStore()])) as store:
        pinned, *others = map(key_number, range(4))
        store.tiers[0].put(pinned, b"x" * 600)
        (limits,) = limits_of(store)
        limits.pin([pinned])
        for key in others[:2]:
            store.tiers[0].put(key, b"x" * 600)
        assert limited.contains(pinned)
        assert not limited.contains(others[0])
        limits.unpin([pinned])
        store.tiers[0].put(others[2], b"x" * 600)
        assert not limited.contains(pinned)
