"""The table of fingerprints on disk, so that opening an index does not read all tokens again.

The file is a cache beside the catalog. It is never trusted: one with another seal is made again,
and one of an earlier version of the catalog is used only if it covers the texts that the catalog
has in those rows. An encrypted catalog has none.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag.errors import StoreError
from kvrag.fusion.fingerprints import Fingerprints
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import RUNS_NAME as FILE_NAME
from kvrag.ingest.config import write_atomically
from kvrag.ingest.schema import NO_GENERATION
from kvrag.regularfile import open_regular

_MAGIC = b"KVRAGRUN"
# magic, version, number of parts, last row, number of marks, generation, documents, seal
_HEADER = struct.Struct("<8sIIqQq16s16s")
_VERSION = 1  # raise it when fingerprints are made in another way

Marks = NDArray[np.uint64]


@dataclass(frozen=True)
class Table:
    """Fingerprints of the chunks up to a row.

    Attributes
    ----------
    last_row
        That row.
    marks
        Marks of those chunks (`kvrag.ingest.rows.vector_mark`), also of removed ones.
    version
        The catalog's version that it covers.
    """

    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    last_row: int = -1
    marks: Marks = field(default_factory=lambda: np.empty(0, np.uint64))
    version: tuple[int, bytes] = (NO_GENERATION, b"")

    def covers(self, rows: NDArray[np.int64], marks: Marks) -> bool:
        """Return whether it has the chunks that the catalog has up to its last row."""
        return bool(np.isin(marks[rows <= self.last_row], self.marks).all())

    def without_removed(self, rows: NDArray[np.int64], marks: Marks) -> Table:
        """Return the table with the fingerprints of the catalog's present chunks alone."""
        if len(self.marks) == np.count_nonzero(rows <= self.last_row):
            return self
        kept = self.fingerprints.of_rows(rows)
        return Table(kept, self.last_row, marks[rows <= self.last_row], self.version)


def load_table(catalog: Catalog) -> Table:
    """Return the table on disk; an empty one if there is none that fits the catalog."""
    table = _read(catalog)
    if table is None:
        return Table()
    return (
        table if table.version == catalog.version() or table.covers(*catalog.marks()) else Table()
    )


def keep_table(catalog: Catalog, table: Table) -> None:
    """Write a table beside the catalog, if the folder allows it."""
    if catalog.cipher_key is not None or table.version[0] == NO_GENERATION:
        return
    parts = [part.astype("<u8", copy=False).tobytes() for part in table.fingerprints.parts]
    sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    body = [sizes, table.marks.astype("<u8").tobytes(), *parts]
    said = (_MAGIC, _VERSION, len(parts), table.last_row, len(table.marks), *table.version)
    with contextlib.suppress(StoreError):
        write_atomically(_path(catalog), _HEADER.pack(*said, _seal(catalog, said, body)), *body)


def forget_removed(catalog: Catalog) -> None:
    """Take the fingerprints of removed chunks out of the file, if there is one."""
    path = _path(catalog)
    if not path.exists():
        return
    table = _read(catalog)
    places = catalog.marks()
    if table is None or not table.covers(*places):
        with contextlib.suppress(OSError):
            path.unlink()
    elif (kept := table.without_removed(*places)) is not table:
        keep_table(catalog, kept)


def _path(catalog: Catalog) -> Path:
    return catalog.path.with_name(FILE_NAME)


def _read(catalog: Catalog) -> Table | None:
    if catalog.cipher_key is not None:
        return None
    try:
        with open_regular(_path(catalog)) as file:
            content = memoryview(file.read())
    except OSError:
        return None
    if len(content) < _HEADER.size:
        return None
    *said, seal = _HEADER.unpack_from(content)
    magic, version, num_parts, last_row, num_marks, *of = said
    body = content[_HEADER.size :]
    if (magic, version) != (_MAGIC, _VERSION) or len(body) < 8 * (num_parts + num_marks):
        return None
    if _seal(catalog, said, [body]) != seal:
        return None
    place = 8 * num_parts
    sizes = struct.unpack(f"<{num_parts}Q", body[:place])
    arrays = []
    for size in (8 * num_marks, *sizes):
        arrays.append(np.frombuffer(body[place : place + size], "<u8").astype(np.uint64))
        place += size
    marks, *parts = arrays
    return Table(Fingerprints(tuple(parts)), last_row, marks, (of[0], of[1]))


def _seal(catalog: Catalog, said: Sequence[Any], parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the catalog's seal of a file, which covers a faster digest of its content."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return catalog.checksum(_HEADER.pack(*said, digest.digest()))
