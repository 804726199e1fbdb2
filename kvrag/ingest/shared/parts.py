"""Files in parts: the segments of a shared index, immutable records in a separate store.

A part's key is drawn by chance, so no two files share one, and garbage collection of one file never
touches another. The store encrypts parts if the index has a key.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import xxhash

from kvrag.chunk import ChunkKey
from kvrag.errors import IndexFormatError, RecordError, StoreError
from kvrag.ingest.shared.manifest import File, Part
from kvrag.regularfile import open_regular
from kvrag.store.base import Store
from kvrag.store.files import store_error
from kvrag.store.wrapper import room_for

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
