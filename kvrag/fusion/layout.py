"""Which tokens of a prompt can be taken from stored chunks.

The whole prompt is tokenised once, so its ids are those of the plain pipeline. A chunk found
in the text is then laid over the prompt's tokens by character offset and token id. Where the
text around it changed its first or last tokens, those are left out and computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from kvrag.chunk import Chunk
from kvrag.fusion.segments import Match

MIN_RUN_LENGTH = 4
"""Tokens below which a stretch is computed: reading its KV would save nothing."""

MISS_UNKNOWN_CHUNK = "chunk no longer in the index"
MISS_TOKENS_DIFFER = "tokens differ from the chunk's own"
MISS_NO_OFFSETS = "tokenizer gives no character offsets"


@dataclass(frozen=True)
class ReusedSpan:
    """Prompt tokens that are tokens of a stored chunk.

    Prompt tokens ``[prompt_start, prompt_start + length)`` equal the chunk's tokens
    ``[chunk_start, chunk_start + length)``.
    """

    chunk_id: str
    prompt_start: int
    chunk_start: int
    length: int

    @property
    def prompt_end(self) -> int:
        """The first prompt token behind the span."""
        return self.prompt_start + self.length

    @property
    def chunk_end(self) -> int:
        """The first chunk token behind the span."""
        return self.chunk_start + self.length


LINK = -1
"""Stands in a layout's token ids where a link token is: no tokenizer has it."""


@dataclass(frozen=True)
class LinkRow:
    """A link token in a prompt: where it stands, and its row in the table of link tokens."""

    position: int
    row: int


@dataclass(frozen=True)
class Layout:
    """A tokenised prompt and the spans of it that stored KV can fill.

    Attributes
    ----------
    token_ids
        The prompt's tokens, exactly as the plain pipeline feeds them; `LINK` where link tokens were
        put between them (`kvrag.fusion.links.insert_links`).
    spans
        What can be reused, in order, without overlap; neither the shared prefix nor the last
        token is ever part of one (the last one has to be computed to give logits).
    prefix_length
        Tokens of the shared prefix at the prompt's beginning: all of them or 0.
    has_prefix
        Whether the prompt begins with the shared prefix (always true of an empty one).
    misses
        Matches that gave no span: reason -> count.
    links
        The link tokens, in order.
    num_unlinked
        Spans behind which links were wanted, but there are none for so many.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ReusedSpan, ...]
    prefix_length: int
    has_prefix: bool
    misses: Mapping[str, int] = field(default_factory=dict)
    links: tuple[LinkRow, ...] = ()
    num_unlinked: int = 0

    @property
    def num_reused(self) -> int:
        """Tokens covered by spans."""
        return sum(span.length for span in self.spans)

    @property
    def plain_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens without link tokens."""
        return tuple(token for token in self.token_ids if token != LINK)

    def is_exact(self, span: ReusedSpan) -> bool:
        """Whether `span` stands where it was encoded, so that its KV needs no correction.

        True of the span that follows the shared prefix directly and starts with its chunk.
        """
        return self.has_prefix and span.prompt_start == self.prefix_length and span.chunk_start == 0


def lay_out(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    matches: Sequence[Match],
    chunks: Mapping[str, Chunk],
    prefix_ids: Sequence[int],
    *,
    add_special_tokens: bool = True,
    min_run_length: int = MIN_RUN_LENGTH,
) -> Layout:
    """Tokenise a prompt and lay the chunks found in it over its tokens.

    Parameters
    ----------
    prompt
        The rendered prompt.
    tokenizer
        The model's tokenizer.
    matches
        Chunks found in the prompt, in order, without overlap (`ChunkMatcher.find`).
    chunks
        The chunks matched, by id; one that is absent is a miss.
    prefix_ids
        The shared prefix that the chunks were encoded behind.
    add_special_tokens
        True for a plain string, as ``tokenizer(prompt)`` does; False for a prompt rendered
        with a chat template, which holds its special tokens already.
    min_run_length
        Tokens a span has at least; a match with fewer is a miss.
    """
    encoding = tokenizer(
        prompt,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        verbose=False,
    )
    token_ids: tuple[int, ...] = tuple(encoding["input_ids"])
    prefix = tuple(prefix_ids)
    has_prefix = token_ids[: len(prefix)] == prefix
    prefix_length = len(prefix) if has_prefix else 0
    misses: Counter[str] = Counter()
    spans: list[ReusedSpan] = []
    if tokenizer.is_fast:
        tokens = _PromptTokens(token_ids, encoding["offset_mapping"])
        for match in matches:
            chunk = chunks.get(match.chunk_id)
            if chunk is None:
                misses[MISS_UNKNOWN_CHUNK] += 1
                continue
            span = tokens.longest_run(match, chunk, prefix_length)
            if span.length < min_run_length:
                misses[MISS_TOKENS_DIFFER] += 1
                continue
            spans.append(span)
    elif matches:
        misses[MISS_NO_OFFSETS] += len(matches)
    return Layout(token_ids, tuple(spans), prefix_length, has_prefix, dict(misses))


class _PromptTokens:
    """The prompt's tokens with the characters that they start at."""

    def __init__(self, token_ids: tuple[int, ...], offsets: Sequence[tuple[int, int]]) -> None:
        self._ids = token_ids
        self._starts = [start for start, _ in offsets]
        # A special token has the offsets (0, 0), also at the end; bisection wants order.
        self._ascending_starts = list(accumulate(self._starts, max))

    def longest_run(self, match: Match, chunk: Chunk, first: int) -> ReusedSpan:
        """Return the longest run of the chunk's tokens in its place, of length 0 if none.

        A run begins where both have a token of one id at one character. Several tokens can
        start there (the bytes of an emoji), so a start leads to a list of the chunk's tokens.
        """
        begin = max(first, bisect_left(self._ascending_starts, match.start))
        end = min(bisect_left(self._ascending_starts, match.end), len(self._ids) - 1)
        by_start: dict[int, list[int]] = {}
        for index, start in enumerate(chunk.token_starts):
            by_start.setdefault(start, []).append(index)
        best = ReusedSpan(chunk.chunk_id, begin, 0, 0)
        prompt_start = begin
        while prompt_start + best.length < end:
            longest = 0
            for chunk_start in by_start.get(self._starts[prompt_start] - match.start, ()):
                length = _num_equal(self._ids[prompt_start:end], chunk.token_ids[chunk_start:])
                longest = max(longest, length)
                if length > best.length:
                    best = ReusedSpan(chunk.chunk_id, prompt_start, chunk_start, length)
            prompt_start += max(longest, 1)
        return best


def _num_equal(ids: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Return how many ids agree from the beginning."""
    for index, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return index
    return min(len(ids), len(others))
