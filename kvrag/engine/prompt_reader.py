"""Reading prompts: their tokens, and the chunks that their text contains."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from kvrag import arguments
from kvrag.chunk import Chunk
from kvrag.engine.answer import Part, Source
from kvrag.engine.request import Message, PlacedPrompt, Prompt, Request, checked_messages
from kvrag.errors import IndexFormatError, ParameterError, PromptTooLongError, StoreError
from kvrag.fusion.fuser import MADE, OUTPRICED, FusedPrompt
from kvrag.fusion.layout import Layout, lay_out
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.runs import Stretch
from kvrag.fusion.segments import Match
from kvrag.fusion.staging import EarlyRecords
from kvrag.ingest.index import Index
from kvrag.ingest.prompt_tokens import tokenise_prompt
from kvrag.ingest.words import long_words
from kvrag.models.chat import PromptText, render_messages
from kvrag.models.known_text import KnownText
from kvrag.models.tokens import Span

logger = logging.getLogger("kvrag")

MISS_CATALOG = "catalog damaged"

_NUM_WATCHED = 16  # retrieved chunks whose words are looked for in a prompt without chunks

# Prompts of up to this many characters are tokenised for any model: that takes about a second.
_SURELY_TOKENISED = 1_000_000


@dataclass(frozen=True)
class LaidOutPrompt:
    """A layout and the chunks found in it.

    Attributes
    ----------
    layout
        The prompt's tokens, and which of them are stored.
    chunks
        The chunks by id, hinted ones first, others in prompt order; empty if the caller laid the
        prompt out.
    open_kv
        Opens the records that the layout's spans name; None means the index's.
    fresh
        The stretches that no span covers, and why; empty if nobody looked.
    early
        Opens the records that the text seemed to need; who fuses the prompt closes it.
    text, offsets
        The prompt's text, and for each token its first character and its end there; empty if the
        caller laid the prompt out.
    num_before
        Number of tokens before the first chunk, where prompts are computed as wholes; otherwise 0.
    """

    layout: Layout
    chunks: Mapping[str, Chunk]
    open_kv: OpenKV | None = None
    fresh: tuple[Stretch, ...] = ()
    text: str = ""
    offsets: Sequence[Span] = ()
    early: EarlyRecords | None = None
    num_before: int = 0

    @property
    def sources(self) -> tuple[Source, ...]:
        """The chunks as an answer's sources. Callers may change them: the catalog keeps chunks."""
        return tuple(
            Source(one.chunk_id, one.source, one.ordinal, one.text, deepcopy(dict(one.metadata)))
            for one in self.chunks.values()
        )


class PromptReader:
    """Lays prompts out over an index; every engine reads its prompts with a reader.

    Parameters
    ----------
    index
        The index whose chunks to look for, and whose tokenizer to use.

    Raises
    ------
    ParameterError
        If `index` is not an index.
    """

    def __init__(self, index: Index) -> None:
        if index is None or isinstance(index, str | bytes | int | float | Path):
            raise ParameterError(
                f"index {arguments.shown(index)}: expected an opened index, such as "
                f"Index.open({str(index)!r})"
            )
        self._index = index
        self._watching = True  # for retrieved chunks that never arrive in a prompt
        self._has_warned_of_control = False

    def token_ids(
        self,
        prompt: Prompt,
        hints: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the token ids that the plain pipeline would feed for a prompt."""
        if isinstance(prompt, PlacedPrompt):
            return prompt.layout.token_ids
        return tokenise_prompt(self._index, self._text(prompt, tools), hints).token_ids

    def lay_out(self, request: Request, early: EarlyRecords | None = None) -> LaidOutPrompt:
        """Return a request's prompt as tokens and chunks, and warn if it looks wrong.

        Parameters
        ----------
        early
            Begins with the records of chunks as soon as they are found.

        Raises
        ------
        ParameterError
            If the prompt is empty or not text.
        PromptTooLongError
            If the prompt is too long to tokenise in reasonable time.
        """
        try:
            return self._lay_out(request, early)
        except BaseException:
            if early is not None:
                early.close()
            raise

    def _lay_out(self, request: Request, early: EarlyRecords | None) -> LaidOutPrompt:
        index, prompt, hints = self._index, request.prompt, request.hints
        index.require_open()
        if isinstance(prompt, PlacedPrompt):
            layout = prompt.layout if request.reuse else replace(prompt.layout, spans=())
            return LaidOutPrompt(layout, {}, prompt.open_kv, early=early)
        written = self._text(prompt, request.tools)
        matches, chunks, damage = (
            self._find_chunks(written.text, hints) if request.reuse else ([], {}, {})
        )
        if early is not None:
            early.begin(
                _probable_records(matches, chunks),
                *_probable_tokens(written.text, matches, chunks),
            )
        known = [
            KnownText(match.start, match.end, chunks[match.chunk_id])
            for match in matches
            if match.chunk_id in chunks
        ]
        tokens = tokenise_prompt(index, written, hints, known)
        holds = index.config.max_positions
        if len(tokens.token_ids) >= holds:
            raise PromptTooLongError(
                f"the prompt has {len(tokens.token_ids)} tokens, but the model holds {holds} "
                "with at least one to answer in; shorten it, or retrieve fewer chunks"
            )
        if tokens.num_control:
            self._warn_of_control(tokens.num_control)
        has_writer = bool(index.config.writer)
        layout = lay_out(
            tokens, matches, chunks, index.prefix_ids, hints=hints, has_writer=has_writer
        )
        if not layout.token_ids:
            raise ParameterError("the prompt is empty: there is nothing to answer")
        misses = {**layout.misses, **damage}
        layout = replace(layout, misses=misses, num_folded=written.num_folded)
        fresh: tuple[Stretch, ...] = ()
        num_before = 0
        if request.reuse and index.config.has_kv:
            layout, chunks, fresh = self._with_runs(layout, chunks, hints)
        elif request.reuse:
            num_tokens, why = len(layout.token_ids), index.model.why_whole
            fresh = (Stretch(0, num_tokens, why),)
            num_before = layout.spans[0].prompt_start if layout.spans else 0
            layout = replace(layout, spans=(), fresh_reasons={why: num_tokens})
        rank = {chunk_id: number for number, chunk_id in enumerate(hints)}
        ranked = sorted(layout.chunk_ids, key=lambda one: rank.get(one, len(rank)))
        named = {chunk_id: chunks[chunk_id] for chunk_id in ranked}
        if request.reuse and self._watching:
            self._warn_if_nothing_matched(named, written.text)
        text, offsets = written.text, tokens.offsets
        return LaidOutPrompt(layout, named, None, fresh, text, offsets, early, num_before)

    def _text(
        self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> PromptText:
        """Return the prompt as text. Raise ParameterError if it is not text."""
        if isinstance(prompt, str):
            written = PromptText(prompt, True)
        else:
            messages = checked_messages(prompt)
            written = render_messages(self._index.tokenizer, messages, self._index.control, tools)
        if len(written.text) > _SURELY_TOKENISED:
            # Tokenising a prompt that cannot fit would take minutes.
            longest = max(map(len, self._index.tokenizer.get_vocab()))
            holds = self._index.config.max_positions
            most = max(_SURELY_TOKENISED, holds * longest)
            if len(written.text) > most:
                raise PromptTooLongError(
                    f"the prompt has {len(written.text):,} characters, but the model holds "
                    f"{holds:,} tokens, which are at most {most:,} characters; shorten it, or "
                    "retrieve fewer chunks"
                )
        arguments.text(written.text, "the prompt")
        return written

    def _find_chunks(
        self, text: str, hints: Sequence[str]
    ) -> tuple[Sequence[Match], Mapping[str, Chunk], Mapping[str, int]]:
        """Return the matches of chunks in a text, the chunks by id, and misses by reason."""
        index = self._index
        try:
            matches = index.matcher.find(text, hints)
            wanted = [match.chunk_id for match in matches]
            if index.config.chunk_context.tells_apart:
                wanted += chain.from_iterable(match.other_ids for match in matches)
            else:  # Chunks with the same text are interchangeable.
                matches = [replace(match, other_ids=(), has_more=False) for match in matches]
            found = index.catalog.find_chunks(wanted)
        except (IndexFormatError, StoreError):
            return [], {}, {MISS_CATALOG: 1}
        chunks = {chunk_id: chunk for chunk_id, chunk in found.items() if chunk is not None}
        damaged = found.keys() - chunks.keys()
        usable = [match for match in matches if _is_usable(match, damaged, chunks)]
        num_lost = len(matches) - len(usable)
        return usable, chunks, {MISS_CATALOG: num_lost} if num_lost else {}

    def _with_runs(
        self, layout: Layout, chunks: Mapping[str, Chunk], hints: Sequence[str]
    ) -> tuple[Layout, Mapping[str, Chunk], tuple[Stretch, ...]]:
        """Return the layout with runs inside chunks, all chunks by id, and what is fresh."""
        index = self._index
        try:
            filled = index.run_finder.fill(layout, chunks, hints, index.recent_chunk_ids)
        except (IndexFormatError, StoreError):
            return replace(layout, misses={MISS_CATALOG: 1, **layout.misses}), chunks, ()
        return filled.layout, {**filled.chunks, **chunks}, filled.fresh

    def _warn_of_control(self, num_control: int) -> None:
        if self._has_warned_of_control:
            return
        self._has_warned_of_control = True
        logger.warning(
            "the prompt is one string and contains %d control strings of the model that are in no "
            "document of the index: they are treated as your own. If some may come from elsewhere, "
            "pass messages: their text is never read as control",
            num_control,
        )

    def _warn_if_nothing_matched(self, found: Collection[str], text: str) -> None:
        # After one chunk has arrived, the pipeline works. A prompt without documents is none of
        # its faults: a chain may rephrase the question first.
        if not found and not self._says_what_was_retrieved(text):
            return
        self._watching = False
        if found:
            return
        logger.warning(
            "chunks were retrieved, but the prompt contains none of their texts, so all of it is "
            "computed. Usual causes: no formatter between retriever and prompt (the prompt holds "
            "the repr of the documents), a template that escapes characters (mustache turns & "
            "into &amp;), or chunks rewritten before they reach the prompt."
        )

    def _says_what_was_retrieved(self, text: str) -> bool:
        """Return whether a prompt has most of the words of a chunk that was retrieved."""
        words = long_words(text)  # escapes and white space leave them as they are
        try:
            chunks = self._index.get_chunks(self._index.recent_chunk_ids[:_NUM_WATCHED])
        except (IndexFormatError, StoreError):
            return False
        return any(
            2 * len(own & words) > len(own) for chunk in chunks if (own := long_words(chunk.text))
        )


def _probable_records(
    matches: Sequence[Match], chunks: Mapping[str, Chunk]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the records that a layout will probably name."""
    for number, match in enumerate(matches):
        chunk = chunks.get(match.chunk_id)
        # The first chunk of a prompt may have a record for this place.
        if chunk is not None and (number or len(chunk.contexts) == 1):
            yield chunk.chunk_id, chunk.contexts[0]


def _probable_tokens(
    text: str, matches: Sequence[Match], chunks: Mapping[str, Chunk]
) -> tuple[int, int, int]:
    """Return about how many tokens of a prompt are stored, how many not, how many of these lead."""
    num_found, num_stored, first = 0, 0.0, 0
    for match in matches:
        chunk = chunks.get(match.chunk_id)
        if chunk is not None:
            first = first if num_found else match.start
            num_found += match.end - match.start
            num_stored += len(chunk.token_ids) * (match.end - match.start) / len(chunk.text)
    rate = num_stored / num_found if num_found else 0.0
    return round(num_stored), round((len(text) - num_found) * rate), round(first * rate)


def _is_usable(match: Match, damaged: Collection[str], chunks: Collection[str]) -> bool:
    """Return whether at least one chunk with a match's text can be read."""
    return match.chunk_id not in damaged or any(one in chunks for one in match.other_ids)


_EARLIER = "an earlier answer"
_NOT_LOADED = "found, but not loaded"
KEPT, EXACT, REUSED, REPAIRED, FRESH = "kept", "exact", "reused", "repaired", "fresh"


def prompt_parts(laid_out: LaidOutPrompt, fused: FusedPrompt) -> tuple[Part, ...]:
    """Return the parts of a prompt in order.

    There are none if its rows are not its tokens: with link tokens.

    Parameters
    ----------
    laid_out
        The prompt as it was read.
    fused
        The same prompt, fused.
    """
    layout = fused.layout
    if layout.links or layout.token_ids != laid_out.layout.token_ids:
        return ()
    num_tokens, num_layers = len(layout.token_ids), len(fused.report.rows_by_layer)
    states = [(FRESH, "")] * num_tokens
    for one in laid_out.fresh:
        states[one.start : one.end] = [(FRESH, one.reason)] * (one.end - one.start)
    # Only the first chunk can be exact without a stored record.
    made = (FRESH, MADE) if fused.report.num_made else None
    layers = [num_layers] * num_tokens
    states[: layout.num_kept] = [(KEPT, _EARLIER)] * layout.num_kept
    layers[: layout.num_kept] = [0] * layout.num_kept
    computed_anyway = set(fused.fresh.tolist())
    times = torch.bincount(torch.cat([*fused.picks, fused.fresh[:0]]), minlength=num_tokens)
    computed = times.tolist()
    for span in layout.spans:
        chunk = laid_out.chunks[span.chunk_id]
        why = f"{chunk.source}, chunk {chunk.ordinal}"
        plain = EXACT if layout.is_exact(span) else REUSED
        first = max(span.prompt_start, min(span.prompt_end, layout.num_kept))
        states[span.prompt_start : first] = [(KEPT, why)] * (first - span.prompt_start)
        rows = slice(first, span.prompt_end)
        if made is not None and plain == EXACT:
            states[rows] = [made] * (span.prompt_end - first)
            continue
        if first in computed_anyway:
            why = OUTPRICED if fused.report.num_outpriced else _NOT_LOADED
            states[rows] = [(FRESH, why)] * (span.prompt_end - first)
            continue
        layers[rows] = computed[rows]
        states[rows] = [
            (REPAIRED if 2 * number > num_layers else plain, why) for number in computed[rows]
        ]
    return tuple(_grouped(laid_out, states, layers))


def _grouped(
    laid_out: LaidOutPrompt, states: list[tuple[str, str]], layers: list[int]
) -> Iterator[Part]:
    text, offsets = laid_out.text, laid_out.offsets
    written = 0
    for (state, why), rows in groupby(range(len(states)), states.__getitem__):
        first, *_, last = (*rows,) * 2
        # Special tokens that the tokenizer adds have no text; bytes of one character share theirs.
        end = max(written, offsets[last][1]) if offsets else written
        end = len(text) if last == len(states) - 1 else end
        yield Part(first, last + 1, state, why, text[written:end], tuple(layers[first : last + 1]))
        written = end
