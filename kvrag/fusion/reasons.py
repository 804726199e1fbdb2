"""Why tokens of a prompt are not reused: a reason for each stretch that no span covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from kvrag.chunk import Chunk
from kvrag.fusion.fingerprints import MIN_RUN
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.runs import Decode, Run, same_words

PREFIX = "shared prefix"
ABSENT = "not in the index"
SHORT = f"shorter than {MIN_RUN} tokens"
SPACE = "differs by white space"
ESCAPES = "differs by escapes or punctuation"
BORDER = "cut by the tokenizer at a border"

# Tokens beside a span that the text on the other side may have changed.
_EDGE = 2


@dataclass(frozen=True)
class Stretch:
    """Prompt tokens ``[start, end)`` that are computed, and why."""

    start: int
    end: int
    reason: str


def why_fresh(
    layout: Layout, chunks: Mapping[str, Chunk], runs: Sequence[Run], decode: Decode
) -> tuple[Stretch, ...]:
    """Return the stretches of a prompt that no span covers, in order, each with a reason.

    Parameters
    ----------
    layout
        The layout, before links are inserted.
    chunks
        The chunks of its spans.
    runs
        All runs found in the prompt, also those that are not reused.
    decode
        Returns the text of token ids.
    """
    why = [ABSENT] * len(layout.token_ids)
    for run in runs:
        why[run.start : run.end] = [SHORT] * run.length
    for span in layout.spans:
        _mark_edges(why, layout, span, chunks[span.chunk_id], decode)
    for one, other in pairwise(layout.spans):
        if one.record_id == other.record_id and one.chunk_end <= other.chunk_start:
            reason = _between(layout, one, other, chunks[one.chunk_id], decode)
            if reason is not None:
                num_tokens = other.prompt_start - one.prompt_end
                why[one.prompt_end : other.prompt_start] = [reason] * num_tokens
    why[: layout.prefix_length] = [PREFIX] * layout.prefix_length
    stretches, start = [], 0
    places = [(span.prompt_start, span.prompt_end) for span in layout.spans]
    for begin, stop in (*places, (len(why), len(why))):
        for reason, tokens in groupby(why[start:begin]):
            end = start + len(list(tokens))
            stretches.append(Stretch(start, end, reason))
            start = end
        start = stop
    return tuple(stretches)


def counted(stretches: Sequence[Stretch]) -> dict[str, int]:
    """Return the number of tokens for each reason."""
    numbers: Counter[str] = Counter()
    for one in stretches:
        numbers[one.reason] += one.end - one.start
    return dict(numbers)


def _between(
    layout: Layout, one: ReusedSpan, other: ReusedSpan, chunk: Chunk, decode: Decode
) -> str | None:
    """Return how the text between two parts of a chunk differs, None if it has other words."""
    here = decode(list(layout.token_ids[one.prompt_end : other.prompt_start]))
    there = decode(list(chunk.token_ids[one.chunk_end : other.chunk_start]))
    if here == there:
        return BORDER
    if "".join(here.split()) == "".join(there.split()):
        return SPACE
    return ESCAPES if same_words(here, there) else None


def _mark_edges(
    why: list[str], layout: Layout, span: ReusedSpan, chunk: Chunk, decode: Decode
) -> None:
    """Mark the tokens beside a span that begin, or end, with the chunk's own text."""
    ids, own = layout.token_ids, chunk.token_ids

    def text(some: Sequence[int]) -> str:
        # Nearly always there is none, and tokenizers take their time for nothing as well.
        return decode(list(some)).strip() if some else ""

    behind = text(own[span.chunk_end : span.chunk_end + _EDGE])
    before = text(own[max(0, span.chunk_start - _EDGE) : span.chunk_start])
    for place in range(span.prompt_end, min(span.prompt_end + _EDGE, len(ids))):
        here = text(ids[place : place + 1]) if behind else ""
        if not here or not (here.startswith(behind) or behind.startswith(here)):
            break
        why[place], behind = BORDER, behind[len(here) :].strip()
    for place in range(span.prompt_start - 1, max(-1, span.prompt_start - 1 - _EDGE), -1):
        here = text(ids[place : place + 1]) if before else ""
        if not here or not (here.endswith(before) or before.endswith(here)):
            break
        why[place], before = BORDER, before[: -len(here)].strip()
