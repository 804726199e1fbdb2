"""How fast records are read, layer by layer, over a plain copy of the same bytes."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec.container import RecordReader
from kvrag.errors import KVRagError
from kvrag.store.base import Store
from kvrag.store.registry import open_store, without_password
from kvrag_bench.store.records import NUM_LAYERS, key_number, record_number


@dataclass(frozen=True)
class ReadRow:
    """Warm reads of whole records in layers, by one thread.

    Attributes
    ----------
    store
        The store's URL, without a password.
    num_records, size_bytes
        What was read in each round.
    read_bytes_per_second, checked_bytes_per_second
        The store's rates, without and with comparing checksums; medians of rounds.
    copy_bytes_per_second
        Rate of copying the same bytes out of a mapping of a plain file, layer by layer.
    share
        The median over the rounds of the store's rate over the copy's in the same round.
    open_seconds
        Opening one record, its header read and checked; median.

    Rates are by processor time of the reading thread, waiting for a remote store left out.
    """

    store: str
    num_records: int
    size_bytes: int
    read_bytes_per_second: float
    checked_bytes_per_second: float
    copy_bytes_per_second: float
    share: float
    open_seconds: float


@dataclass(frozen=True)
class ReadersRow:
    """Many threads that read one store at once.

    Attributes
    ----------
    num_threads, num_reads
        How many read, and records read whole by all of them.
    num_wrong
        Reads that gave other bytes than were written, or an error.
    bytes_per_second
        Rate of all threads together.
    """

    store: str
    num_threads: int
    num_reads: int
    num_wrong: int
    bytes_per_second: float


def fill(store: Store, num_records: int, layer_bytes: int) -> None:
    """Put the bench's records into a store; those that are there stay."""
    for number in range(num_records):
        store.put(key_number(number), record_number(number, layer_bytes))


def measure_reads(
    url: str, folder: Path, num_records: int, layer_bytes: int, rounds: int
) -> ReadRow:
    """Read records of a store and copy the same bytes from a mapping, in turn."""
    store = open_store(url)
    try:
        fill(store, num_records, layer_bytes)
        plain = folder / "plain"
        plain.write_bytes(b"".join(record_number(n, layer_bytes) for n in range(num_records)))
        keys = [key_number(number) for number in range(num_records)]
        size_bytes = plain.stat().st_size
        # As large as everything read: each layer of a prompt has a separate place.
        buffer = np.zeros(size_bytes, dtype=np.uint8)
        seconds = []
        with plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
            for _ in range(rounds + 1):
                seconds.append(
                    (
                        _timed(_copy, m, buffer, layer_bytes),
                        _timed(_read, store, keys, buffer, False),
                        _timed(_read, store, keys, buffer, True),
                    )
                )
        opens = [_timed(_open, store, keys[number % num_records]) for number in range(200)]
    finally:
        store.close()
    copy, read, checked = (statistics.median(times) for times in zip(*seconds[1:], strict=True))
    return ReadRow(
        store=without_password(url),
        num_records=num_records,
        size_bytes=size_bytes,
        read_bytes_per_second=size_bytes / read,
        checked_bytes_per_second=size_bytes / checked,
        copy_bytes_per_second=size_bytes / copy,
        share=statistics.median(times[0] / times[1] for times in seconds[1:]),
        open_seconds=statistics.median(opens),
    )


def measure_readers(
    url: str, num_records: int, layer_bytes: int, num_threads: int, num_reads: int
) -> ReadersRow:
    """Let many threads read records whole, and compare every byte."""
    store = open_store(url)
    try:
        fill(store, num_records, layer_bytes)
        expected = [record_number(number, layer_bytes) for number in range(num_records)]
        start = threading.Barrier(num_threads + 1)
        wrong: list[int] = []

        def work(first: int) -> None:
            start.wait()
            for place in range(first, num_reads, num_threads):
                number = place * 7919 % num_records
                try:
                    record = store.open(key_number(number))
                    if record is None:
                        raise KVRagError("missing")
                    content = bytearray(record.size_bytes)
                    step = max(len(content) // NUM_LAYERS, 1)
                    for begin in range(0, len(content), step):
                        record.read_into(begin, memoryview(content)[begin : begin + step])
                    record.close()
                except KVRagError:
                    wrong.append(number)
                else:
                    if content != expected[number]:
                        wrong.append(number)

        threads = [
            threading.Thread(target=work, args=(n,), name=f"kvrag-read-{n}")
            for n in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        start.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
    finally:
        store.close()
    return ReadersRow(
        store=without_password(url),
        num_threads=num_threads,
        num_reads=num_reads,
        num_wrong=len(wrong),
        bytes_per_second=num_reads * len(expected[0]) / seconds,
    )


def _timed(work: Callable[..., None], *arguments: object) -> float:
    """Return the thread's processor time: other programs must not count."""
    started = time.thread_time()
    work(*arguments)
    return time.thread_time() - started


def _copy(mapping: mmap.mmap, buffer: NDArray[np.uint8], layer_bytes: int) -> None:
    mapped = np.frombuffer(mapping, dtype=np.uint8)
    for begin in range(0, len(mapped), layer_bytes):
        part = mapped[begin : begin + layer_bytes]
        buffer[begin : begin + len(part)] = part


def _read(store: Store, keys: list[ChunkKey], buffer: NDArray[np.uint8], is_checked: bool) -> None:
    view = memoryview(buffer.data)
    begin = 0
    for key in keys:
        record = store.open(key)
        assert record is not None
        reader = RecordReader(record, key)
        for number, block in enumerate(reader.header.blocks):
            place = view[begin : begin + block.padded_bytes]
            if is_checked:
                reader.read_block(number, place)
            else:
                record.read_into(block.offset, place)
            begin += block.padded_bytes
        record.close()


def _open(store: Store, key: ChunkKey) -> None:
    record = store.open(key)
    assert record is not None
    RecordReader(record, key)
    record.close()
