"""Files in parts: the segments of a shared index, immutable records in a separate store.

A part's key is drawn by chance, so no two files share one, and garbage collection of one file never
touches another. The store encrypts parts if the index has a key.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, RecordError, StoreError
from kvrag.ingest.catalog import FILE_NAME
from kvrag.ingest.catalogfile import write_through
from kvrag.ingest.config import IndexConfig, write_atomically
from kvrag.ingest.encryption import make_catalog
from kvrag.ingest.rows import Change, ChunkRow, FileState
from kvrag.ingest.shared.manifest import File, Manifest, Part
from kvrag.regularfile import open_regular
from kvrag.store.base import Store, room_for
from kvrag.store.files import store_error

PART_BYTES = 4 << 20
_THREADS = 8


def put_bytes(store: Store, name: str, content: bytes) -> File:
    """Store some bytes. Raises StoreError."""
    return File(name, (_put(store, content),))


def put_again(store: Store, file: File, content: bytes) -> None:
    """Store the bytes of `put_bytes` again if they are gone: `gc` takes what nothing names yet."""
    store.put(ChunkKey(file.parts[0].key), content)


def is_stored(store: Store, files: Iterable[File]) -> bool:
    """Return whether every part of some files is in the store."""
    keys = [ChunkKey(part.key) for file in files for part in file.parts]
    with ThreadPoolExecutor(_THREADS, "kvrag-parts") as pool:
        return all(pool.map(store.contains, keys))


def put_file(store: Store, path: Path) -> File:
    """Store a file, a few parts at a time. Raises StoreError."""
    size = path.stat().st_size

    def put(first: int) -> Part:
        with open_regular(path) as file:
            file.seek(first)
            return _put(store, file.read(PART_BYTES))

    try:
        with ThreadPoolExecutor(_THREADS, "kvrag-parts") as pool:
            parts = tuple(pool.map(put, range(0, size, PART_BYTES)))
    except OSError as error:
        raise store_error("read", path, error) from error
    return File(path.name, parts)


def get_bytes(store: Store, file: File) -> bytes:
    """Return a file's bytes. Raises IndexFormatError where they are not what was written."""
    return b"".join(_get(store, file, part, bytearray()) for part in file.parts)


def get_file(store: Store, file: File, path: Path) -> None:
    """Write a file's bytes to a new file at `path`. Raises as `get_bytes`, and StoreError."""
    places: list[tuple[int, Part]] = []
    at = 0
    for part in file.parts:
        places.append((at, part))
        at += part.size
    rooms = threading.local()  # new memory for each part would cost more than the copy
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:

            def fetch(place: tuple[int, Part]) -> None:
                if not hasattr(rooms, "room"):
                    rooms.room = bytearray(PART_BYTES)
                content = _get(store, file, place[1], rooms.room)
                written = 0
                while written < len(content):
                    written += os.pwrite(descriptor, content[written:], place[0] + written)

            with ThreadPoolExecutor(_THREADS, "kvrag-parts") as pool:
                for _ in pool.map(fetch, places):
                    pass
        finally:
            os.close(descriptor)
    except OSError as error:
        raise store_error("write", path, error) from error


def damage_of(store: Store, files: Iterable[File], say: Callable[[str], None]) -> None:
    """Read every part of some files, and call `say` with a line for each damaged one."""
    for file in files:
        for part in file.parts:
            try:
                _get(store, file, part, bytearray())
            except (IndexFormatError, StoreError) as error:
                say(str(error))


def _put(store: Store, content: bytes) -> Part:
    key = secrets.token_hex(20)
    store.put(ChunkKey(key), content)
    return Part(key, len(content), xxhash.xxh3_64_hexdigest(content))


def _get(store: Store, file: File, part: Part, room: bytearray) -> memoryview:
    """Read a part into `room`, or into separate memory where that is too small."""
    reason = "it is missing"
    try:
        record = store.open(ChunkKey(part.key))
        if record is not None:
            with closing(record):
                if record.size_bytes != part.size:
                    raise RecordError(f"it has {record.size_bytes} bytes, expected {part.size}")
                if part.size > len(room):
                    room = room_for(record)
                content = memoryview(room)[: part.size]
                record.read_into(0, content)
            if xxhash.xxh3_64_hexdigest(content) == part.checksum:
                return content
            reason = "its checksum differs from what the log says"
    except RecordError as error:
        reason = str(error)
    raise IndexFormatError(
        f"segment {part.key} of {file.name!r} in {store.url} is damaged ({reason}): put it back "
        "from a copy of the bucket; or, on a machine whose view is whole, publish that with 'kvrag "
        "verify --repair'"
    )


_MOST_BYTES = 1 << 31  # of JSON: a window has 32,768 tokens, and any number of small documents


def pack(change: Change) -> bytes:
    """Return a change as the bytes of a segment."""
    import numpy as np  # late: most commands need neither
    from safetensors.numpy import save

    if change.remove_chunks:
        said: dict[str, Any] = {"drop": change.remove_chunks}
        vectors = [np.empty((0, 0), np.float32)]
    else:
        rows = [row for *_, rows in change.put for row in rows]
        vectors = [row.embedding for row in rows] or [np.empty((0, 0), np.float32)]
        said = {
            "forget_files": change.forget_files,
            "remove": change.remove,
            "put": [
                [source, file, digest, dict(metadata), [_said(row) for row in rows]]
                for source, file, digest, metadata, rows in change.put
            ],
            "put_files": [asdict(one) for one in change.put_files],
            "encode": change.encode,
            "after": change.after,
        }
    text = zlib.compress(json.dumps(said, allow_nan=False).encode(), 1)
    return bytes(
        save(
            {
                "change": np.frombuffer(text, np.uint8),
                "vectors": np.concatenate(vectors).astype("<f4"),
            }
        )
    )


def unpack(content: bytes, where: str) -> Change:
    """Return the change in a segment's bytes. Raises IndexFormatError, which names `where`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        unzip = zlib.decompressobj()
        said = json.loads(unzip.decompress(tensors["change"].tobytes(), _MOST_BYTES))
        if "drop" in said:
            return Change(remove_chunks=[str(one) for one in said["drop"]])
        vectors = _Vectors(tensors["vectors"])
        return Change(
            forget_files=said["forget_files"],
            remove=said["remove"],
            put=[
                (source, file, digest, metadata, [_row(source, one, vectors) for one in rows])
                for source, file, digest, metadata, rows in said["put"]
            ],
            put_files=[FileState(**one) for one in said["put_files"]],
            encode={one: _contexts(ids) for one, ids in said.get("encode", {}).items()},
            after={one: tuple(ids) for one, ids in said.get("after", {}).items()},
        )
    except (SafetensorError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise IndexFormatError(
            f"{where} holds no change that this kvrag can read ({error}); use the kvrag that wrote "
            "it, or a newer one"
        ) from error


class _Vectors:
    """Takes the vectors of one chunk after the other from a matrix."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self._next = 0

    def take(self, count: int) -> Any:
        found = self._matrix[self._next : self._next + count]
        if len(found) != count:
            raise ValueError(f"{len(self._matrix)} vectors are fewer than its chunks have")
        self._next += count
        return found


def _said(row: ChunkRow) -> list[Any]:
    chunk = row.chunk
    return [
        chunk.chunk_id,
        chunk.text,
        chunk.token_ids,
        chunk.token_starts,
        chunk.ordinal,
        dict(chunk.metadata),
        chunk.contexts,
        [key.digest for key in row.keys],
        len(row.embedding),
    ]


def _contexts(values: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, values))


def _row(source: str, values: list[Any], vectors: _Vectors) -> ChunkRow:
    chunk_id, text, ids, starts, ordinal, metadata, contexts, keys, count = values
    chunk = Chunk(
        chunk_id,
        text,
        tuple(ids),
        tuple(starts),
        source,
        ordinal,
        metadata,
        _contexts(contexts),
    )
    return ChunkRow(chunk, [ChunkKey(one) for one in keys], vectors.take(count))


_APPLIED = "applied.json"


def applied(view: Path) -> dict[int, str]:
    """Return the names by number (`Manifest.names`) of the versions that a view may be at."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        found = json.loads((view / _APPLIED).read_bytes())
        return {int(number): str(name) for number, name in found.items()}
    return {}


def note_applied(view: Path, names: Mapping[int, str]) -> None:
    """Record the names of the version that a view is at, and of those that it will be at."""
    if applied(view) != names:
        write_atomically(view / _APPLIED, json.dumps(names).encode())


def forget_applied(view: Path) -> None:
    """Say that a view's catalog may be anything, before it is replaced."""
    (view / _APPLIED).unlink(missing_ok=True)


def build(folder: Path, config: IndexConfig, head: Manifest, segments: Store, store: Store) -> None:
    """Write a catalog, and caches if there are any, to a folder without them.

    Parameters
    ----------
    head
        The version whose base is wanted; without a base, the catalog is empty.
    segments, store
        The segments, and the store of the records, whose key the catalog has.
    """
    if head.base is not None:
        for file in head.base.files:
            get_file(segments, file, folder / file.name)
        return
    with contextlib.closing(make_catalog(folder, config, store)) as catalog:
        write_through(catalog)
    for end in ("-wal", "-shm"):
        (folder / f"{FILE_NAME}{end}").unlink(missing_ok=True)
