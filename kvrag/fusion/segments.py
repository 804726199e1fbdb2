"""Finding known chunks in a rendered prompt.

The frameworks pass one string. A table of chunk heads finds every position in it where a chunk's
text begins, a hash of the whole text selects among the candidates, and the selected chunk is
compared character by character. The prompt is never altered: if something rewrote a chunk's line
ends or accents, the chunk is found only up to the first changed character, and the rest is
prefilled as usual.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import neg

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import normalise_text
from kvrag.errors import ParameterError

# Characters sampled to decide whether to check a position; a head has at least as many.
_NUM_SAMPLED = 6
# Odd multipliers without a pattern, so that few positions are checked in vain.
_FACTORS = (0x9E3779B9, 0xC2B2AE3D, 0x165667B1, 0xD6E8FEB9, 0xA0761D65, 0xE7037ED1)
_LEAST_MARKS = 1 << 16
_MARKS_PER_HEAD = 8
# Marking takes half a kilobyte per head. An index's heads are marked as they are added, not all at
# the first prompt.
_MARKED_AT_ONCE = 1 << 12
# Up to this many positions are looked up one by one.
_FEW = 256

_Codes = NDArray[np.uint32]


class Heads:
    """A table of the characters that chunks begin with; all heads have the same width.

    Notes
    -----
    Several threads may read the table at once as long as no thread adds or discards heads.

    Parameters
    ----------
    width
        Number of characters in a head, 6 or more.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._sampled = [width * part // (_NUM_SAMPLED - 1) for part in range(_NUM_SAMPLED - 1)]
        self._sampled.append(width - 1)
        self._families: dict[str, dict[str, int]] = {}
        # A mark at the hash of sampled characters means that a head may begin there; the marks of
        # discarded heads stay set.
        self._marks = np.zeros(_LEAST_MARKS, bool)
        self._unmarked: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._families)

    def __getitem__(self, head: str) -> dict[str, int]:
        """Return the chunks that begin with `head`: chunk id to length in characters."""
        return self._families[head]

    def copy(self) -> Heads:
        """Return a table with the same heads, which is altered apart from this one."""
        copied = Heads(self._width)
        copied._families = {head: dict(family) for head, family in self._families.items()}
        copied._marks, copied._unmarked = self._marks.copy(), list(self._unmarked)
        return copied

    def add(self, head: str, chunk_id: str, length: int) -> None:
        """Add a chunk of `length` characters that begins with `head`."""
        family = self._families.get(head)
        if family is None:
            family = self._families[head] = {}
            self._unmarked.append(head)
            if len(self._unmarked) == _MARKED_AT_ONCE:
                self._mark()
        family[chunk_id] = length

    def discard(self, head: str, chunk_id: str) -> None:
        """Remove a chunk that was added."""
        family = self._families[head]
        del family[chunk_id]
        if not family:
            del self._families[head]

    def positions(self, text: str, start: int, end: int) -> list[int]:
        """Return the ascending positions in `text` of all heads within ``text[start:end]``."""
        width, families = self._width, self._families
        places: Iterable[int] = range(start, end - width + 1)
        if end - start > _FEW:
            self._mark()
            codes, num_places = _codes(text[start:end]), end - start - width + 1
            sampled = [codes[offset : offset + num_places] for offset in self._sampled]
            marked = self._marks.take(_index(sampled, len(self._marks)))
            places = (marked.nonzero()[0] + start).tolist()
        return [place for place in places if text[place : place + width] in families]

    def _mark(self) -> None:
        """Set the marks of heads added since the last call."""
        unmarked = self._unmarked
        if not unmarked:
            return
        marks = self._marks
        if _MARKS_PER_HEAD * len(self._families) > len(marks):
            marks = np.zeros(1 << (_MARKS_PER_HEAD * len(self._families)).bit_length(), bool)
            unmarked = list(self._families)
        for begin in range(0, len(unmarked), _MARKED_AT_ONCE):
            some = unmarked[begin : begin + _MARKED_AT_ONCE]
            codes = _codes("".join(some)).reshape(len(some), self._width)
            marks[_index(codes.T[self._sampled], len(marks))] = True
        # In this order: a thread that sees no unmarked heads must already see all marks.
        self._marks = marks
        self._unmarked = []


def _index(sampled: Iterable[_Codes], num_marks: int) -> _Codes:
    """Return ``[n]``: the index of the mark of each of n places, from their sampled characters."""
    products = (codes * np.uint32(factor) for codes, factor in zip(sampled, _FACTORS, strict=True))
    mixed = next(products)
    for product in products:
        mixed ^= product
    # All characters influence the highest bits.
    mixed >>= np.uint32(32 - (num_marks.bit_length() - 1))
    return mixed


def _codes(text: str) -> _Codes:
    """Return the characters' code points."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


HEAD_LENGTH = 32
"""Number of a chunk's first characters that are looked up at every position of the prompt."""

MIN_LENGTH = 8
"""Chunks with fewer characters are never matched: computing them costs less than finding them."""

MIN_PREFIX_LENGTH = 64
"""Shortest beginning of a cut chunk that is matched; full prefill computes shorter ones."""

# Only comparing texts distinguishes cut chunks. If very many chunks begin alike (each with the same
# metadata header), comparing all of them would cost more than it saves.
_MAX_CUT_CANDIDATES = 32
# A prompt of ten thousand dashes can make every position a candidate for hundreds of chunks.
# Beyond these bounds (about 0.5 s of work in all) the rest of a prompt is prefilled plainly.
_MAX_COMPARISONS = 4096
_MAX_HASHES = 200_000
_MAX_OTHERS = 256
_KEPT_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Match:
    """A stretch of the prompt that is a chunk's text, or the beginning of it.

    Attributes
    ----------
    chunk_id
        The chunk found.
    start, end
        Character offsets in the prompt: ``prompt[start:end]`` equals the chunk's text, or its
        first ``end - start`` characters.
    is_prefix
        Whether the prompt contains only the beginning of the chunk.
    other_ids
        Further chunks with the same text, by its hash; they are not compared.
    has_more
        Whether there may be even more of them.
    """

    chunk_id: str
    start: int
    end: int
    is_prefix: bool
    other_ids: tuple[str, ...] = field(default=(), compare=False)
    has_more: bool = field(default=False, compare=False)


class ChunkMatcher:
    """Exact search for known chunk texts in prompts.

    Parameters
    ----------
    fetch_text
        Returns the normalised text of a chunk added before, or None if it is gone. With it, the
        matcher keeps only the head, the length and a hash of each text (under 1 kB per chunk) and
        fetches the texts of the chunks it finds, of which it keeps the last ones; without it, the
        matcher keeps all texts.
    min_prefix_length
        Number of characters that must agree for the beginning of a cut chunk to count; at least
        the length of a head (32).

    Notes
    -----
    Several threads may search with one matcher as long as no thread adds or discards chunks.
    """

    def __init__(
        self,
        fetch_text: Callable[[str], str | None] | None = None,
        *,
        min_prefix_length: int = MIN_PREFIX_LENGTH,
    ) -> None:
        if min_prefix_length < HEAD_LENGTH:
            raise ParameterError(
                f"min_prefix_length {min_prefix_length}: expected at least {HEAD_LENGTH}"
            )
        self.min_prefix_length = min_prefix_length
        self._texts: dict[str, str] | None = {} if fetch_text is None else None
        self._fetch_text = fetch_text
        self._fetched: dict[str, str] = {}
        self._num_fetched = 0  # characters
        self._entries: dict[str, _Entry] = {}
        self._long_heads = Heads(HEAD_LENGTH)
        self._short_heads = Heads(MIN_LENGTH)
        self._ids_by_hash: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def copy(self) -> ChunkMatcher:
        """Return a matcher with the same chunks, which is altered apart from this one."""
        copied = ChunkMatcher(self._fetch_text, min_prefix_length=self.min_prefix_length)
        copied._texts = None if self._texts is None else dict(self._texts)
        copied._entries, copied._ids_by_hash = dict(self._entries), dict(self._ids_by_hash)
        copied._long_heads, copied._short_heads = self._long_heads.copy(), self._short_heads.copy()
        return copied

    def add(self, chunk_id: str, text: str) -> None:
        """Add a chunk, or replace the one with this id."""
        self.discard(chunk_id)
        text = normalise_text(text)
        if len(text) < MIN_LENGTH:
            entry = _Entry("", len(text), 0)
        else:
            is_long = len(text) >= HEAD_LENGTH
            entry = _Entry(text[: HEAD_LENGTH if is_long else MIN_LENGTH], len(text), hash(text))
            heads = self._long_heads if is_long else self._short_heads
            heads.add(entry.head, chunk_id, entry.length)
            self._ids_by_hash[entry.text_hash] = (
                *self._ids_by_hash.get(entry.text_hash, ()),
                chunk_id,
            )
            if self._texts is not None:
                self._texts[chunk_id] = text
        self._entries[chunk_id] = entry

    def discard(self, chunk_id: str) -> None:
        """Remove a chunk; an unknown id is ignored."""
        entry = self._entries.pop(chunk_id, None)
        if entry is None or not entry.head:
            return
        heads = self._long_heads if entry.length >= HEAD_LENGTH else self._short_heads
        heads.discard(entry.head, chunk_id)
        rest = tuple(known for known in self._ids_by_hash[entry.text_hash] if known != chunk_id)
        if rest:
            self._ids_by_hash[entry.text_hash] = rest
        else:
            del self._ids_by_hash[entry.text_hash]
        if self._texts is not None:
            del self._texts[chunk_id]

    def find(self, prompt: str, hints: Sequence[str] = ()) -> list[Match]:
        """Return the chunks in `prompt`, in order, without overlap.

        If candidates overlap, the one that starts first is taken, and among those that start
        together the longest. The beginning of a cut chunk ends where another chunk starts inside
        it and ends after it, since a few characters may agree beyond the cut by chance. Chunks
        shorter than a head are found in the gaps between the others.

        Parameters
        ----------
        prompt
            The rendered prompt.
        hints
            Ids of chunks retrieved recently. They never decide whether a whole chunk is found.
            They decide which id is reported if several chunks have the same text, and which
            chunks are compared first if many begin like one that was cut.
        """
        return _Search(self, prompt, hints).run()

    def find_all(
        self, prompt: str, hints: Sequence[str] = ()
    ) -> tuple[list[tuple[int, int]], bool]:
        """Return the places of chunks in `prompt`, including those that overlap others.

        Parameters
        ----------
        prompt, hints
            See `find`.

        Returns
        -------
        list of (int, int)
            Start and exclusive end of each chunk in characters, ordered by start.
        bool
            Whether the list is complete; it is not if the prompt has far too many candidates.
        """
        return _Search(self, prompt, hints).run_all()

    def _text(self, chunk_id: str) -> str | None:
        if self._texts is not None:
            return self._texts.get(chunk_id)
        text = self._fetched.get(chunk_id)
        if text is not None:
            return text
        assert self._fetch_text is not None
        text = self._fetch_text(chunk_id)
        if text is not None:
            if self._num_fetched + len(text) > _KEPT_CHARACTERS:
                self._fetched, self._num_fetched = {}, 0
            self._fetched[chunk_id] = text
            self._num_fetched += len(text)
        return text


@dataclass(frozen=True, slots=True)
class _Entry:
    head: str  # empty: too short to be matched
    length: int
    text_hash: int


@dataclass(frozen=True, slots=True)
class _Found:
    """The best candidates at one position; an end equal to the position means none."""

    whole_ids: tuple[str, ...]
    whole_end: int
    cut_ids: tuple[str, ...]
    cut_end: int
    has_more_cut: bool

    @property
    def end(self) -> int:
        return max(self.whole_end, self.cut_end)


class _Search:
    """One search of one prompt; caches the texts and findings that recur."""

    def __init__(self, matcher: ChunkMatcher, prompt: str, hints: Sequence[str]) -> None:
        self._matcher = matcher
        self._prompt = prompt
        self._hints = tuple(dict.fromkeys(hints))
        self._texts: dict[str, str | None] = {}
        self._lengths: dict[str, list[int]] = {}
        self._found: dict[int, _Found] = {}
        self._num_comparisons = 0
        self._num_hashes = 0

    def run(self) -> list[Match]:
        matches = self._long_matches()
        if self._matcher._short_heads:
            matches += list(chain.from_iterable(map(self._short_matches, *self._gaps(matches))))
            matches.sort(key=lambda match: match.start)
        return matches

    def run_all(self) -> tuple[list[tuple[int, int]], bool]:
        matcher, end = self._matcher, len(self._prompt)
        found = []
        for start in matcher._long_heads.positions(self._prompt, 0, end):
            at = self._at(start)
            is_cut_long = at.cut_end - start >= matcher.min_prefix_length
            found.append((start, max(at.whole_end, at.cut_end if is_cut_long else start)))
        for start in matcher._short_heads.positions(self._prompt, 0, end):
            family = matcher._short_heads[self._prompt[start : start + MIN_LENGTH]]
            found.append((start, self._whole(start, family, end)[1]))
        is_whole = self._num_hashes < _MAX_HASHES and self._num_comparisons < _MAX_COMPARISONS
        return sorted(span for span in found if span[1] > span[0]), is_whole

    def _gaps(self, matches: list[Match]) -> tuple[list[int], list[int]]:
        return [0, *(m.end for m in matches)], [*(m.start for m in matches), len(self._prompt)]

    def _long_matches(self) -> list[Match]:
        matches: list[Match] = []
        hits = self._matcher._long_heads.positions(self._prompt, 0, len(self._prompt))
        free = 0
        for number, start in enumerate(hits):
            if start < free:
                continue
            found = self._at(start)
            cut_end = found.cut_end
            if cut_end > found.whole_end:
                behind = bisect_left(hits, max(start + 1, found.whole_end), number)
                cut_end = self._give_way(start, cut_end, hits, behind)
            if cut_end - max(found.whole_end, start) >= self._matcher.min_prefix_length:
                matches.append(
                    _match(found.cut_ids, start, cut_end, True, has_more=found.has_more_cut)
                )
            elif found.whole_end > start:
                matches.append(_match(found.whole_ids, start, found.whole_end, False))
            else:
                continue
            free = matches[-1].end
        return matches

    def _give_way(self, start: int, cut_end: int, hits: list[int], behind: int) -> int:
        """Return where a cut chunk ends, given the chunks that start inside it and end after it."""
        for other_start in islice(hits, behind, None):
            if other_start >= cut_end:
                break
            other = self._at(other_start)
            if other.end > cut_end and (
                # Both can be matched, or the other one is the better match.
                other_start - start >= self._matcher.min_prefix_length
                or other.whole_end > cut_end
                or other.end - other_start > cut_end - start
            ):
                return other_start
        return cut_end

    def _short_matches(self, start: int, end: int) -> Iterable[Match]:
        heads = self._matcher._short_heads
        free = start
        for position in heads.positions(self._prompt, start, end):
            if position >= free:
                family = heads[self._prompt[position : position + MIN_LENGTH]]
                whole_ids, whole_end = self._whole(position, family, end)
                if whole_end > position:
                    yield _match(whole_ids, position, whole_end, False)
                    free = whole_end

    def _at(self, position: int) -> _Found:
        found = self._found.get(position)
        if found is None:
            head = self._prompt[position : position + HEAD_LENGTH]
            family = self._matcher._long_heads[head]
            whole_ids, whole_end = self._whole(position, family, len(self._prompt))
            cut_ids, cut_end, has_more = self._cut(position, family, whole_end)
            found = _Found(whole_ids, whole_end, cut_ids, cut_end, has_more)
            self._found[position] = found
        return found

    def _whole(
        self, position: int, family: dict[str, int], limit: int
    ) -> tuple[tuple[str, ...], int]:
        """Return the longest chunks that are whole at `position`, and their end."""
        prompt, ids_by_hash = self._prompt, self._matcher._ids_by_hash
        head = prompt[position : position + HEAD_LENGTH]
        lengths = self._lengths.get(head)
        if lengths is None:
            lengths = self._lengths[head] = sorted(set(family.values()), reverse=True)
        for length in islice(lengths, bisect_left(lengths, position - limit, key=neg), None):
            if self._num_hashes == _MAX_HASHES:
                break
            self._num_hashes += 1
            end = position + length
            chunk_ids = ids_by_hash.get(hash(prompt[position:end]), ())
            for chunk_id in chain((i for i in self._hints if i in chunk_ids), chunk_ids):
                text = self._text(chunk_id)
                if text is not None and len(text) == length and prompt.startswith(text, position):
                    if len(chunk_ids) == 1:
                        return chunk_ids, end
                    # Hinted chunks first, so that the limit does not drop them.
                    hinted = (i for i in self._hints if i in chunk_ids)
                    some = islice(chunk_ids, _MAX_OTHERS + 2)
                    return tuple(dict.fromkeys(chain((chunk_id,), hinted, some))), end
        return (), position

    def _cut(
        self, position: int, family: dict[str, int], whole_end: int
    ) -> tuple[tuple[str, ...], int, bool]:
        """Return the chunks whose beginning matches longest at `position`, and the match's end.

        The third value says whether there may be more of them.
        """
        best_ids: list[str] = []
        best_end = position
        wanted = whole_end - position + self._matcher.min_prefix_length
        hinted = (i for i in self._hints if family.get(i, 0) > wanted)
        others = (i for i, length in family.items() if length > wanted and i not in self._hints)
        for number, chunk_id in enumerate(chain(hinted, others)):
            if number == _MAX_CUT_CANDIDATES or self._num_comparisons == _MAX_COMPARISONS:
                return tuple(best_ids), best_end, True
            self._num_comparisons += 1
            text = self._text(chunk_id)
            if text is not None:
                end = position + _common_length(text, self._prompt, position)
                if end > best_end:
                    best_ids, best_end = [chunk_id], end
                elif best_ids and end == best_end:
                    best_ids.append(chunk_id)
        return tuple(best_ids), best_end, False

    def _text(self, chunk_id: str) -> str | None:
        if chunk_id not in self._texts:
            self._texts[chunk_id] = self._matcher._text(chunk_id)
        return self._texts[chunk_id]


def _match(
    chunk_ids: tuple[str, ...], start: int, end: int, is_prefix: bool, *, has_more: bool = False
) -> Match:
    others = chunk_ids[1 : 1 + _MAX_OTHERS]
    has_more = has_more or len(chunk_ids) > 1 + _MAX_OTHERS
    return Match(chunk_ids[0], start, end, is_prefix, others, has_more)


def _common_length(text: str, prompt: str, start: int) -> int:
    """Return the length of the longest beginning of `text` that `prompt` has at `start`."""
    low, high = 0, min(len(text), len(prompt) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(text[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low
