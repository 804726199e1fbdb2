"""Planning what to load for a request. The scheduler plans, the worker loads.

A server gets token ids, not text. A table holds the first ids of every chunk. If a prompt's ids
agree with an entry, the chunk's ids are compared one by one, and the longest agreement is taken.
This needs no separators. The surrounding text may have changed a chunk's first tokens, so a chunk
is also found from its second or third token on. In the other ids, the index's `RunFinder` then
finds runs inside chunks.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrag.chunk import Chunk
from kvrag.errors import KVRagError, ParameterError
from kvrag.fusion.controller import Choice, LoadingController, calibrated
from kvrag.fusion.layout import (
    MAX_EDGE_TOKENS,
    MISS_OWNER_UNCLEAR,
    FoundText,
    Layout,
    ReusedSpan,
    choose_records,
    shared_beginning,
)
from kvrag.ingest.index import Index
from kvrag.ingest.schema import pack_ids
from kvrag.llms.vllm.settings import ConnectorSettings, RequestParams
from kvrag.models.tokens import num_equal

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
        beginning = shared_beginning(ids, self._index.prefix_ids)
        has_writer = bool(self._index.config.writer)
        layout = Layout(ids, (), *beginning, has_writer=has_writer)
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
        own = chunk.token_ids[offset:]
        length = num_equal(ids[place : place + len(own)], own)
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


logger = logging.getLogger("kvrag")

MAX_ASKED_TOKENS = 512
"""Tokens after the last chunk that fusing computes, for policies that observe the question.

The engine computes the rest of the prompt in its own batches.
"""


@dataclass(frozen=True)
class LoadPlan:
    """The rows of a prompt that come from kvrag: ``[0, num_tokens)``.

    Attributes
    ----------
    num_tokens
        Number of rows offered to the engine.
    salt
        Identifies exactly these rows; the engine finds cached blocks of them only under this salt.
    layout, policy
        The layout to fuse, and the policy.
    """

    num_tokens: int
    salt: str
    layout: Layout
    policy: Choice


@dataclass(frozen=True)
class Load:
    """Rows ``[start, end)`` of one request, and the blocks of the engine's cache for them."""

    request_id: str
    plan: LoadPlan
    block_ids: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class NoPlan:
    """Why the engine computes a request; empty if there was nothing to look for."""

    reason: str = ""


class Planner:
    """Decides for every request what kvrag loads for it. Loads no weights.

    Parameters
    ----------
    index
        The index whose chunks to look for.
    settings
        The operator's settings.
    """

    def __init__(self, index: Index, settings: ConnectorSettings) -> None:
        self._index = index
        self._settings = settings
        self._finder = TokenFinder(index)

    def plan(self, token_ids: Sequence[int], params: Mapping[str, Any] | None) -> LoadPlan | NoPlan:
        """Return what to load for a prompt, or why nothing is loaded.

        It raises nothing: if anything is wrong with a request, the index or a store, the engine
        computes the prompt.
        """
        try:
            return self._plan(token_ids, RequestParams.parse(params))
        except (
            Exception
        ) as error:  # a client's values are unchecked, and must not stop other requests
            what = str(error) if isinstance(error, KVRagError) else repr(error)
            logger.warning("a prompt of %d tokens is computed: %s", len(token_ids), what)
            return NoPlan(what)

    def _plan(self, token_ids: Sequence[int], request: RequestParams | None) -> LoadPlan | NoPlan:
        if request is None:
            if not self._settings.find_chunks:
                return NoPlan()
            request = RequestParams()
        if not request.reuse or len(token_ids) < 2:
            return NoPlan()
        policy = request.make_policy(self._settings, self._index.config.chunk_context.default_ratio)
        policy = calibrated(policy, lambda: self._index.calibration)
        layout = self._finder.find(token_ids)
        if not layout.spans:
            return NoPlan("; ".join(layout.misses))
        if len(token_ids) >= self._index.config.max_positions:
            raise ParameterError("the prompt fills the context window")
        num_tokens = len(_cut(layout, policy, self._index.config.num_layers)) - 1
        layout = replace(layout, token_ids=layout.token_ids[: num_tokens + 1])
        return LoadPlan(num_tokens, _salt_of(layout, policy), layout, policy)


def _cut(layout: Layout, policy: Choice, num_layers: int) -> tuple[int, ...]:
    """Return the tokens to fuse: up to the last chunk's end, and one more or the question."""
    end = layout.spans[-1].prompt_end
    asks = isinstance(policy, LoadingController) or bool(policy.policy.question_layers(num_layers))
    return layout.token_ids[: end + (MAX_ASKED_TOKENS if asks else 1)]


def _salt_of(layout: Layout, policy: Choice) -> str:
    """Return the salt that identifies the rows of a fused prompt."""
    spans = [
        (span.chunk_id, span.prompt_start, span.chunk_start, span.length, span.context_ids)
        for span in layout.spans
    ]
    ids = struct.pack(f"<{len(layout.token_ids)}q", *layout.token_ids)
    digest = hashlib.blake2b(f"{policy} {spans} ".encode() + ids, digest_size=20).hexdigest()
    return f"kvrag-{digest}"
