"""Reads prompts: their tokens, and the chunks that stand in their text."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from kvrag import arguments
from kvrag.chunk import Chunk
from kvrag.engine.answer import Source
from kvrag.engine.request import Message, PlacedPrompt, Prompt, Request, checked_messages
from kvrag.errors import IndexFormatError, ParameterError, PromptTooLongError, StoreError
from kvrag.fusion.layout import Layout, lay_out
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.segments import Match
from kvrag.ingest.contexts import NO_CONTEXT
from kvrag.ingest.index import Index
from kvrag.ingest.prompt_tokens import tokenise_prompt
from kvrag.models.chat import PromptText, render_messages

logger = logging.getLogger("kvrag")

MISS_CATALOG = "catalog damaged"

# Characters that are tokenised whatever the model: in a second or so.
_SURELY_TOKENISED = 1_000_000


@dataclass(frozen=True)
class LaidOutPrompt:
    """A layout and the chunks found in it.

    Attributes
    ----------
    layout
        The prompt's tokens, and what of it is stored.
    chunks
        By id, in prompt order; empty where the caller laid the prompt out.
    open_kv
        Opens what the layout's spans name; None stands for the index's own.
    """

    layout: Layout
    chunks: Mapping[str, Chunk]
    open_kv: OpenKV | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """What an answer says of the chunks."""
        return tuple(
            Source(chunk.chunk_id, chunk.source, chunk.ordinal, chunk.text, dict(chunk.metadata))
            for chunk in self.chunks.values()
        )


class PromptReader:
    """Lays prompts out over an index; every engine reads its prompts with one.

    Parameters
    ----------
    index
        Whose chunks are looked for, and whose tokenizer makes the tokens.

    Raises
    ------
    ParameterError
        For anything but an index.
    """

    def __init__(self, index: Index) -> None:
        if index is None or isinstance(index, str | bytes | int | float | Path):
            raise ParameterError(
                f"index {index!r}: expected an opened index, such as Index.open({str(index)!r})"
            )
        self._index = index
        self._watching = True  # for retrieved chunks that never arrive in a prompt
        self._has_warned_of_control = False

    def token_ids(self, prompt: Prompt, hints: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the token ids that the plain pipeline would feed for a prompt."""
        if isinstance(prompt, PlacedPrompt):
            return prompt.layout.token_ids
        return tokenise_prompt(self._index, self._text(prompt), hints).token_ids

    def lay_out(self, request: Request) -> LaidOutPrompt:
        """Return a request's prompt as tokens and chunks, and say what looks wrong with it.

        Raises
        ------
        ParameterError
            For a prompt that is no text, or empty.
        PromptTooLongError
            For one too long to be tokenised in reasonable time.
        """
        index, prompt, hints = self._index, request.prompt, request.hints
        index.require_open()
        if isinstance(prompt, PlacedPrompt):
            layout = prompt.layout if request.reuse else replace(prompt.layout, spans=())
            return LaidOutPrompt(layout, {}, prompt.open_kv)
        written = self._text(prompt)
        tokens = tokenise_prompt(index, written, hints)
        if tokens.num_control:
            self._warn_of_control(tokens.num_control)
        matches, chunks, damage = (
            self._find_chunks(written.text, hints) if request.reuse else ([], {}, {})
        )
        layout = lay_out(tokens, matches, chunks, index.prefix_ids, hints=hints)
        if not layout.token_ids:
            raise ParameterError("the prompt is empty: there is nothing to answer")
        layout = replace(layout, misses={**layout.misses, **damage})
        found = {chunk_id: chunks[chunk_id] for chunk_id in layout.chunk_ids}
        if request.reuse and self._watching:
            self._warn_if_nothing_matched(found)
        return LaidOutPrompt(layout, found)

    def _text(self, prompt: str | Sequence[Message]) -> PromptText:
        """Return the prompt as text. Raises ParameterError for what is no text."""
        if isinstance(prompt, str):
            written = PromptText(prompt, True)
        else:
            messages = checked_messages(prompt)
            written = render_messages(self._index.tokenizer, messages, self._index.control)
        if len(written.text) > _SURELY_TOKENISED:
            # What cannot fit is refused before tokenising it takes minutes.
            longest = max(map(len, self._index.tokenizer.get_vocab()))
            holds = self._index.config.max_positions
            most = max(_SURELY_TOKENISED, holds * longest)
            if len(written.text) > most:
                raise PromptTooLongError(
                    f"the prompt has {len(written.text):,} characters, but the model holds "
                    f"{holds:,} tokens, which are {most:,} characters at the most; shorten it, or "
                    "retrieve fewer chunks"
                )
        arguments.text(written.text, "the prompt")
        return written

    def _find_chunks(
        self, text: str, hints: Sequence[str]
    ) -> tuple[Sequence[Match], Mapping[str, Chunk], Mapping[str, int]]:
        """Return where chunks stand in a text, the chunks by id, and misses by reason."""
        index = self._index
        try:
            matches = index.matcher.find(text, hints)
            wanted = [match.chunk_id for match in matches]
            # Where chunks are encoded behind nothing, those of one text are one.
            if index.config.context != NO_CONTEXT:
                wanted += chain.from_iterable(match.other_ids for match in matches)
            found = index.catalog.find_chunks(wanted)
        except (IndexFormatError, StoreError):
            return [], {}, {MISS_CATALOG: 1}
        chunks = {chunk_id: chunk for chunk_id, chunk in found.items() if chunk is not None}
        damaged = found.keys() - chunks.keys()
        usable = [match for match in matches if _is_usable(match, damaged, chunks)]
        num_lost = len(matches) - len(usable)
        return usable, chunks, {MISS_CATALOG: num_lost} if num_lost else {}

    def _warn_of_control(self, num_control: int) -> None:
        if self._has_warned_of_control:
            return
        self._has_warned_of_control = True
        logger.warning(
            "the prompt is one string with %d control strings of the model in no document of the "
            "index: they are taken for the caller's own. Where some may come from elsewhere, pass "
            "messages: what stands in them is never control",
            num_control,
        )

    def _warn_if_nothing_matched(self, found: Collection[str]) -> None:
        # Once a chunk has arrived the pipeline is sound: later prompts may well hold none (a
        # chain that rephrases the question first, say).
        if not (found or self._index.recent_chunk_ids):
            return
        self._watching = False
        if found:
            return
        logger.warning(
            "chunks were retrieved, but none of their texts stands in the prompt, so all of it is "
            "computed. Usual causes: no formatter between retriever and prompt (the prompt holds "
            "the repr of the documents), a template that escapes characters (mustache turns & "
            "into &amp;), or chunks rewritten before they reach the prompt."
        )


def _is_usable(match: Match, damaged: Collection[str], chunks: Collection[str]) -> bool:
    """Say whether some chunk of a text found can be read."""
    return match.chunk_id not in damaged or any(one in chunks for one in match.other_ids)
