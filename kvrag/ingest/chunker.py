"""Split documents into chunks at natural boundaries, within a token limit.

Places where a text may be cut have ranks: before a heading, between paragraphs, between
sentences, between lines, between words. Each chunk takes as much text as fits. It is then cut at
the highest-ranking place in its last half, and at the latest one of that rank.

If a document has an outline (source code), its marks take the place of headings and sentences,
those of outer blocks first. A definition or statement that fits into a chunk whole is not cut, even
if the chunk before it ends early, unless that one has hardly begun.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvrag.chunk import PAGE_BREAK, UNSTORED, Chunk, Document, Mark, chunk_id_of, normalise_text
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import add_contexts, filler_ids
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.files import encoded
from kvrag.ingest.headings import find_headings, paths_of
from kvrag.ingest.limits import MAX_REPEATED_CHARACTERS
from kvrag.models.control import REFUSE, ControlTokens, encode_documents

MIN_CHUNK_TOKENS = 16

# Characters tokenised at once: enough that few chunks straddle two stretches, and few enough that
# memory never holds the offsets of a whole book.
_STRETCH_CHARACTERS = 65_536
_MAX_CHARACTERS_PER_TOKEN = 16
# The time of each pattern grows at most linearly with the text, whatever the text is.
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile("[.!?\u2026][\"'\u201d\u2019)\\]]*\\s+|[\u3002\uff01\uff1f](?=\\S)")
_LINE = re.compile(r"\n")
_WORD = re.compile(r"\s+")


# Offsets at which a chunk may begin: one ascending list for each rank, the highest first.
_Seams = tuple[list[int], ...]
# Ids and first characters of the tokens of each text, without special tokens.
_Tokenise = Callable[[list[str]], list[tuple[list[int], list[int]]]]


@dataclass(frozen=True)
class _Text:
    """A normalised document.

    Attributes
    ----------
    marks
        Its headings, or its outline.
    page_starts
        The offsets of its pages, if it has several.
    levels
        Of an outline: the offsets of the marks of each level, the outermost first.
    """

    text: str
    marks: Sequence[Mark]
    page_starts: list[int] = field(default_factory=list)
    levels: tuple[list[int], ...] = ()

    @cached_property
    def paths(self) -> list[tuple[str, ...]]:
        return list(paths_of(self.marks))

    def seams(self, begin: int, end: int) -> _Seams:
        """Return the seams in a stretch of the text; the levels of an outline are the first."""
        levels = self.levels or ([mark.start for mark in self.marks],)
        first = [level[bisect_left(level, begin) : bisect_left(level, end)] for level in levels]
        sentence = () if self.levels else (_SENTENCE,)
        return (
            *first,
            *(
                [match.end() for match in pattern.finditer(self.text, begin, end)]
                for pattern in (_PARAGRAPH, *sentence, _LINE, _WORD)
            ),
        )


def chunk_document(
    document: Document, tokenizer: Any, chunk_tokens: int, control: ControlTokens | None = None
) -> list[Chunk]:
    """Split one document into chunks.

    Parameters
    ----------
    document
        The document. Its text is normalised first; page breaks become paragraph breaks.
    tokenizer
        The model's fast tokenizer.
    chunk_tokens
        The largest number of tokens in a chunk.
    control
        Neutralises the model's control strings in the text; None keeps them.

    Returns
    -------
    list of Chunk
        Chunks in the order of the text, without overlap; empty when the text has no tokens.

    Raises
    ------
    DocumentError
        When the text cannot be encoded as UTF-8 (lone surrogates).
    """
    if chunk_tokens < MIN_CHUNK_TOKENS:
        raise ParameterError(f"chunk_tokens is at least {MIN_CHUNK_TOKENS}, found {chunk_tokens}")
    encoded(document.source, document.text)
    prepared = _outlined(document) if document.outline else _prepare(document.text)

    def tokenise(texts: list[str]) -> list[tuple[list[int], list[int]]]:
        return [
            (list(tokens.token_ids), [start for start, _ in tokens.offsets])
            for tokens in encode_documents(tokenizer, texts, control)
        ]

    # The tokenizer returns a new object for each number. Sharing them halves a token's memory.
    share = dict[int, int]().setdefault
    pieces = [
        (start, text, tuple(map(share, ids, ids)), tuple(map(share, starts, starts)))
        for start, text, ids, starts in _cut(prepared, tokenise, chunk_tokens)
    ]
    chunks: list[Chunk] = []
    room = MAX_REPEATED_CHARACTERS
    for ordinal, (start, text, token_ids, token_starts) in enumerate(pieces):
        place: dict[str, Any] = {"start": start} if len(pieces) > 1 else {}
        place |= _place(prepared, start)
        room -= sum(map(len, place.get("headings", ())))
        if room < 0:
            raise DocumentError(
                f"{document.source}: the headings of its chunks have more than "
                f"{MAX_REPEATED_CHARACTERS:,} characters in all; shorten them, or split the "
                "document"
            )
        chunk_id = chunk_id_of(document.source, ordinal, text)
        metadata = {**place, **document.metadata}
        chunks.append(
            Chunk(chunk_id, text, token_ids, token_starts, document.source, ordinal, metadata)
        )
    return chunks


def _prepare(raw: str) -> _Text:
    page_starts: list[int] = []
    pages: list[str] = []
    length = 0
    for page in raw.split(PAGE_BREAK):
        page_starts.append(length)
        page = normalise_text(page)
        if page:
            pages.append(page)
            length += len(page) + 2
    text = "\n\n".join(pages)
    return _Text(text, find_headings(text), page_starts if len(page_starts) > 1 else [])


def _outlined(document: Document) -> _Text:
    levels: dict[int, list[int]] = {}
    for mark in document.outline:
        levels.setdefault(mark.level, []).append(mark.start)
    ranks = tuple(levels[level] for level in sorted(levels))
    return _Text(document.text, document.outline, levels=ranks)


def _place(prepared: _Text, start: int) -> dict[str, Any]:
    """Return the page and the headings under which a chunk begins."""
    place: dict[str, Any] = {}
    last = bisect_right(prepared.marks, start, key=lambda mark: mark.start)
    if last and (path := prepared.paths[last - 1]):
        place |= {"heading": path[-1], "headings": list(path)}
    if prepared.page_starts:
        place["page"] = bisect_right(prepared.page_starts, start)
    return place


def _cut(
    prepared: _Text, tokenise: _Tokenise, chunk_tokens: int
) -> Iterator[tuple[int, str, list[int], list[int]]]:
    """Yield offset, text, ids and token starts of each chunk."""
    text = prepared.text
    stretch = max(_STRETCH_CHARACTERS, _MAX_CHARACTERS_PER_TOKEN * chunk_tokens)
    position = 0
    while position < len(text):
        end = min(len(text), position + stretch)
        seams = prepared.seams(position, end)
        ((_, starts),) = tokenise([text[position:end]])
        starts = [position + start for start in starts]
        num_levels = len(prepared.levels)
        spans = list(_plan(seams, num_levels, starts, position, end, chunk_tokens))
        # The rest of a stretch that is not the last one begins the next stretch.
        if end < len(text) and len(spans) > 1:
            spans.pop()
        pieces = [normalise_text(text[begin:stop]) for begin, stop in spans]
        for (begin, stop), piece, (ids, piece_starts) in zip(
            spans, pieces, tokenise(pieces), strict=True
        ):
            if len(ids) > chunk_tokens:
                # Tokens at a cut differ from those inside the whole text; a few more may result.
                yield from _split(text, seams, tokenise, begin, stop, chunk_tokens)
            elif ids:
                yield begin, piece, ids, piece_starts
        position = spans[-1][1]


def _plan(
    seams: _Seams,
    num_levels: int,
    starts: Sequence[int],
    position: int,
    end: int,
    chunk_tokens: int,
) -> Iterator[tuple[int, int]]:
    """Yield spans of at most `chunk_tokens` tokens that cover ``position .. end``."""
    while position < end:
        first = bisect_left(starts, position)
        if len(starts) - first <= chunk_tokens:
            yield position, end
            return
        limit = max(position + 1, starts[first + chunk_tokens])
        middle = max(position + 1, starts[first + chunk_tokens // 2])
        least = max(position + 1, starts[first + chunk_tokens // 8])
        cut = _seam_before_whole(
            seams[:num_levels], starts, (least, middle, limit, end), chunk_tokens
        )
        if cut is None:
            cut = _best_seam(seams, middle, limit)
        yield position, cut
        position = cut


def _seam_before_whole(
    levels: _Seams, starts: Sequence[int], places: tuple[int, int, int, int], chunk_tokens: int
) -> int | None:
    """Return the seam before what a cut at the limit would divide.

    That is what the outermost level has there. If it is too long for a chunk and begins early, it
    is what the next level has. None if there is no such seam between the least place and the limit.
    """
    least, middle, limit, end = places
    for number, offsets in enumerate(levels, 1):
        place = bisect_right(offsets, limit)
        if not place or (seam := offsets[place - 1]) < least:
            continue
        nexts = ((outer, bisect_right(outer, seam)) for outer in levels[:number])
        stop = min((outer[at] for outer, at in nexts if at < len(outer)), default=end)
        num_tokens = bisect_left(starts, stop) - bisect_left(starts, seam)
        if seam == limit or (stop > limit and (num_tokens <= chunk_tokens or seam >= middle)):
            return seam
    return None


def _best_seam(seams: _Seams, middle: int, limit: int) -> int:
    """Return the last seam of the highest rank in ``middle .. limit``, or `limit`."""
    for offsets in seams:
        place = bisect_right(offsets, limit)
        if place and offsets[place - 1] >= middle:
            return offsets[place - 1]
    return limit


def _split(
    text: str, seams: _Seams, tokenise: _Tokenise, begin: int, stop: int, chunk_tokens: int
) -> Iterator[tuple[int, str, list[int], list[int]]]:
    """Yield the chunks of a span that has slightly too many tokens when tokenised alone."""
    piece = normalise_text(text[begin:stop])
    ((ids, starts),) = tokenise([piece])
    if len(ids) <= chunk_tokens or len(piece) == 1:
        if ids:
            yield begin, piece, ids, starts
        return
    origin = text.index(piece[0], begin)
    middle = origin + max(1, starts[len(ids) // 2])
    cut = _best_seam(seams, origin + max(1, starts[len(ids) // 4]), middle)
    yield from _split(text, seams, tokenise, begin, cut, chunk_tokens)
    yield from _split(text, seams, tokenise, cut, stop, chunk_tokens)


class Cutter:
    """Splits documents into chunks, each with its contexts.

    Parameters
    ----------
    encoders
        The encoders of the index; only the tokenizer is loaded.
    config
        The settings of the index.
    """

    def __init__(self, encoders: Encoders, config: IndexConfig) -> None:
        self._encoders = encoders
        self._config = config

    def cut(self, document: Document) -> list[Chunk]:
        """Split a document. Raises DocumentError."""
        config = self._config
        encoders = self._encoders
        control = encoders.control
        most = config.chunk_tokens
        if document.is_whole:
            most = max(most, encoders.room - config.context_tokens)
        chunks = chunk_document(document, encoders.tokenizer, most, control)
        if control is not None and config.control_tokens == REFUSE:
            refuse_control(document, chunks, control)
        if not config.has_kv:
            return [replace(chunk, contexts=(UNSTORED,)) for chunk in chunks]
        return add_contexts(
            chunks,
            encoders.tokenizer,
            config.chunk_context,
            encoders.room,
            control,
        )

    def num_control_strings(self, chunks: Sequence[Chunk]) -> int:
        """Return the number of control strings in chunks that are read as text."""
        control = self._encoders.control
        return 0 if control is None else sum(len(control.find_any(one.text)) for one in chunks)

    def num_filler_tokens(self) -> int:
        """Return the number of tokens of the index's filler, at most those that it asked for."""
        return min(len(filler_ids(self._encoders.tokenizer)), self._config.context_tokens)


def refuse_control(document: Document, chunks: Sequence[Chunk], control: ControlTokens) -> None:
    """Raise DocumentError if a document holds a control string anywhere.

    Parameters
    ----------
    document
        The document; its text, metadata and source are searched.
    chunks
        Its chunks, which show control strings that only the tokenizer's normaliser produces.
    control
        The model's control strings.
    """
    for start, end in control.find(document.text):
        line = document.text.count("\n", 0, start) + 1
        raise _refusal(document, document.text[start:end], f"line {line} of its text")
    for chunk in chunks:
        for start, end in control.find_any(chunk.text):
            raise _refusal(document, chunk.text[start:end], f"its chunk {chunk.ordinal}")
    for place, value in (("its source", document.source), *_strings(document.metadata)):
        for start, end in control.find_any(value):
            raise _refusal(document, value[start:end], place)


def _strings(value: Any, place: str = "metadata") -> Iterator[tuple[str, str]]:
    """Yield the strings in plain JSON values, each with its place."""
    if isinstance(value, str):
        yield f"its {place}", value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield f"its {place}", str(name)
            yield from _strings(one, f"{place} {str(name)[:40]!r}")
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one, place)


def _refusal(document: Document, string: str, place: str) -> DocumentError:
    return DocumentError(
        f"{document.source}: {place} holds {string[:40]!r}, a control string of the model; remove "
        "it, or make the index with --control-tokens neutralise, which reads it as text"
    )
