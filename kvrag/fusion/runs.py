"""Runs of stored chunks' tokens anywhere in a prompt, also where another splitter cut the text.

The prompt's tokens that no whole chunk covers are compared with candidate chunks, token by token.
A run may begin and end inside a chunk. Its stored KV has seen the chunk's tokens before it, so the
run is inexact, and a policy repairs it like any other.
"""

from __future__ import annotations

import heapq
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import Chunk
from kvrag.fusion.layout import MISS_OWNER_UNCLEAR, FoundText, Layout, ReusedSpan, choose_records

# -- fingerprints --------------------------------------------------------------------------------
#
# Source: winnowing (Schleimer, Wilkerson, Aiken: "Winnowing: local algorithms for document
# fingerprinting", SIGMOD 2003). The n-gram with the least hash of each `WINDOW` consecutive ones
# is a fingerprint. Two texts that share `MIN_RUN` tokens share a whole window, and so a
# fingerprint, wherever they were cut. The table says only which chunks to compare: it keeps no
# places and no tokens.
#
# Among equal hashes it does not matter which one is taken, since places are not kept.

NGRAM = 8
"""Tokens of an n-gram."""

WINDOW = 25
"""Consecutive n-grams of which one is a fingerprint, on average one in 13 of all."""

MIN_RUN = NGRAM + WINDOW - 1
"""Tokens of a run that is always found."""

_ROW_BITS = 30
_MAX_ROW = (1 << _ROW_BITS) - 1
_ROWS = np.uint64(_MAX_ROW)
_SHIFT = np.uint64(_ROW_BITS)
# Odd multipliers without a pattern.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_BASE = 0xA0761D6478BD642F
# Tokens hashed at once: the arrays between then fit a processor's cache.
_STRETCH = 1 << 16

Hashes = NDArray[np.uint64]


def ngram_hashes(token_ids: NDArray[np.int32]) -> Hashes:
    """Return the hash of the n-gram at each place ``[max(0, n - NGRAM + 1)]``."""
    hashes = token_ids.astype(np.uint64)
    hashes *= _SPREAD
    hashes ^= hashes >> np.uint64(29)
    hashes *= _MIX
    width = 1
    while width < NGRAM:
        if len(hashes) <= width:
            return hashes[:0]
        factor = np.uint64(pow(_BASE, width, 1 << 64))
        hashes = hashes[:-width] * factor + hashes[width:]
        width *= 2
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    return hashes


def window_minima(hashes: Hashes) -> Hashes:
    """Return the least hash of the window at each place ``[max(0, n - WINDOW + 1)]``."""
    if len(hashes) < WINDOW:
        return hashes[:0]
    width = 1
    least = hashes
    while width * 2 <= WINDOW:
        least = np.minimum(least[:-width], least[width:])
        width *= 2
    rest = WINDOW - width
    return np.minimum(least[:-rest], least[rest:])


class Fingerprints:
    """A table of fingerprints with the catalog rows of the chunks that have them.

    A table is never changed: `with_chunks` returns another one, which shares most of its memory.

    Attributes
    ----------
    size_bytes
        Memory of the table: 8 bytes a fingerprint.
    """

    def __init__(self, parts: tuple[Hashes, ...] = ()) -> None:
        # Each part is sorted: 34 bits of the hash, then 30 bits of the row.
        self._parts = parts

    @property
    def parts(self) -> tuple[Hashes, ...]:
        """Sorted entries, in several arrays: what a table is made of again."""
        return self._parts

    def of_rows(self, rows: NDArray[np.int64]) -> Fingerprints:
        """Return a table with the chunks of some rows only."""
        kept = (part[np.isin((part & _ROWS).astype(np.int64), rows)] for part in self._parts)
        return Fingerprints(tuple(part for part in kept if len(part)))

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def with_chunks(self, chunks: Iterable[tuple[int, NDArray[np.int32]]]) -> Fingerprints:
        """Return a table that has further chunks, given as row and token ids ``[T]``.

        Chunks with fewer than `MIN_RUN` tokens, or in rows from 2**30 on, have no fingerprints.
        """
        found: list[Hashes] = []
        rows: list[int] = []
        waiting: list[NDArray[np.int32]] = []
        num_waiting = 0
        for row, token_ids in chunks:
            if len(token_ids) < MIN_RUN or row > _MAX_ROW:
                continue
            rows.append(row)
            waiting.append(token_ids)
            num_waiting += len(token_ids)
            if num_waiting >= _STRETCH:
                found.append(_entries(rows, waiting))
                rows, waiting, num_waiting = [], [], 0
        if waiting:
            found.append(_entries(rows, waiting))
        if not found:
            return self
        added = np.concatenate(found)
        found.clear()
        added.sort()
        parts = [*self._parts, added]
        # Each part is at least twice the next: few parts, and each entry is copied few times.
        while len(parts) > 1 and len(parts[-2]) < 2 * len(parts[-1]):
            merged = np.concatenate(parts[-2:])
            parts[-2:] = []
            merged.sort()
            parts.append(merged)
        return Fingerprints(tuple(parts))

    def look_up(self, hashes: Hashes, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunks that have fingerprints.

        Parameters
        ----------
        hashes
            Hashes of n-grams, ascending.
        most
            Number of chunks for one hash at which the rest of them is left out.

        Returns
        -------
        places, rows
            ``[m]``, ``[m]``: the place of a hash in `hashes`, and the row of a chunk that has it.
            Some chunks may have another n-gram, with a similar hash.
        """
        wanted = hashes >> _SHIFT << _SHIFT
        places: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        for part in self._parts:
            entries = np.searchsorted(part, wanted)
            asked = np.arange(len(wanted))
            for _ in range(most):
                inside = entries < len(part)
                entries, asked = entries[inside], asked[inside]
                values = part[entries]
                same = (values ^ wanted[asked]) <= _ROWS
                if not same.any():
                    break
                entries, asked, values = entries[same], asked[same], values[same]
                places.append(asked)
                rows.append((values & _ROWS).astype(np.int64))
                entries = entries + 1
        if not places:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(places), np.concatenate(rows)


def _entries(rows: Sequence[int], chunks: Sequence[NDArray[np.int32]]) -> Hashes:
    """Return the entries of chunks' fingerprints, each at least once."""
    lengths = np.array([len(chunk) for chunk in chunks])
    minima = window_minima(ngram_hashes(np.concatenate(chunks)))
    # A window that reaches into the next chunk is none.
    ends = np.cumsum(lengths)
    owners = np.repeat(np.arange(len(chunks)), lengths)[: len(minima)]
    inside = np.arange(len(minima)) + MIN_RUN <= ends[owners]
    entries = minima >> _SHIFT << _SHIFT
    entries |= np.array(rows, np.uint64)[owners]
    entries = entries[inside]
    # Neighbouring windows mostly have the same least hash.
    is_new = np.ones(len(entries), bool)
    np.not_equal(entries[1:], entries[:-1], out=is_new[1:])
    return entries[is_new]


# -- runs ----------------------------------------------------------------------------------------

# Rewritten text keeps the order of a chunk's tokens, with a few more or fewer between its runs.
_MAX_DRIFT = 24
_MAX_HOLE = 96
# A prompt of ten thousand dashes could match everywhere: such places are computed.
_MAX_REPEATS = 32
_MAX_PAIRS = 1 << 20
_MAX_RUNS = 4096
_MAX_CHAINS = 64  # of one chunk, to which a run may belong

Ids = NDArray[np.int32]
# What JSON and source code write for a line end, a quotation mark, and others.
_ESCAPE = re.compile(r"\\[nrtbf\"'\\/]")
_UNICODE_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")

Decode = Callable[[list[int]], str]
Gap = tuple[int, int]
"""First token of a stretch of the prompt, and the token after its last."""


@dataclass(frozen=True, slots=True)
class Run:
    """Prompt tokens ``[start, end)`` that equal a candidate's tokens from `offset` on.

    `weight` is the number of tokens of the run and of those beside it that stem from the same text.
    """

    chunk_id: str
    start: int
    end: int
    offset: int
    weight: int = 0

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ChosenRun:
    """A run, and the runs with the same tokens in other candidates."""

    run: Run
    others: tuple[Run, ...] = ()


def gaps_of(layout: Layout) -> list[Gap]:
    """Return the stretches of a prompt that no span covers, without prefix and last token."""
    start = layout.prefix_length if layout.has_prefix else 0
    gaps = []
    for span in layout.spans:
        gaps.append((start, span.prompt_start))
        start = span.prompt_end
    gaps.append((start, len(layout.token_ids) - 1))
    return [(first, last) for first, last in gaps if last - first >= NGRAM]


def find_runs(
    token_ids: Ids,
    gaps: Sequence[Gap],
    candidates: Mapping[str, Ids],
    decode: Decode,
    spans: Sequence[ReusedSpan] = (),
) -> tuple[list[Run], list[Run]]:
    """Return all runs of candidates in a prompt's gaps, and those among them that are reused.

    A run is reused if it has `MIN_RUN` tokens, or if it and its neighbours in the same chunk have
    as many, and between them prompt and chunk have the same words: text whose line ends were
    escaped is found line by line. No run has fewer than `NGRAM` tokens.

    Parameters
    ----------
    token_ids
        The prompt's token ids ``[N]``.
    gaps
        Where to look, in order, without overlap.
    candidates
        Token ids ``[T]`` of chunks, by id.
    decode
        Returns the text of token ids.
    spans
        Spans that are reused already: they support the runs beside them.
    """
    runs = _all_runs(token_ids, gaps, candidates)
    known = [Run(one.chunk_id, one.prompt_start, one.prompt_end, one.chunk_start) for one in spans]
    supported: list[Run] = []
    chunk_id = lambda run: run.chunk_id  # noqa: E731
    for name, group in groupby(sorted([*runs, *known], key=chunk_id), chunk_id):
        ids = candidates[name]

        def follows(earlier: Run, later: Run, ids: Ids = ids) -> bool:
            return _is_near(earlier, later) and same_words(
                decode(token_ids[earlier.end : later.start].tolist()),
                decode(ids[earlier.offset + earlier.length : later.offset].tolist()),
            )

        some = list(group)
        is_long = all(run.length >= MIN_RUN for run in some)
        supported += some if is_long else _weighted(some, follows)
    inside = {(run.chunk_id, run.start, run.offset) for run in runs}
    found = [run for run in supported if (run.chunk_id, run.start, run.offset) in inside]
    return found, [run for run in found if max(run.length, run.weight) >= MIN_RUN]


def choose_runs(runs: Sequence[Run], preferred: Collection[str] = ()) -> list[ChosenRun]:
    """Return runs without overlap, in order: the longest first, then what is left of others.

    Parameters
    ----------
    runs
        Runs of `find_runs`.
    preferred
        Ids of chunks whose runs are taken before equally long runs of others.
    """

    def ranked(run: Run, number: int) -> tuple[int, int, bool, int, int, Run]:
        is_other = run.chunk_id not in preferred
        return -run.length, -run.weight, is_other, run.start, number, run

    queue = [ranked(run, number) for number, run in enumerate(runs)]
    heapq.heapify(queue)
    chosen: list[Run] = []
    while queue:
        *_, number, run = heapq.heappop(queue)
        pieces = _outside(run, chosen)
        if pieces == [run]:
            chosen.append(run)
        else:
            for piece in pieces:
                heapq.heappush(queue, ranked(piece, number))
    chosen.sort(key=lambda run: run.start)
    return [ChosenRun(run, _others(run, runs)) for run in chosen]


def fill(
    layout: Layout,
    chosen: Sequence[ChosenRun],
    chunks: Mapping[str, Chunk],
    hints: Collection[str] = (),
) -> Layout:
    """Return a layout with further spans for runs.

    If several chunks have a run's tokens after different text, the prompt and the hints decide
    (`choose_records`). If they do not, the run is computed, and counted as a miss.

    Parameters
    ----------
    layout
        The layout of whole chunks.
    chosen
        Runs in the layout's gaps, in order, without overlap.
    chunks
        The chunks of the runs and of the layout's spans; runs of others are left out.
    hints
        Ids of chunks that the prompt probably contains.
    """
    spans = list(layout.spans)
    texts = [_text_of(span, chunks) for span in spans]
    owners: list[dict[str, Run]] = [{} for _ in spans]
    for one in chosen:
        known = {
            run.chunk_id: run for run in (*one.others, one.run) if _is_sound(layout, run, chunks)
        }
        if not known:
            continue
        spans.append(ReusedSpan("", one.run.start, 0, one.run.length))
        owners.append(known)
        # What a run has seen of its chunk is as much a context as what stood before the chunk.
        seen = [_with_seen(chunks[run.chunk_id], run.offset) for run in known.values()]
        texts.append(FoundText(seen[::-1], is_whole=False, has_more=False))
    order = sorted(range(len(spans)), key=lambda number: spans[number].prompt_start)
    records = choose_records(
        [texts[number] for number in order],
        lambda place, ids: layout.is_exact(replace(spans[order[place]], context_ids=ids)),
        hints,
    )
    standing: list[ReusedSpan] = []
    num_unclear = 0
    for number, record in zip(order, records, strict=True):
        if not owners[number]:
            standing.append(spans[number])
        elif record is None:
            num_unclear += 1
        else:
            chunk, context_ids = record
            run = owners[number][chunk.chunk_id]
            own = context_ids[: len(context_ids) - run.offset]
            place = run.start, run.offset, run.length
            standing.append(ReusedSpan(chunk.chunk_id, *place, own))
    misses = dict(layout.misses)
    if num_unclear and MISS_OWNER_UNCLEAR not in misses:  # else a whole chunk was counted already
        misses[MISS_OWNER_UNCLEAR] = num_unclear
    return replace(layout, spans=tuple(standing), misses=misses)


def _all_runs(token_ids: Ids, gaps: Sequence[Gap], candidates: Mapping[str, Ids]) -> list[Run]:
    """Return the runs of at least an n-gram that cannot be made longer, in no order."""
    if not candidates or not gaps:
        return []
    hashes = ngram_hashes(token_ids)
    places = np.concatenate([np.arange(first, last - NGRAM + 1) for first, last in gaps])
    names = list(candidates)
    joined = np.concatenate([candidates[name] for name in names])
    ends = np.cumsum([len(candidates[name]) for name in names])
    pairs = _pairs(hashes[places], ngram_hashes(joined))
    starts, offsets = places[pairs[0]], pairs[1]
    owners = np.searchsorted(ends, offsets, side="right")
    inside = offsets + NGRAM <= ends[owners]  # no n-gram of two chunks
    for step in range(NGRAM):  # other tokens may have the same hash
        inside &= token_ids[starts + step] == joined[np.minimum(offsets + step, len(joined) - 1)]
    starts, offsets, owners = starts[inside], offsets[inside], owners[inside]
    # By diagonal, then by place.
    order = np.argsort((offsets - starts) * len(token_ids) + starts)
    starts, offsets, owners = starts[order], offsets[order], owners[order]
    # A run goes on while the next pair is one token further in both.
    goes_on = (np.diff(starts) == 1) & (np.diff(offsets) == 1) & (np.diff(owners) == 0)
    firsts = np.flatnonzero(np.concatenate([[True], ~goes_on])) if len(starts) else starts
    lengths = np.diff(np.append(firsts, len(starts)))
    longest = np.argsort(-lengths, kind="stable")[:_MAX_RUNS]
    gap_starts = np.array([first for first, _ in gaps])
    found: dict[tuple[int, int], int] = {}  # by chunk and diagonal, where the last run ends
    runs = []
    for first in np.sort(firsts[longest]):
        start, owner = int(starts[first]), int(owners[first])
        offset = int(offsets[first]) - (int(ends[owner - 1]) if owner else 0)
        if start < found.get((owner, offset - start), -1):
            continue
        gap = gaps[int(np.searchsorted(gap_starts, start, side="right")) - 1]
        run = _extended(names[owner], token_ids, gap, start, candidates[names[owner]], offset)
        if run is not None:
            found[owner, offset - start] = run.end
            runs.append(run)
    return runs


def _pairs(hashes: Hashes, others: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of equal hashes in both, without hashes that recur very often."""
    # Most of the others have no equal: a small table of bits sorts them out.
    bits = np.zeros(1 << 16, bool)
    bits[hashes & np.uint64(0xFFFF)] = True
    there = np.flatnonzero(bits[others & np.uint64(0xFFFF)])
    order = np.argsort(hashes)
    distinct, firsts, numbers = np.unique(hashes[order], return_index=True, return_counts=True)
    # In order, since neighbouring look-ups then read the same memory.
    there = there[np.argsort(others[there])]
    places = np.minimum(np.searchsorted(distinct, others[there]), len(distinct) - 1)
    wanted = (distinct[places] == others[there]) & (numbers[places] <= _MAX_REPEATS)
    there, places = there[wanted], places[wanted]
    first, counts = firsts[places], numbers[places]
    if counts.sum() > _MAX_PAIRS:
        keep = np.cumsum(counts) <= _MAX_PAIRS
        there, first, counts = there[keep], first[keep], counts[keep]
    begins = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(begins, counts)
    return order[np.repeat(first, counts) + within], np.repeat(there, counts)


def _extended(
    chunk_id: str, token_ids: Ids, gap: Gap, start: int, others: Ids, offset: int
) -> Run | None:
    """Return the run of equal tokens around a place, or None if it is shorter than an n-gram."""
    back = min(start - gap[0], offset)
    before = token_ids[start - back : start] != others[offset - back : offset]
    num_before = int(before[::-1].argmax()) if before.any() else back
    room = min(gap[1] - start, len(others) - offset)
    behind = token_ids[start : start + room] != others[offset : offset + room]
    num_behind = int(behind.argmax()) if behind.any() else room
    run = Run(chunk_id, start - num_before, start + num_behind, offset - num_before)
    return run if num_behind and run.length >= NGRAM else None


def same_words(text: str, other: str) -> bool:
    """Return whether texts differ only in white space, punctuation, escapes and Unicode forms."""
    return _words(text) == _words(other)


def _words(text: str) -> str:
    if "\\" in text:
        text = _UNICODE_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
        text = _ESCAPE.sub(" ", text)
    if "&" in text:
        text = html.unescape(text)
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text)))


def _weighted(runs: list[Run], follows: Callable[[Run, Run], bool]) -> list[Run]:
    """Return one chunk's runs, each with the tokens of the chain that it belongs to."""
    # Runs on one diagonal first, then those that a few tokens more or fewer shift against it.
    runs.sort(key=lambda run: (run.start, run.offset))
    chains: list[list[Run]] = []
    for run in runs:
        for chain in reversed(chains[-_MAX_CHAINS:]):
            if follows(chain[-1], run):
                chain.append(run)
                break
        else:
            chains.append([run])
    weighted = []
    for chain in chains:
        weight = sum(run.length for run in chain)
        weight -= sum(max(0, one.end - other.start) for one, other in pairwise(chain))
        weighted += [replace(run, weight=weight) for run in chain]
    return weighted


def _is_near(earlier: Run, later: Run) -> bool:
    drift = (later.start - later.offset) - (earlier.start - earlier.offset)
    ends = earlier.offset + earlier.length
    return (
        abs(drift) <= _MAX_DRIFT
        and -NGRAM < later.start - earlier.end <= _MAX_HOLE
        and -NGRAM < later.offset - ends <= _MAX_HOLE
    )


def _outside(run: Run, chosen: Sequence[Run]) -> list[Run]:
    """Return what of a run no chosen run covers, in pieces of at least an n-gram."""
    pieces = []
    start = run.start
    overlapping = [one for one in chosen if one.start < run.end and one.end > run.start]
    for one in sorted(overlapping, key=lambda one: one.start):
        pieces.append((start, one.start))
        start = one.end
    pieces.append((start, run.end))
    return [
        replace(run, start=first, end=last, offset=run.offset + first - run.start)
        for first, last in pieces
        if last - first >= NGRAM
    ]


def _others(run: Run, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the same tokens in other chunks."""
    return tuple(
        replace(one, start=run.start, end=run.end, offset=one.offset + run.start - one.start)
        for one in runs
        if one.start <= run.start and one.end >= run.end and one.chunk_id != run.chunk_id
    )


def _is_sound(layout: Layout, run: Run, chunks: Mapping[str, Chunk]) -> bool:
    """Return whether a chunk that was read whole has the run's tokens."""
    chunk = chunks.get(run.chunk_id)
    if chunk is None:
        return False
    stored = chunk.token_ids[run.offset : run.offset + run.length]
    return stored == layout.token_ids[run.start : run.end]


def _with_seen(chunk: Chunk, offset: int) -> Chunk:
    """Return a chunk whose contexts include the tokens before a run that begins at `offset`."""
    seen = chunk.token_ids[:offset]
    return replace(chunk, contexts=tuple((*ids, *seen) for ids in chunk.contexts))


def _text_of(span: ReusedSpan, chunks: Mapping[str, Chunk]) -> FoundText:
    chunk = chunks[span.chunk_id]
    return FoundText([chunk], span.is_whole(chunk), has_more=False)


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
