"""Caches beside the catalog: one file each, sealed, and made again where it does not fit."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvrag.errors import StoreError
from kvrag.ingest.config import VECTORS_NAME, write_atomically
from kvrag.regularfile import open_regular

if TYPE_CHECKING:
    from kvrag.ingest.catalogfile import CatalogFile

GRAPH_FROM = 50_000
"""With more vectors than this, a graph finds the nearest ones."""

ROW_BYTES = 17
"""Memory of a vector beside its numbers: its row, its mark, and whether it is of a gone chunk."""

_MAGIC = b"KVRAGCCH"
_HEADER = struct.Struct("<8sI16s")
"""Magic, bytes of the head, the catalog's seal of the head (JSON), which has the parts' digest."""


def keep(catalog: CatalogFile, name: str, said: Mapping[str, Any], *parts: bytes) -> None:
    """Write a cache, if the folder allows it; beside an encrypted catalog there is none."""
    if catalog.cipher_key is not None:
        return
    told = {**said, "sizes": [*map(len, parts)], "digest": _digest(*parts)}
    head = json.dumps(told).encode()
    header = _HEADER.pack(_MAGIC, len(head), _seal(catalog, name, head))
    with contextlib.suppress(StoreError):
        write_atomically(catalog.path.with_name(name), header, head, *parts)


def kept(
    catalog: CatalogFile, name: str, version: int
) -> tuple[dict[str, Any], list[memoryview]] | None:
    """Return what a cache says and its parts; None without one of this catalog and version."""
    if catalog.cipher_key is not None:
        return None
    try:
        with open_regular(catalog.path.with_name(name)) as file:
            content = memoryview(file.read())
    except OSError:
        return None
    if (head := _head(content)) is None or content[12:28] != _seal(catalog, name, head):
        return None
    said = json.loads(head)
    body = content[_HEADER.size + len(head) :]
    if said["version"] != version or _digest(body) != said["digest"]:
        return None
    parts, place = [], 0
    for size in said["sizes"]:
        parts.append(body[place : place + size])
        place += size
    return said, parts


def _head(content: bytes | memoryview) -> bytes | None:
    if len(content) < _HEADER.size:
        return None
    magic, size, _ = _HEADER.unpack_from(content)
    return bytes(content[_HEADER.size :][:size]) if magic == _MAGIC else None


def _digest(*parts: bytes | memoryview) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _seal(catalog: CatalogFile, name: str, head: bytes) -> bytes:
    return catalog.checksums.whole([name.encode(), head])


@dataclass(frozen=True)
class VectorStats:
    """What the cache of vectors says of itself.

    Attributes
    ----------
    memory_bytes
        Memory that its vectors take in each process that searches.
    is_graph
        Whether a graph finds the nearest ones, or all are compared.
    of
        The digest of the contents that they are of (`Catalog.version`); None without a cache.
    """

    memory_bytes: int = 0
    is_graph: bool = False
    of: bytes | None = None


def vector_stats(folder: Path) -> VectorStats:
    """Return what the cache in an index's folder says; zeros if there is none."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        with open_regular(folder / VECTORS_NAME) as file:
            head = _head(file.read(1 << 16))
        if head is not None:
            said = json.loads(head)
            return VectorStats(said["memory_bytes"], said["is_graph"], bytes.fromhex(said["of"]))
    return VectorStats()
