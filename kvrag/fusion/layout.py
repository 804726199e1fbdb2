"""The layout of a prompt: its positions, and which of its tokens come from stored chunks.

The prompt is tokenised as a whole, so its ids are those of the plain pipeline. A chunk found
in the text is then aligned with the prompt's tokens by character offset and token id. If the
surrounding text changed the chunk's first or last tokens, those are left out and computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from kvrag.chunk import Chunk
from kvrag.fusion.segments import Match
from kvrag.models.known_text import ids_of
from kvrag.models.tokens import SpliceOffsets, Tokens, num_equal

# -- which record a text is taken from -----------------------------------------------------------
#
# Chunks of several documents may have the same text, each encoded after different context. KV
# that has seen another document must not be used for this one. If the prompt does not show which
# document is meant, a record without context is chosen, or none.

Record = tuple[Chunk, tuple[int, ...]]
"""A chunk, and the context tokens that this record of it was encoded after."""


@dataclass(frozen=True)
class FoundText:
    """A stretch of the prompt that is the text of a chunk.

    Attributes
    ----------
    chunks
        The chunks with this text, at least one.
    is_whole
        Whether the prompt contains all of the text.
    has_more
        Whether further chunks may have the same text.
    """

    chunks: Sequence[Chunk]
    is_whole: bool
    has_more: bool


def choose_records(
    found: Sequence[FoundText],
    is_exact: Callable[[int, tuple[int, ...]], bool],
    hints: Collection[str] = (),
) -> list[Record | None]:
    """Choose for every text found the record that fits the prompt best.

    The rules apply in this order:

    1. A record that is exact at the text's place.
    2. The record with context of a chunk whose predecessor in the document precedes the text,
       whole; the nearest predecessor counts.
    3. The first record of the chunk. If several chunks have the text: that of the only document
       with more text in the prompt, or that of the chunk hinted at.
    4. If the records that remain have different contexts: a record without context, or None.

    Parameters
    ----------
    found
        The texts in prompt order.
    is_exact
        Takes the number of a text and a context of one of its chunks; returns whether that record
        is exact there.
    hints
        Ids of chunks that the prompt probably contains.
    """
    choice = _Choice(found, hints)
    return [choice.record(number, is_exact) for number in range(len(found))]


class _Choice:
    def __init__(self, found: Sequence[FoundText], hints: Collection[str]) -> None:
        self._found = found
        self._hints = frozenset(hints)

    def record(
        self, number: int, is_exact: Callable[[int, tuple[int, ...]], bool]
    ) -> Record | None:
        here = self._found[number]
        records = [(chunk, ids) for chunk in here.chunks for ids in chunk.contexts]
        if not any(ids for _, ids in records):
            return records[0]
        exact = [record for record in records if is_exact(number, record[1])]
        if exact:
            return exact[0]
        likely = self._behind_predecessors(number, records)
        likely = likely or [(chunk, chunk.contexts[0]) for chunk in here.chunks]
        if here.has_more:
            # The prompt may contain as much of the documents of unknown chunks; hints decide.
            likely = self._hinted(likely)
        elif _differ(likely):
            likely = self._of_present_document(number, likely)
            likely = (self._hinted(likely) or likely) if _differ(likely) else likely
        if likely and not _differ(likely):
            return likely[0]
        return next((record for record in records if not record[1]), None)

    def _behind_predecessors(self, number: int, records: list[Record]) -> list[Record]:
        """Return the records encoded after the nearest predecessor that the prompt has whole."""
        for earlier in reversed(self._found[:number]):
            if earlier.is_whole:
                ends = {(chunk.source, chunk.ordinal + 1) for chunk in earlier.chunks}
                behind = [
                    (chunk, ids)
                    for chunk, ids in records
                    if ids and (chunk.source, chunk.ordinal) in ends
                ]
                if behind:
                    return behind
        return []

    def _of_present_document(self, number: int, likely: list[Record]) -> list[Record]:
        """Return the records of the only document with other text in the prompt."""
        text = self._found[number].chunks[0].text
        candidates = {chunk.source for chunk, _ in likely}
        present = set()
        for other in self._found:
            if not other.has_more and other.chunks[0].text != text:
                # Text that several candidates share supports none of them.
                owners = candidates & {chunk.source for chunk in other.chunks}
                present |= owners if len(owners) == 1 else set()
        if len(present) != 1:
            return likely
        return [(chunk, ids) for chunk, ids in likely if chunk.source in present]

    def _hinted(self, likely: list[Record]) -> list[Record]:
        return [(chunk, ids) for chunk, ids in likely if chunk.chunk_id in self._hints]


def _differ(records: Sequence[Record]) -> bool:
    """Return whether records of one text have different contexts; otherwise their KV is equal."""
    return len({ids for _, ids in records}) > 1


# -- the layout of a prompt ----------------------------------------------------------------------

MIN_RUN_LENGTH = 4
"""Shortest span that is reused: reading the KV of fewer tokens would save nothing."""

MISS_UNKNOWN_CHUNK = "chunk no longer in the index"
MISS_TOKENS_DIFFER = "tokens differ from the chunk's own"
MISS_NO_OFFSETS = "tokenizer gives no character offsets"
MISS_OWNER_UNCLEAR = "several chunks have this text, encoded after different text"

MAX_EDGE_TOKENS = 2
"""Tokens of a chunk that the surrounding text may change while the chunk still counts as whole."""


RecordId = tuple[str, tuple[int, ...]]
"""A chunk's id, and the context tokens that precede the chunk where the record was encoded."""


@dataclass(frozen=True)
class ReusedSpan:
    """Prompt tokens that are tokens of a stored chunk.

    Prompt tokens ``[prompt_start, prompt_start + length)`` equal the chunk's tokens
    ``[chunk_start, chunk_start + length)``. The span refers to the chunk's record that was encoded
    after `context_ids`.

    `encoded_at` is the position at which the chunk's first token was encoded; None means directly
    after the shared prefix and the context.
    """

    chunk_id: str
    prompt_start: int
    chunk_start: int
    length: int
    context_ids: tuple[int, ...] = ()
    encoded_at: int | None = None

    @property
    def record_id(self) -> RecordId:
        """The record that the span is taken from."""
        return self.chunk_id, self.context_ids

    @property
    def prompt_end(self) -> int:
        """The first prompt token after the span."""
        return self.prompt_start + self.length

    @property
    def chunk_end(self) -> int:
        """The first chunk token after the span."""
        return self.chunk_start + self.length

    def is_whole(self, chunk: Chunk) -> bool:
        """Return whether the span is all of its chunk, except for `MAX_EDGE_TOKENS`."""
        return self.length >= len(chunk.token_ids) - MAX_EDGE_TOKENS


LINK = -1
"""The id of a link token in a layout's token ids; no tokenizer uses it."""


@dataclass(frozen=True)
class LinkRow:
    """A link token in a prompt: its position, and its row in the table of link tokens."""

    position: int
    row: int


@dataclass(frozen=True)
class Layout:
    """A tokenised prompt and the spans of it that stored KV can fill.

    Attributes
    ----------
    token_ids
        The prompt's tokens, exactly as the plain pipeline feeds them, except for `LINK` at each
        inserted link token (`kvrag.fusion.linked_rows.insert_links`).
    spans
        The reusable spans, in order, without overlap. They follow the shared prefix if all of it is
        there. No span contains the last token, which has to be computed to give logits.
    prefix_length
        Number of shared prefix tokens at the start of the prompt.
    has_prefix
        Whether these are all: only then is a chunk after them exact.
    misses
        Matches that gave no span: reason -> count.
    links
        The link tokens, in order.
    num_unlinked
        Spans without link tokens, because the table has too few or the prompt has no room.
    chunk_ids
        The chunks found, in order, including those that gave no span.
    positions
        The position of each token in `token_ids`, ascending; None means 0, 1, 2 and so on.
        Buffer rows have no gaps in either case: row r has position ``positions[r]``.
    num_neutralised
        Number of control strings in documents and messages that are tokenised as text.
    num_control
        Number of control strings, in a prompt given as one string, that are in no known document.
    num_folded
        Number of messages that were moved or joined for the chat template.
    fresh_reasons
        Why tokens are in no span: reason -> number of tokens (`kvrag.fusion.runs`); empty if
        nobody looked.
    num_kept
        Number of first rows that an earlier answer has left in the buffer
        (`kvrag.engine.sessions`). What spans say of them does not matter.
    has_writer
        Whether an adapter acted while chunks were encoded after a context: none of these is exact.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ReusedSpan, ...]
    prefix_length: int
    has_prefix: bool
    misses: Mapping[str, int] = field(default_factory=dict)
    links: tuple[LinkRow, ...] = ()
    num_unlinked: int = 0
    chunk_ids: tuple[str, ...] = ()
    positions: tuple[int, ...] | None = None
    num_neutralised: int = 0
    num_control: int = 0
    num_folded: int = 0
    fresh_reasons: Mapping[str, int] = field(default_factory=dict)
    num_kept: int = 0
    has_writer: bool = False

    @property
    def end_position(self) -> int:
        """The first position after the prompt."""
        return len(self.token_ids) if self.positions is None else self.positions[-1] + 1

    def position(self, row: int) -> int:
        """Return the position of a row."""
        return row if self.positions is None else self.positions[row]

    @property
    def num_reused(self) -> int:
        """Number of tokens covered by spans."""
        return sum(span.length for span in self.spans)

    @property
    def plain_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens, as the plain pipeline feeds them."""
        if not self.links:
            return self.token_ids
        return tuple(token for token in self.token_ids if token != LINK)

    def is_exact(self, span: ReusedSpan) -> bool:
        """Return whether `span` is where it was encoded, so that its KV needs no correction.

        That holds if the span starts with its chunk, and the tokens between the shared prefix and
        the span are its context (usually none: the span then follows the prefix directly).
        """
        if not self.has_prefix or span.chunk_start != 0:
            return False
        if self.has_writer and span.context_ids:
            return False
        first, encoded_at = span.prompt_start, span.encoded_at
        if encoded_at is None:
            encoded_at = self.prefix_length + len(span.context_ids)
        # At encoding, the only gap was one before a chunk that was given its position.
        if (first and self.position(first - 1) != first - 1) or self.position(first) != encoded_at:
            return False
        # Compares lengths first: contexts are long, and few spans are at a position that fits.
        return (
            span.prompt_start - self.prefix_length == len(span.context_ids)
            and self.token_ids[self.prefix_length : span.prompt_start] == span.context_ids
        )


def lay_out(
    tokens: Tokens,
    matches: Sequence[Match],
    chunks: Mapping[str, Chunk],
    prefix_ids: Sequence[int],
    *,
    hints: Collection[str] = (),
    has_writer: bool = False,
) -> Layout:
    """Return the layout of a prompt, with spans for the chunks found in it.

    Parameters
    ----------
    tokens
        The tokens of the rendered prompt (`kvrag.models.tokens.encode`).
    matches
        Chunks found in the prompt, in order, without overlap (`ChunkMatcher.find`).
    chunks
        The matched chunks by id, including others with the same text if chunks are encoded after
        context. A match without any of its chunks here is a miss.
    prefix_ids
        The shared prefix that the chunks were encoded after.
    hints
        Ids of chunks that the prompt probably contains; they decide between chunks with the same
        text.
    has_writer
        See `Layout`.
    """
    token_ids = tokens.token_ids
    prefix = tuple(prefix_ids)
    prefix_length, has_prefix = shared_beginning(token_ids, prefix)
    misses: Counter[str] = Counter()
    chunk_ids: list[str] = []
    spans: list[ReusedSpan] = []
    texts: list[FoundText] = []
    places: list[int] = []  # the index of each span's chunk in chunk_ids
    placed = _PromptTokens(token_ids, tokens.offsets) if tokens.offsets else None
    for match in matches:
        known = [chunks[i] for i in (match.chunk_id, *match.other_ids) if i in chunks]
        if not known:
            misses[MISS_UNKNOWN_CHUNK] += 1
            continue
        chunk_ids.append(known[0].chunk_id)
        if placed is None:
            misses[MISS_NO_OFFSETS] += 1
            continue
        span = placed.longest_run(match, known[0], prefix_length if has_prefix else 0)
        if span.length < MIN_RUN_LENGTH:
            misses[MISS_TOKENS_DIFFER] += 1
            continue
        spans.append(span)
        texts.append(_found_text(match, span, known))
        places.append(len(chunk_ids) - 1)
    layout = Layout(token_ids, tuple(spans), prefix_length, has_prefix, has_writer=has_writer)

    def is_exact(number: int, context_ids: tuple[int, ...]) -> bool:
        span = spans[number]
        fits = span.prompt_start - prefix_length == len(context_ids)  # few do
        return fits and layout.is_exact(replace(span, context_ids=context_ids))

    chosen: list[ReusedSpan] = []
    records = choose_records(texts, is_exact, hints)
    for place, span, record in zip(places, spans, records, strict=True):
        if record is None:
            misses[MISS_OWNER_UNCLEAR] += 1
            continue
        chunk, context_ids = record
        chunk_ids[place] = chunk.chunk_id
        chosen.append(replace(span, chunk_id=chunk.chunk_id, context_ids=context_ids))
    return replace(
        layout,
        spans=tuple(chosen),
        misses=dict(misses),
        chunk_ids=tuple(chunk_ids),
        num_neutralised=tokens.num_neutralised,
        num_control=tokens.num_control,
    )


def shared_beginning(token_ids: tuple[int, ...], prefix: tuple[int, ...]) -> tuple[int, bool]:
    """Return how many tokens of the shared prefix a prompt begins with, and whether with all."""
    length = num_equal(token_ids, prefix)
    return length, length == len(prefix)


def _found_text(match: Match, span: ReusedSpan, known: Sequence[Chunk]) -> FoundText:
    """Return what the prompt contains of a text, with the chunks that have the same tokens."""
    run = slice(span.chunk_start, span.chunk_end)
    first = known[0]
    return FoundText(
        chunks=[one for one in known if one is first or one.token_ids[run] == first.token_ids[run]],
        is_whole=span.is_whole(first),
        has_more=match.has_more or len(known) < 1 + len(match.other_ids),
    )


class _PromptTokens:
    """The prompt's tokens with the character offsets at which they start."""

    def __init__(self, token_ids: tuple[int, ...], offsets: Sequence[tuple[int, int]]) -> None:
        self._ids = ids_of(token_ids)
        if isinstance(offsets, SpliceOffsets):
            self._starts = offsets.starts
        else:
            self._starts = np.fromiter(map(itemgetter(0), offsets), np.int64, len(offsets))
        # A special token has the offsets (0, 0) even at the end, but bisection needs order.
        self._ascending_starts = np.maximum.accumulate(self._starts)

    def longest_run(self, match: Match, chunk: Chunk, first: int) -> ReusedSpan:
        """Return the longest run of the chunk's tokens in the match, of length 0 if there is none.

        A run begins where prompt and chunk have the same token id at the same character. Several
        tokens can start at one character (the bytes of an emoji), so each is tried.
        """
        begin, end = np.searchsorted(self._ascending_starts, (match.start, match.end)).tolist()
        begin, end = max(first, begin), min(end, len(self._ids) - 1)
        chunk_ids, chunk_starts = chunk.arrays
        best = ReusedSpan(chunk.chunk_id, begin, 0, 0)
        prompt_start = begin
        while prompt_start + best.length < end:
            longest = 0
            at = self._starts[prompt_start] - match.start
            for chunk_start in np.flatnonzero(chunk_starts == at).tolist():
                own = chunk_ids[chunk_start : chunk_start + end - prompt_start]
                differs = self._ids[prompt_start : prompt_start + len(own)] != own
                length = int(differs.argmax()) if differs.any() else len(own)
                longest = max(longest, length)
                if length > best.length:
                    best = ReusedSpan(chunk.chunk_id, prompt_start, chunk_start, length)
            prompt_start += max(longest, 1)
        return best
