import pytest

from kvrag.errors import StoreError
from kvrag.store.memory import MemoryStore
from kvrag_testing.store_contract import key_number, read_all


def test_what_is_kept_is_not_the_callers_buffer() -> None:
    store = MemoryStore()
    buffer = bytearray(b"record")
    store.put(key_number(0), buffer)  # type: ignore[arg-type]
    buffer[:] = b"xxxxxx"
    record = store.open(key_number(0))
    assert read_all(record) == b"record"


def test_reading_a_closed_record() -> None:
    store = MemoryStore()
    store.put(key_number(0), b"record")
    record = store.open(key_number(0))
    record.close()
    with pytest.raises(StoreError, match="was closed"):
        record.read_into(0, memoryview(bytearray(1)))


def test_closing_the_store_forgets_all_but_open_records() -> None:
    store = MemoryStore()
    store.put(key_number(0), b"record")
    record = store.open(key_number(0))
    store.close()
    assert not store.contains(key_number(0))
    assert read_all(record) == b"record"
