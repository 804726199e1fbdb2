"""Finding known chunks anywhere in the token ids of a prompt.

A server gets token ids, not text. A table holds the first ids of every chunk. If a prompt's ids
agree with an entry, the chunk's ids are compared one by one, and the longest agreement is taken.
This needs no separators. The surrounding text may have changed a chunk's first tokens, so a chunk
is also found from its second or third token on. In the other ids, the index's `RunFinder` then
finds runs inside chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kvrag.chunk import Chunk
from kvrag.fusion.layout import (
    MAX_EDGE_TOKENS,
    MISS_OWNER_UNCLEAR,
    Layout,
    ReusedSpan,
    shared_beginning,
)
from kvrag.fusion.records import FoundText, choose_records
from kvrag.ingest.index import Index
from kvrag.ingest.rows import pack_ids

HEAD_TOKENS = 8
"""Number of tokens looked up at every place of a prompt; shorter chunks are never found."""

MIN_CUT_TOKENS = 16
"""Number of tokens that must agree for a part of a chunk to count."""

# If very many chunks begin alike, comparing all of them would cost more than it saves.
_MAX_CANDIDATES = 64


class TokenFinder:
    """Finds an index's chunks in the token ids of prompts.

    You can use it from several threads. It follows changes of the index.

    Raises
    ------
    IndexFormatError, StoreError
        If the catalog cannot be read.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._version: tuple[int, bytes] | None = None
        self._heads: dict[bytes, list[tuple[str, int]]] = {}
        self._table()  # so that the first prompt does not wait for it
        _ = index.run_finder.fingerprints

    def find(self, token_ids: Sequence[int]) -> Layout:
        """Return the layout of a prompt: its token ids, and the spans that stored KV can fill.

        Raises
        ------
        IndexFormatError, StoreError
            If the catalog cannot be read.
        """
        ids = tuple(token_ids)
        layout = Layout(ids, (), *shared_beginning(ids, self._index.prefix_ids))
        found = self._search(ids, layout.prefix_length if layout.has_prefix else 0)
        spans = [span for span, _ in found]
        tells_apart = self._index.config.chunk_context.tells_apart
        chosen = choose_records(
            # Otherwise chunks with the same text are interchangeable, however many there are.
            [replace(text, has_more=text.has_more and tells_apart) for _, text in found],
            lambda number, context: layout.is_exact(replace(spans[number], context_ids=context)),
        )
        standing = []
        for span, record in zip(spans, chosen, strict=True):
            if record is not None:
                chunk, context_ids = record
                standing.append(replace(span, chunk_id=chunk.chunk_id, context_ids=context_ids))
        num_unclear = len(spans) - len(standing)
        layout = replace(
            layout,
            spans=tuple(standing),
            misses={MISS_OWNER_UNCLEAR: num_unclear} if num_unclear else {},
            chunk_ids=tuple(dict.fromkeys(span.chunk_id for span in standing)),
        )
        chunks = {chunk.chunk_id: chunk for _, text in found for chunk in text.chunks}
        return self._index.run_finder.fill(layout, chunks).layout

    def _search(self, ids: tuple[int, ...], start: int) -> list[tuple[ReusedSpan, FoundText]]:
        heads = self._table()
        packed = pack_ids(ids)
        end = len(ids) - 1  # the last token is always computed
        hits = {
            place: heads[head]
            for place in range(start, end - HEAD_TOKENS + 1)
            if (head := packed[4 * place : 4 * (place + HEAD_TOKENS)]) in heads
        }
        wanted = {chunk_id for some in hits.values() for chunk_id, _ in some[:_MAX_CANDIDATES]}
        chunks = {chunk.chunk_id: chunk for chunk in self._index.get_chunks(sorted(wanted))}
        found = []
        free = start
        for place, candidates in hits.items():
            if place < free:
                continue
            best = _longest(ids[:end], place, candidates[:_MAX_CANDIDATES], chunks)
            if best is not None:
                found.append(best)
                free = best[0].prompt_end
        return found

    def _table(self) -> dict[bytes, list[tuple[str, int]]]:
        with self._lock:
            if self._version != self._index.catalog.version():
                # Made again, not changed in place: other threads may be searching the old one.
                heads: dict[bytes, list[tuple[str, int]]] = {}

                def add(chunk_id: str, first: bytes, length: int) -> None:
                    for offset in range(min(MAX_EDGE_TOKENS, length - HEAD_TOKENS) + 1):
                        head = first[4 * offset : 4 * (offset + HEAD_TOKENS)]
                        heads.setdefault(head, []).append((chunk_id, offset))

                catalog = self._index.catalog
                self._version = catalog.texts.each_head(HEAD_TOKENS + MAX_EDGE_TOKENS, add)
                self._heads = heads
            return self._heads


def _longest(
    ids: tuple[int, ...],
    place: int,
    candidates: Sequence[tuple[str, int]],
    chunks: dict[str, Chunk],
) -> tuple[ReusedSpan, FoundText] | None:
    """Return the longest run of a candidate's tokens at `place`, and all chunks that share it."""
    best = ReusedSpan("", place, 0, 0)
    owners: list[Chunk] = []
    for chunk_id, offset in candidates:
        chunk = chunks.get(chunk_id)
        if chunk is None:
            continue
        length = _num_equal(ids, place, chunk.token_ids, offset)
        if length > best.length:
            best, owners = ReusedSpan(chunk_id, place, offset, length), [chunk]
        elif length == best.length and offset == best.chunk_start:
            owners.append(chunk)
    if not owners:
        return None
    is_whole = best.length >= len(owners[0].token_ids) - MAX_EDGE_TOKENS
    if best.length < (HEAD_TOKENS if is_whole else MIN_CUT_TOKENS):
        return None
    return best, FoundText(owners, is_whole, has_more=len(candidates) == _MAX_CANDIDATES)


def _num_equal(ids: tuple[int, ...], place: int, others: tuple[int, ...], offset: int) -> int:
    """Return how many of `others`, from `offset` on, equal `ids` from `place` on."""
    length = min(len(ids) - place, len(others) - offset)
    if ids[place : place + length] == others[offset : offset + length]:
        return length
    for index in range(length):
        if ids[place + index] != others[offset + index]:
            return index
    return length
