"""The log of a shared index: one manifest for each version, which the first writer creates.

The segments that it names are immutable records in a separate store. A part's key is drawn by
chance, so no two files share one, and garbage collection of one file never touches another. The
store encrypts parts if the index has a key.

Source of the design: the optimistic logs of Delta Lake (Armbrust and others, "Delta Lake:
high-performance ACID table storage over cloud object stores", 2020) and Apache Iceberg.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, RecordError, StoreError
from kvrag.ingest import config as configs
from kvrag.ingest.catalog import FILE_NAME
from kvrag.ingest.catalogfile import write_through
from kvrag.ingest.config import (
    RUNS_NAME,
    VECTORS_NAME,
    WORDS_NAME,
    IndexConfig,
    newer_error,
    write_atomically,
)
from kvrag.ingest.encryption import make_catalog
from kvrag.ingest.schema import Change, ChunkRow, FileState
from kvrag.regularfile import NAME as CHECKSUM
from kvrag.regularfile import checksum, open_regular
from kvrag.store.base import Store, room_for
from kvrag.store.file import store_errors
from kvrag.store.objects import Bucket

FORMAT = 1
CHANGE = "change"
CONFIG = configs.FILE_NAME
RUNNING = "running"
_KIND = "kvrag shared index"
_GARBAGE = "garbage.json"
_COLLECTING = "collecting.txt"
_NAME = re.compile(r"([0-9]{12})\.json")
# They become names of files here, and anyone who may write to the bucket may have written them.
_KEY = re.compile(r"[0-9a-f]{40}")
_BASE_FILES = {FILE_NAME, VECTORS_NAME, RUNS_NAME, WORDS_NAME}


@dataclass(frozen=True)
class Part:
    """A stored piece of a file: its key in the store of segments, its size and its checksum."""

    key: str
    size: int
    checksum: str


@dataclass(frozen=True)
class File:
    """A file in parts."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Delta:
    """What made a version out of the one before; nothing if it has no content.

    Attributes
    ----------
    previous
        The checksum of the manifest before; "" if a kvrag wrote it that does not record this.
    """

    version: int
    content: File | None
    previous: str = ""


@dataclass(frozen=True)
class Base:
    """The whole catalog at a version, with the caches beside it."""

    version: int
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(one.size for one in self.files)


@dataclass(frozen=True)
class Manifest:
    """One version of a shared index.

    Attributes
    ----------
    version
        Counted from 0, the empty index. It is the generation of the catalog too.
    time
        When it was written, in seconds since 1970, by the writer's clock.
    index_id
        The index's own id, which another index at the same URL does not have.
    key_check
        Check value of the index's key (`IndexConfig.key_check`).
    config
        The settings.
    profiles
        Codec profiles; the name of each file is its hash.
    base
        The latest whole catalog; None if there is none yet.
    deltas
        The changes since the base, and those since the base before, for readers that follow.
    digest, tag
        The checksum that it was written with, and what the bucket tells its object by; "" before
        it is written.
    """

    version: int
    time: float
    index_id: str
    key_check: str
    config: File
    profiles: tuple[File, ...] = ()
    base: Base | None = None
    deltas: tuple[Delta, ...] = ()
    format: int = field(default=FORMAT)
    digest: str = field(default="", compare=False)
    tag: str = field(default="", compare=False)

    @property
    def behind_base(self) -> tuple[Delta, ...]:
        """The deltas that a reader applies to the base."""
        start = 0 if self.base is None else self.base.version
        return tuple(one for one in self.deltas if one.version > start)

    def files(self) -> list[File]:
        """Return every file that this version names."""
        base = () if self.base is None else self.base.files
        contents = [one.content for one in self.deltas if one.content is not None]
        return [self.config, *self.profiles, *base, *contents]

    def names(self) -> dict[int, str]:
        """Return what tells this version, and each one before it, from another of its number.

        That is its checksum; where that is unknown, that this version comes after it.
        """
        found = {one.version - 1: one.previous or self._before for one in self.deltas}
        return {**found, self.version: self.digest}

    def has(self, other: Manifest) -> bool:
        """Return whether this version is another one, or comes after it."""
        name = self.names().get(other.version)
        if name != self._before:
            return name == other.digest
        return any(
            (one.version, one.content) == (other.version, other.deltas[-1].content)
            for one in self.deltas
        )

    @property
    def _before(self) -> str:
        return f"before {self.digest}"

    def follow(self, content: File | None, **changes: Any) -> Manifest:
        """Return the manifest of the next version, made by some content."""
        version = self.version + 1
        deltas = (*self.deltas, Delta(version, content, self.digest))
        return replace(self, version=version, time=time.time(), deltas=deltas, **changes)

    def to_bytes(self) -> bytes:
        values = {"kind": _KIND, **asdict(self)}
        del values["digest"], values["tag"]
        values = json.loads(json.dumps(values))  # tuples become lists, as a reader finds them
        return json.dumps({**values, CHECKSUM: checksum(values)}).encode()


class Log:
    """The manifests in a bucket, each under its version's name.

    Parameters
    ----------
    bucket
        Where they are.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @property
    def url(self) -> str:
        return self._bucket.url

    def check(self) -> None:
        """Raise StoreError unless the bucket answers and lets this process in."""
        self._bucket.check()

    def versions(self, behind: int = -1) -> list[int]:
        """Return the versions that there are, ascending; only those after a given one."""
        names = self._bucket.names(None if behind < 0 else name_of(behind))
        found = (match for one in names if (match := _NAME.fullmatch(one)))
        return [version for one in found if (version := int(one[1])) > behind]

    def read(self, version: int) -> Manifest | None:
        """Return a version's manifest, or None if there is none.

        Raises
        ------
        IndexFormatError
            When it is damaged, or of a newer kvrag.
        """
        found = self._bucket.get_tagged(name_of(version))
        return None if found is None else self._parsed(version, *found)

    def tag(self, version: int) -> str | None:
        """Return what the bucket tells a version's manifest by, or None if there is none."""
        return self._bucket.tag(name_of(version))

    def create(self, manifest: Manifest) -> Manifest | None:
        """Write a version's manifest and return it as written; None if there is one already."""
        content = manifest.to_bytes()
        written = self._parsed(manifest.version, content)  # no reader may be stopped by it
        return written if self._bucket.create(name_of(manifest.version), content) else None

    def delete(self, version: int) -> None:
        """Remove a version's manifest."""
        self._bucket.delete(name_of(version))

    def garbage(self) -> dict[str, float]:
        """Return when garbage was first seen, by name; nothing if the list is damaged."""
        try:
            values = json.loads(self._bucket.get(_GARBAGE) or b"{}")
            return {str(name): float(first) for name, first in values.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            return {}  # begins again: garbage stays for longer

    def list_garbage(self, since: Mapping[str, float]) -> None:
        """Write when garbage was first seen, by name."""
        self._bucket.put(_GARBAGE, json.dumps(dict(since)).encode())

    def collecting(self) -> str:
        """Return what `note_collecting` wrote last: another text after each change."""
        return (self._bucket.get(_COLLECTING) or b"").decode(errors="replace")

    def note_collecting(self, state: str) -> None:
        """Say that garbage is removed from now on (`RUNNING`), or no longer."""
        self._bucket.put(_COLLECTING, f"{state} {secrets.token_hex(8)}".encode())

    def _parsed(self, version: int, content: bytes, tag: str = "") -> Manifest:
        where = f"{self.url}/{name_of(version)}"
        try:
            values = json.loads(content)
            if values["kind"] != _KIND:
                raise ValueError(f"its kind is {shown(values['kind'])}")
            found_format = values["format"]
            if type(found_format) is int and found_format > FORMAT:
                raise newer_error(where, f"at most format {FORMAT}", found_format)
            if found_format != FORMAT:
                raise ValueError(f"its format is {shown(found_format)}, expected {FORMAT}")
            if values[CHECKSUM] != checksum(values):
                raise ValueError("its checksum differs from its content")
            found = replace(_manifest(values), digest=str(values[CHECKSUM]), tag=tag)
            if found.version != version:
                raise ValueError(f"it says that it is version {found.version}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IndexFormatError(
                f"{where} is damaged ({error}): put it back from a copy of the bucket. Without "
                f"one, go back to the version before it, if {self.url} has that: stop all writers "
                f"and 'kvrag gc', remove this file, all later ones and {_GARBAGE}, then ingest "
                "again what was ingested since that version, and delete again what was deleted"
            ) from error
        return found


def name_of(version: int) -> str:
    """Return the name of a version's manifest."""
    return f"{version:012d}.json"


def _manifest(values: dict[str, Any]) -> Manifest:
    base = values["base"]
    return Manifest(
        version=int(values["version"]),
        time=float(values["time"]),
        index_id=str(values["index_id"]),
        key_check=str(values["key_check"]),
        config=_file(values["config"], {CONFIG}),
        profiles=tuple(_file(one, _KEY) for one in values["profiles"]),
        base=None
        if base is None
        else Base(int(base["version"]), tuple(_file(one, _BASE_FILES) for one in base["files"])),
        deltas=tuple(
            Delta(
                int(one["version"]),
                None if one["content"] is None else _file(one["content"], {CHANGE}),
                str(one.get("previous", "")),
            )
            for one in values["deltas"]
        ),
    )


def _file(values: dict[str, Any], names: re.Pattern[str] | Collection[str]) -> File:
    """Return a file whose name is one of those that may be there. Raises ValueError."""
    name = str(values["name"])
    if not (names.fullmatch(name) if isinstance(names, re.Pattern) else name in names):
        raise ValueError(f"a file in it is named {shown(name)}")
    parts = [
        Part(str(one["key"]), int(one["size"]), str(one["checksum"])) for one in values["parts"]
    ]
    for part in parts:
        if not _KEY.fullmatch(part.key) or part.size < 0:
            raise ValueError(f"a segment in it is {shown(part.key)} of {part.size} bytes")
    return File(name, tuple(parts))


NEWEST = "newest version"
"""The name of the newest version in the list of garbage."""
VERSIONS_SECONDS = 7200.0
"""Manifests stay at least so long: a reader looks for the next one, and lists all each hour."""

PART_BYTES = 4 << 20
_THREADS = 8


def put_bytes(store: Store, name: str, content: bytes) -> File:
    """Store some bytes. Raises StoreError."""
    return File(name, (_put(store, content),))


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

    with store_errors("read", path), ThreadPoolExecutor(_THREADS, "kvrag-parts") as pool:
        parts = tuple(pool.map(put, range(0, size, PART_BYTES)))
    return File(path.name, parts)


def get_bytes(store: Store, file: File) -> bytes:
    """Return a file's bytes. Raises IndexFormatError where they are not what was written."""
    return b"".join(_get(store, file, part, bytearray()) for part in file.parts)


def get_file(store: Store, file: File, path: Path) -> None:
    """Write a file's bytes to a new file at `path`. Raises as `get_bytes`, and StoreError."""
    places = itertools.accumulate((part.size for part in file.parts), initial=0)
    rooms = threading.local()  # new memory for each part would cost more than the copy
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with store_errors("write", path), os.fdopen(os.open(path, flags, 0o600), "wb") as made:

        def fetch(part: Part, place: int) -> None:
            if not hasattr(rooms, "room"):
                rooms.room = bytearray(PART_BYTES)
            content = _get(store, file, part, rooms.room)
            written = 0
            while written < len(content):
                written += os.pwrite(made.fileno(), content[written:], place + written)

        with ThreadPoolExecutor(_THREADS, "kvrag-parts") as pool:
            for _ in pool.map(fetch, file.parts, places):
                pass


def damage_of(store: Store, files: Iterable[File]) -> list[str]:
    """Read every part of some files, and return a line for each damaged one."""
    found: list[str] = []
    for file in files:
        for part in file.parts:
            try:
                _get(store, file, part, bytearray())
            except (IndexFormatError, StoreError) as error:
                found.append(str(error))
    return found


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
    tensors = {
        "change": np.frombuffer(text, np.uint8),
        "vectors": np.concatenate(vectors).astype("<f4"),
    }
    return bytes(save(tensors))


def unpack(content: bytes, where: str) -> Change:
    """Return the change in a segment's bytes. Raises IndexFormatError, which names `where`."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        unzip = zlib.decompressobj()
        said = json.loads(unzip.decompress(tensors["change"].tobytes(), _MOST_BYTES))
        if "drop" in said:
            return Change(remove_chunks=[str(one) for one in said["drop"]])
        counts = [row[-1] for *_, rows in said["put"] for row in rows]
        if sum(counts) > len(tensors["vectors"]):
            raise ValueError(f"{len(tensors['vectors'])} vectors are fewer than its chunks have")
        vectors = iter(np.split(tensors["vectors"], list(itertools.accumulate(counts))))
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


def _row(source: str, values: list[Any], vectors: Iterator[Any]) -> ChunkRow:
    chunk_id, text, ids, starts, ordinal, metadata, contexts, keys, _ = values
    chunk = Chunk(
        chunk_id, text, tuple(ids), tuple(starts), source, ordinal, metadata, _contexts(contexts)
    )
    return ChunkRow(chunk, [ChunkKey(one) for one in keys], next(vectors))


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
