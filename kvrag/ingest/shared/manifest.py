"""The log of a shared index: one manifest for each version, which the first writer creates.

Source of the design: the optimistic logs of Delta Lake (Armbrust and others, "Delta Lake:
high-performance ACID table storage over cloud object stores", 2020) and Apache Iceberg.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvrag.arguments import shown
from kvrag.checksum import NAME as CHECKSUM
from kvrag.checksum import checksum
from kvrag.chunk import ChunkKey
from kvrag.errors import IndexFormatError
from kvrag.ingest import config as configs
from kvrag.ingest.catalog import FILE_NAME
from kvrag.ingest.config import RUNS_NAME, VECTORS_NAME, WORDS_NAME, newer_error
from kvrag.ingest.report import GcReport
from kvrag.store.base import Store
from kvrag.store.bucket import Bucket

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


_NEWEST = "newest version"
VERSIONS_SECONDS = 7200.0
"""Manifests stay at least so long: a reader looks for the next one, and lists all each hour."""


class Garbage:
    """What no version of a shared index needs any more.

    Parameters
    ----------
    log, segments
        The log, and the store of its segments.
    newest
        Brings the view up to the newest version, and returns that.
    put_since
        Returns the digests of the records that versions after a given one, up to another, have
        brought; None if that is not known.

    Attributes
    ----------
    removed
        What `collect` has removed: ``"record DIGEST"`` and ``"segment KEY"``.
    """

    def __init__(
        self,
        log: Log,
        segments: Store,
        newest: Callable[[], Manifest],
        put_since: Callable[[int, Manifest], Collection[str] | None],
    ) -> None:
        self._log = log
        self._segments = segments
        self._newest = newest
        self._put_since = put_since
        self.removed: set[str] = set()

    def collect(
        self, records: Store | None, needed: Callable[[], Collection[str]], grace_seconds: float
    ) -> GcReport:
        """Remove old garbage, and list the rest.

        Parameters
        ----------
        records
            The store of the records; None leaves it alone.
        needed
            Returns the digests of the records that the newest version needs.
        grace_seconds
            How long something must have been garbage.
        """
        log, segments = self._log, self._segments
        # Listed before the log is read: what is written and committed meanwhile is no garbage.
        stored = dict(segments.sizes())
        present = {} if records is None else dict(records.sizes())
        head = self._newest()
        used = {part.key for file in head.files() for part in file.parts}
        sizes = {
            f"segment {key.digest}": size for key, size in stored.items() if key.digest not in used
        }
        if present:
            wanted = needed()
            sizes |= {
                f"record {key.digest}": size
                for key, size in present.items()
                if key.digest not in wanted
            }
        sizes |= {f"version {one}": 0 for one in log.versions() if one < head.version}
        listed, now = log.garbage(), time.time()
        since = {name: min(listed.get(name, now), now) for name in sizes}
        if again := [name for name in sizes if name in listed and name.startswith("record ")]:
            # What was needed again since then has been garbage for less time than the list says.
            put = self._put_since(int(listed[_NEWEST]), head) if _NEWEST in listed else None
            for name in again:
                if put is None or name.partition(" ")[2] in put:
                    since[name] = now
        old = [
            name for name, first in since.items() if now - first >= _grace_of(name, grace_seconds)
        ]
        num_records = num_others = size_bytes = 0
        for name in old:
            kind, _, what = name.partition(" ")
            if kind == "version":
                log.delete(int(what))
                num_others += 1
            elif kind == "segment":
                self.removed.add(name)
                num_others += segments.delete(ChunkKey(what))
            elif records is not None:
                self.removed.add(name)
                if records.delete(ChunkKey(what)):
                    num_records += 1
                    size_bytes += sizes[name]
            del since[name]
        log.list_garbage({**since, _NEWEST: head.version})
        return GcReport(num_records, size_bytes, num_others)


def _grace_of(name: str, grace_seconds: float) -> float:
    return max(grace_seconds, VERSIONS_SECONDS) if name.startswith("version ") else grace_seconds
