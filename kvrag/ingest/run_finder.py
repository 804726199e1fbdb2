"""Runs of an index's chunks in prompts: a table of fingerprints that follows the catalog."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import Chunk
from kvrag.fusion import runs as r
from kvrag.fusion.layout import Layout
from kvrag.ingest import cachefile
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.config import RUNS_NAME as FILE_NAME
from kvrag.ingest.schema import NO_GENERATION
from kvrag.models.known_text import ids_of

# Text that very many chunks have in common, such as a licence, says little about which it is.
_MAX_ROWS = 32
_MAX_CANDIDATES = 128
_MAX_HINTS = 16
_BATCH = 4096  # chunks read before they are hashed


@dataclass(frozen=True)
class FilledLayout:
    """A layout with the runs found in it.

    Attributes
    ----------
    layout
        The layout, with spans for runs.
    chunks
        The chunks of the new spans, by id.
    fresh
        The stretches that no span covers, and why.
    """

    layout: Layout
    chunks: Mapping[str, Chunk] = field(default_factory=dict)
    fresh: tuple[r.Stretch, ...] = ()


class RunFinder:
    """Finds stored chunks' tokens in prompts wherever the text was cut. Safe to use from threads.

    The table is read from its file at the first prompt, or made from the catalog. Later, only new
    chunks are added; removed ones stay in the table, without effect, until they are half of it.

    Parameters
    ----------
    catalog
        The index's catalog.
    decode
        Returns the text of token ids.
    """

    def __init__(self, catalog: Catalog, decode: r.Decode) -> None:
        self._catalog = catalog
        self._decode = decode
        self._refreshing = threading.Lock()
        self._version: tuple[int, bytes] | None = None
        self._table: Table | None = None

    @property
    def fingerprints(self) -> r.Fingerprints:
        """The table of fingerprints of the catalog's present chunks. Raises as the catalog does."""
        with self._refreshing:
            version = self._catalog.version()
            if self._table is None or version != self._version:
                known = self._table or _read(self._catalog) or Table()
                # Only a whole reading counts: one that fails is made again at the next prompt.
                found = self._current(known)
                if self._table is None and found.version != known.version:
                    keep_table(self._catalog, found)
                self._table, self._version = found, version
            return self._table.fingerprints

    def _current(self, table: Table) -> Table:
        """Return the table with the catalog's new chunks."""
        version = self._catalog.version()
        if version == table.version and version[0] != NO_GENERATION:
            return table
        rows, marks = self._catalog.texts.marks()
        if len(rows) * 2 < len(table.marks) or not table.covers(rows, marks):
            table = Table()
        last_row = table.last_row

        def new_chunks() -> Iterator[tuple[int, r.Ids]]:
            nonlocal last_row
            while batch := self._catalog.texts.tokens_behind(last_row, _BATCH):
                last_row = batch[-1][0]
                yield from ((row, _unpacked(ids)) for row, ids in batch)

        fingerprints = table.fingerprints.with_chunks(new_chunks())
        known = np.union1d(table.marks, marks[rows <= last_row])
        return Table(fingerprints, last_row, known, version)

    def fill(
        self,
        layout: Layout,
        chunks: Mapping[str, Chunk],
        hints: Sequence[str] = (),
        retrieved: Sequence[str] = (),
    ) -> FilledLayout:
        """Return a layout with further spans, for runs inside chunks.

        Parameters
        ----------
        layout
            The layout of whole chunks.
        chunks
            The chunks of its spans, by id.
        hints
            Ids of chunks that the prompt probably contains. They decide between chunks with the
            same tokens.
        retrieved
            Ids of chunks found by the latest searches. They and `hints` are compared even if they
            have no fingerprint in the prompt: perhaps only short runs of their text are left.

        Raises
        ------
        IndexFormatError, StoreError
            If the catalog cannot be read.
        """
        gaps = r.gaps_of(layout)
        if not gaps:
            return self._explained(layout, chunks, ())
        token_ids = ids_of(layout.token_ids).astype(np.int32)
        rows = self._likely_rows(token_ids, gaps)
        partly = [span for span in layout.spans if not span.is_whole(chunks[span.chunk_id])]
        candidates = {
            span.chunk_id: np.array(chunks[span.chunk_id].token_ids, np.int32) for span in partly
        }
        likely = dict.fromkeys([*hints, *retrieved])
        hinted = [one for one in likely if one not in chunks][:_MAX_HINTS]
        for chunk_id, ids in self._catalog.texts.token_ids_of(rows, hinted).items():
            candidates.setdefault(chunk_id, _unpacked(ids))
        runs, usable = r.find_runs(token_ids, gaps, candidates, self._decode, partly)
        if not usable:
            return self._explained(layout, chunks, runs)
        chosen = r.choose_runs(usable, hints)
        wanted = {run.chunk_id for one in chosen for run in (one.run, *one.others)}
        found = {
            chunk_id: chunk
            for chunk_id, chunk in self._catalog.find_chunks(wanted).items()
            if chunk is not None
        }
        filled = r.fill(layout, chosen, {**found, **chunks}, hints)
        filled = replace(filled, chunk_ids=_chunk_ids(layout, filled))
        explained = self._explained(filled, {**found, **chunks}, runs)
        placed = {span.chunk_id for span in filled.spans}
        new = {chunk_id: chunk for chunk_id, chunk in found.items() if chunk_id in placed}
        return replace(explained, chunks=new)

    def _explained(
        self, layout: Layout, chunks: Mapping[str, Chunk], runs: Sequence[r.Run]
    ) -> FilledLayout:
        fresh = r.why_fresh(layout, chunks, runs, self._decode)
        return FilledLayout(replace(layout, fresh_reasons=r.counted(fresh)), fresh=fresh)

    def _likely_rows(self, token_ids: r.Ids, gaps: Sequence[r.Gap]) -> list[int]:
        """Return the rows of the chunks with the most, and the rarest, fingerprints in the gaps."""
        hashes = r.ngram_hashes(token_ids)
        long = [gap for gap in gaps if gap[1] - gap[0] >= r.MIN_RUN]
        if not long:
            return []
        minima = [r.window_minima(hashes[first : last - r.NGRAM + 1]) for first, last in long]
        places, rows = self.fingerprints.look_up(np.unique(np.concatenate(minima)), _MAX_ROWS)
        if not len(rows):
            return []
        weights: NDArray[np.float64] = 1.0 / np.bincount(places)[places]
        distinct, inverse = np.unique(rows, return_inverse=True)
        votes = np.bincount(inverse, weights)
        return [int(row) for row in distinct[np.argsort(-votes, kind="stable")[:_MAX_CANDIDATES]]]


def _chunk_ids(layout: Layout, filled: Layout) -> tuple[str, ...]:
    """Return the chunks of a filled layout in prompt order, and those that gave no span."""
    placed = dict.fromkeys(span.chunk_id for span in filled.spans)
    return (*placed, *(one for one in dict.fromkeys(layout.chunk_ids) if one not in placed))


def _unpacked(packed: bytes) -> r.Ids:
    return np.frombuffer(packed[: len(packed) // 4 * 4], "<i4").astype(np.int32, copy=False)


_VERSION = 2  # raise it when fingerprints are made in another way

Marks = NDArray[np.uint64]


@dataclass(frozen=True)
class Table:
    """Fingerprints of the chunks up to a row.

    Attributes
    ----------
    last_row
        That row.
    marks
        Marks of those chunks (`kvrag.ingest.schema.vector_mark`), also of removed ones.
    version
        The catalog's version that it covers.
    """

    fingerprints: r.Fingerprints = field(default_factory=r.Fingerprints)
    last_row: int = -1
    marks: Marks = field(default_factory=lambda: np.empty(0, np.uint64))
    version: tuple[int, bytes] = (NO_GENERATION, b"")

    def covers(self, rows: NDArray[np.int64], marks: Marks) -> bool:
        """Return whether it has the chunks that the catalog has up to its last row."""
        return bool(np.isin(marks[rows <= self.last_row], self.marks).all())


def keep_table(catalog: Catalog, table: Table) -> None:
    """Write a table beside the catalog, if the folder allows it."""
    generation, of = table.version
    if generation == NO_GENERATION:
        return
    said = {"version": _VERSION, "last_row": table.last_row, "generation": generation}
    parts = [
        part.astype("<u8", copy=False).tobytes()
        for part in (table.marks, *table.fingerprints.parts)
    ]
    cachefile.keep(catalog, FILE_NAME, said | {"of": of.hex()}, *parts)


def forget_removed(catalog: Catalog) -> None:
    """Take the fingerprints of removed chunks out of the file, if there is one."""
    path = catalog.path.with_name(FILE_NAME)
    if not path.exists():
        return
    table = _read(catalog)
    rows, marks = catalog.texts.marks()
    if table is None or not table.covers(rows, marks):
        with contextlib.suppress(OSError):
            path.unlink()
    elif len(table.marks) != len(marks := marks[rows <= table.last_row]):
        kept = table.fingerprints.of_rows(rows)
        keep_table(catalog, replace(table, fingerprints=kept, marks=marks))


def _read(catalog: Catalog) -> Table | None:
    found = cachefile.kept(catalog, FILE_NAME, _VERSION)
    if found is None:
        return None
    said = found[0]
    marks, *parts = (np.frombuffer(part, "<u8").astype(np.uint64) for part in found[1])
    version = said["generation"], bytes.fromhex(said["of"])
    return Table(r.Fingerprints(tuple(parts)), said["last_row"], marks, version)
