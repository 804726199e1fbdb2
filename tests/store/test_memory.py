import pytest

from kvrag.errors import StoreError
from kvrag.store.memory import MemoryStore
from kvrag_testing.store_contract import key_number, read_all


def test_a_record_is_a_copy_and_outlives_its_store_until_it_is_closed() -> None:
    store, key = MemoryStore(), key_number(0)
    buffer = bytearray(b"record")
    store.put(key, buffer)  # type: ignore[arg-type]
    buffer[:] = b"xxxxxx"
    record = store.open(key)
    store.close()
    assert not store.contains(key)
    assert read_all(record) == b"record"
    record.close()
    with pytest.raises(StoreError, match="was closed"):
        read_all(record)
