"""A catalog and a store of a million small chunks: to open, and to look one up."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrag.chunk import Chunk, chunk_id_of
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.schema import Change, ChunkRow
from kvrag.store.file import FileStore
from kvrag_bench.store.contents import key_of as key_number

_CHUNKS_PER_DOCUMENT = 1000
_RECORD_BYTES = 512
_TOKENS = tuple(range(100, 132))
_NUM_LOOKUPS = 2000


@dataclass(frozen=True)
class MillionRow:
    """Costs of a catalog and store with that many chunks.

    Attributes
    ----------
    num_chunks, num_files, size_bytes
        Chunks, files of the store, and bytes of catalog and store.
    build_seconds
        Time to make both in one go.
    open_seconds
        Catalog, store and the first look-up, by a fresh object each; the pages may be in memory.
    lookup_seconds, slowest_lookup_seconds
        One chunk by its id from the catalog and its record's bytes from the store: median, and
        99th percentile.
    """

    num_chunks: int
    num_files: int
    size_bytes: int
    build_seconds: float
    open_seconds: float
    lookup_seconds: float
    slowest_lookup_seconds: float


def measure_million(
    folder: Path, num_chunks: int, on_progress: Callable[[str], None]
) -> MillionRow:
    """Make a catalog and a store, open them again, and look chunks up."""
    started = time.perf_counter()
    path = folder / "catalog.sqlite"
    with closing(Catalog.create(path)) as catalog:
        for first in range(0, num_chunks, _CHUNKS_PER_DOCUMENT):
            last = min(first + _CHUNKS_PER_DOCUMENT, num_chunks)
            source = source_of(first)
            rows = [_row(number) for number in range(first, last)]
            catalog.write(Change(put=[(source, None, "0" * 40, {}, rows)]))
            if first % 100_000 == 0:
                on_progress(f"{first:,} of {num_chunks:,} chunks in the catalog")
    on_progress("writing records")
    for number in range(num_chunks):  # not by the store, which flushes each of them
        key = key_number(number)
        record = folder / "kv" / key.digest[:2] / f"{key}.kv"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_bytes(_content(number))
    build_seconds = time.perf_counter() - started

    on_progress("looking chunks up")
    started = time.perf_counter()
    with closing(Catalog(path)) as catalog, closing(FileStore(folder / "kv")) as store:
        _look_up(catalog, store, num_chunks // 2)
        open_seconds = time.perf_counter() - started
        chance = random.Random(0)
        seconds = []
        for _ in range(_NUM_LOOKUPS):
            number = chance.randrange(num_chunks)
            started = time.perf_counter()
            _look_up(catalog, store, number)
            seconds.append(time.perf_counter() - started)
    files = [one for one in (folder / "kv").rglob("*") if one.is_file()]
    return MillionRow(
        num_chunks=num_chunks,
        num_files=len(files),
        size_bytes=path.stat().st_size + sum(one.stat().st_size for one in files),
        build_seconds=build_seconds,
        open_seconds=open_seconds,
        lookup_seconds=statistics.median(seconds),
        slowest_lookup_seconds=statistics.quantiles(seconds, n=100)[-1],
    )


def _look_up(catalog: Catalog, store: FileStore, number: int) -> None:
    found = catalog.chunk_and_keys(chunk_number(number).chunk_id)
    assert found is not None
    chunk, (digest,) = found
    key = key_number(number)
    assert digest == key.digest
    assert chunk.token_ids == _TOKENS
    record = store.open(key)
    assert record is not None
    content = bytearray(record.size_bytes)
    record.read_into(0, memoryview(content))
    record.close()
    assert content == _content(number)


def _content(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(_RECORD_BYTES)


def source_of(number: int) -> str:
    """Return the document of a chunk, by the chunk's number."""
    return f"document-{number - number % _CHUNKS_PER_DOCUMENT}"


def chunk_number(number: int) -> Chunk:
    """Return the chunk with a number: 32 tokens, and a sentence of text."""
    source, ordinal = source_of(number), number % _CHUNKS_PER_DOCUMENT
    text = f"Chunk {number} of a large body of documents, a sentence long."
    return Chunk(
        chunk_id=chunk_id_of(source, ordinal, text),
        text=text,
        token_ids=_TOKENS,
        token_starts=tuple(range(len(_TOKENS))),
        source=source,
        ordinal=ordinal,
    )


def _row(number: int) -> ChunkRow:
    return ChunkRow(chunk_number(number), [key_number(number)], np.zeros(8, dtype=np.float32))
