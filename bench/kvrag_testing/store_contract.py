"""The contract of a store. Subclass `StoreContract` and give it a store."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.container import RecordReader, write_record
from kvrag.errors import RecordError, StoreError
from kvrag.kvcache import KVSpec
from kvrag.store.base import Store, StoredRecord
from kvrag_testing.needs import pytest
from kvrag_testing.records import key_number, read_all, record_of, stored

__all__ = ["StoreContract", "key_number", "read_all", "record_of", "stored"]


class StoreContract:
    """Override `store`, `plant` and `peek`.

    Attributes
    ----------
    keeps_old
        Whether an opened record stays readable after it is deleted; otherwise reads are refused.
    """

    keeps_old = True

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    def plant(self, store: Store, key: ChunkKey, record: bytes) -> None:
        """Write a record without the store's knowledge, in place of any that is there."""
        raise NotImplementedError

    def peek(self, store: Store, key: ChunkKey) -> bytes:
        """Read a record without the store's knowledge."""
        raise NotImplementedError

    def test_what_is_put_is_read(self, store: Store) -> None:
        keys = [key_number(number) for number in range(5)]
        for key in keys:
            store.put(key, record_of(key))
        for key in keys:
            assert store.contains(key)
            assert stored(store, key) == record_of(key) == self.peek(store, key)
        assert sorted(store.keys()) == sorted(keys)
        assert dict(store.sizes()) == dict.fromkeys(keys, 1000)

    def test_what_others_put_is_read(self, store: Store) -> None:
        self.plant(store, key_number(1), b"planted")
        assert store.contains(key_number(1))
        assert stored(store, key_number(1)) == b"planted"
        assert list(store.keys()) == [key_number(1)]

    @pytest.mark.parametrize("size", [0, 1, 63, 64, 100_000, 3_000_000])
    def test_sizes(self, store: Store, size: int) -> None:
        key = key_number(size)
        store.put(key, record_of(key, size))
        assert stored(store, key) == record_of(key, size) == self.peek(store, key)

    def test_a_record_of_kvrag(self, store: Store) -> None:
        """A record with a header and blocks, which some stores keep apart."""
        key = key_number(0)
        record = write_record(
            key,
            codec="test",
            spec=KVSpec(2, 1, 8, torch.float32),
            num_tokens=3,
            blocks=[[bytes([number]) * (50_000 * number + 1)] for number in range(5)],
        )
        store.put(key, record)
        assert stored(store, key) == record == self.peek(store, key)
        opened = store.open(key)
        assert opened is not None
        reader = RecordReader(opened, key)
        for number, block in enumerate(reader.header.blocks):
            buffer = bytearray(block.padded_bytes)
            reader.read_block(number, memoryview(buffer))
            assert bytes(buffer[: block.size_bytes]) == bytes([number]) * block.size_bytes
        opened.close()

    def test_replace(self, store: Store) -> None:
        for size in (1000, 200_000, 3):
            key = key_number(0)
            store.replace(key, record_of(key, size))
            assert stored(store, key) == record_of(key, size) == self.peek(store, key)
            assert dict(store.sizes()) == {key: size}

    def test_what_others_delete_or_put_anew(self, store: Store) -> None:
        key = key_number(0)
        store.put(key, b"mine")
        self.plant(store, key, b"theirs")
        assert stored(store, key) == b"theirs"
        assert dict(store.sizes()) == {key: 6}

    def test_what_is_used_is_counted(self, store: Store) -> None:
        key = key_number(0)
        store.put(key, record_of(key))
        assert stored(store, key) == record_of(key)
        assert store.open(key_number(1)) is None
        store.note_damage(key)
        hits, reads = (
            sum(getattr(counts, name) for counts in store.counts())
            for name in ("hits", "bytes_read")
        )
        misses: Counter[str] = Counter()
        for counts in store.counts():
            misses.update(counts.misses)
        assert hits >= 1  # tiers read for themselves as well
        assert reads >= 1000
        assert misses["absent"] >= 1
        assert misses["damaged"] == 1
        assert sum(counts.bytes_written for counts in store.counts()) >= 1000

    def test_nothing_where_nothing_was_put(self, store: Store) -> None:
        assert store.open(key_number(0)) is None
        assert not store.contains(key_number(0))
        assert not store.delete(key_number(0))
        assert list(store.keys()) == []
        assert sum(dict(store.sizes()).values()) == 0
        assert store.collect_garbage(0.0) == 0

    def test_a_key_that_is_present_keeps_its_record(self, store: Store) -> None:
        store.put(key_number(0), b"first")
        store.put(key_number(0), b"second")
        assert stored(store, key_number(0)) == b"first"
        assert store.delete(key_number(0))
        store.put(key_number(0), b"second")
        assert stored(store, key_number(0)) == b"second"

    def test_delete(self, store: Store) -> None:
        for number in range(2):
            store.put(key_number(number), b"record")
        assert store.delete(key_number(0))
        assert not store.delete(key_number(0))
        assert store.open(key_number(0)) is None
        assert list(store.keys()) == [key_number(1)]
        assert sum(dict(store.sizes()).values()) == 6

    def test_a_record_deleted_while_open_stays_readable(self, store: Store) -> None:
        key = key_number(0)
        store.put(key, record_of(key))
        record = store.open(key)
        assert record is not None
        store.delete(key)
        store.put(key, b"another")
        store.collect_garbage(0.0)
        self.check_old(record, record_of(key))
        record.close()
        assert stored(store, key) == b"another"

    def test_a_record_replaced_while_open_stays_readable(self, store: Store) -> None:
        key = key_number(0)
        store.put(key, record_of(key, 300_000))
        record = store.open(key)
        assert record is not None
        store.replace(key, bytes(300_000))
        store.collect_garbage(0.0)
        self.check_old(record, record_of(key, 300_000))
        record.close()
        assert stored(store, key) == bytes(300_000)

    def check_old(self, record: StoredRecord, expected: bytes) -> None:
        """Check that a read returns the opened record's bytes, or nothing."""
        try:
            found = read_all(record)
        except StoreError:
            assert not self.keeps_old
        else:
            assert found == expected

    def test_deleting_while_listing(self, store: Store) -> None:
        keys = {key_number(number) for number in range(20)}
        for key in keys:
            store.put(key, b"record")
        seen = set()
        for key in store.keys():  # noqa: SIM118 (a store is no mapping)
            seen.add(key)
            store.delete(key)
        assert seen == keys
        assert list(store.keys()) == []

    @pytest.mark.parametrize(
        ("offset", "size"), [(0, 1000), (0, 1), (999, 1), (17, 300), (1000, 0)]
    )
    def test_reading_a_part(self, store: Store, offset: int, size: int) -> None:
        key = key_number(0)
        store.put(key, record_of(key))
        record = store.open(key)
        assert record is not None
        assert record.size_bytes == 1000
        buffer = bytearray(b"\xaa" * (size + 2))
        record.read_into(offset, memoryview(buffer)[1 : size + 1])
        assert buffer == b"\xaa" + record_of(key)[offset : offset + size] + b"\xaa"
        record.close()

    @pytest.mark.parametrize(("offset", "size"), [(0, 1001), (1000, 1), (10**15, 1), (-1, 10)])
    def test_reading_past_the_end(self, store: Store, offset: int, size: int) -> None:
        store.put(key_number(0), record_of(key_number(0)))
        record = store.open(key_number(0))
        assert record is not None
        with pytest.raises(RecordError, match=f"{key_number(0)}.*1000 bytes"):
            record.read_into(offset, memoryview(bytearray(size)))
        record.close()

    def test_a_record_of_no_bytes(self, store: Store) -> None:
        store.put(key_number(0), b"")
        assert store.contains(key_number(0))
        assert stored(store, key_number(0)) == b""

    def test_closing_twice(self, store: Store) -> None:
        store.put(key_number(0), b"record")
        record = store.open(key_number(0))
        assert record is not None
        record.close()
        record.close()
        store.close()
        store.close()

    def test_many_threads_put_and_read_the_same_keys(self, store: Store) -> None:
        keys = [key_number(number) for number in range(8)]
        start = threading.Barrier(6)
        failures: list[object] = []

        def work() -> None:
            try:
                start.wait(10)
                for key in keys:
                    store.put(key, record_of(key, 5000))
                    if stored(store, key) != record_of(key, 5000):
                        failures.append(key)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert sorted(store.keys()) == sorted(keys)
        assert sum(dict(store.sizes()).values()) == 8 * 5000
        assert store.collect_garbage(0.0) == 0

    def test_many_threads_read_one_record(self, store: Store) -> None:
        key = key_number(0)
        store.put(key, record_of(key, 64_000))
        record = store.open(key)
        assert record is not None
        failures: list[int] = []

        def work(first: int) -> None:
            buffer = bytearray(1000)
            for offset in range(first * 1000, 64_000, 4000):
                record.read_into(offset, memoryview(buffer))
                if buffer != record_of(key, 64_000)[offset : offset + 1000]:
                    failures.append(offset)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record.close()
        assert not failures, failures
