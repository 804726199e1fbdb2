"""The tokens of a prompt over an index: one answer for all who ask.

The engine, plain prefill beside it, the adapters and their token counters all come here, so that
the same prompt has the same tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvrag.chunk import Chunk
from kvrag.errors import IndexFormatError, StoreError
from kvrag.models.chat import PromptText
from kvrag.models.control import ControlTokens, Span, Tokens, encode, overlaps

if TYPE_CHECKING:
    from kvrag.ingest.index import Index

# Characters beside a control string, white space left out, by which a changed copy is recognised;
# fewer where the document begins or ends, but not so few that any prompt has them.
_NUM_BESIDE = 16
_MIN_BESIDE = 8
# Characters, white space included, among which those are looked for.
_MAX_LOOK = 1024


def tokenise_prompt(index: Index, prompt: PromptText, hints: Sequence[str] = ()) -> Tokens:
    """Tokenise a prompt as the index's setting of control strings asks.

    Parameters
    ----------
    index
        Its tokenizer, setting and chunks.
    prompt
        The prompt. Of messages all control strings are data. Of one string those are that stand in
        chunks, wherever a chunk's text stands in the prompt, and those whose surroundings show
        that they come from chunks found or retrieved lately, or their metadata.
    hints
        Ids of chunks likely in the prompt.
    """
    control = index.control
    if control is None:
        (tokens,) = encode(index.tokenizer, [prompt.text], prompt.add_special_tokens)
        return tokens
    if prompt.data is not None:
        tokens = control.prompt(
            prompt.text, add_special_tokens=prompt.add_special_tokens, data=prompt.data
        )
        # Those left are the template's.
        return replace(tokens, num_control=0)
    return control.prompt(
        prompt.text,
        add_special_tokens=prompt.add_special_tokens,
        is_data=_Origin(index, prompt.text, hints),
    )


class _Origin:
    """Says whether a control string in a prompt that is one string comes from a document.

    Both of its parts are made with the first such string, and asked in constant time: a prompt may
    hold thousands.
    """

    def __init__(self, index: Index, prompt: str, hints: Sequence[str]) -> None:
        self._index = index
        self._prompt = prompt
        self._hints = hints

    def __call__(self, start: int, end: int) -> bool:
        spans, is_whole = self._chunk_spans
        # Far too many candidates were to be compared: nobody but an attacker writes such text.
        # One that only touches a chunk is made of its characters as well.
        if not is_whole or overlaps(spans, (start, end)):
            return True
        string, left, right = _surroundings(self._prompt, start, end)
        return (string, left, right) in self._copies or any(
            left.endswith(before) and right.startswith(behind)
            for before, behind in self._short_copies.get(string, ())
        )

    @cached_property
    def _control(self) -> ControlTokens:
        assert self._index.control is not None
        return self._index.control

    @cached_property
    def _chunk_spans(self) -> tuple[list[Span], bool]:
        """Where chunks stand in the prompt, and whether that is all."""
        try:
            found, is_whole = self._index.matcher.find_all(self._prompt, self._hints)
        except (IndexFormatError, StoreError):
            return [], True
        spans: list[Span] = []
        for start, end in found:
            # A document that says no more than any rendered prompt would make text of all of them.
            if self._prompt[start:end] in self._control.template_text:
                continue
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return spans, is_whole

    @cached_property
    def _copies(self) -> set[tuple[str, str, str]]:
        """Control strings of chunks that may stand in the prompt changed, with what is beside."""
        return {
            _surroundings(text, *span)
            for text in self._likely_texts
            for span in self._control.find(text)
        }

    @cached_property
    def _short_copies(self) -> dict[str, set[tuple[str, str]]]:
        """By string, what is beside those that stand near the beginning or end of their text."""
        short: dict[str, set[tuple[str, str]]] = {}
        for string, left, right in self._copies:
            if min(len(left), len(right)) < _NUM_BESIDE and len(left) + len(right) >= _MIN_BESIDE:
                short.setdefault(string, set()).add((left, right))
        return short

    @cached_property
    def _likely_texts(self) -> list[str]:
        """Texts and metadata of chunks that were retrieved, or stand in the prompt."""
        retrieved = dict.fromkeys([*self._hints, *self._index.recent_chunk_ids])
        try:
            found = [match.chunk_id for match in self._index.matcher.find(self._prompt)]
            chunks = self._index.get_chunks(list(dict.fromkeys([*retrieved, *found])))
        except (IndexFormatError, StoreError):
            return []
        texts: list[str] = []
        for chunk in chunks:
            if chunk.chunk_id in retrieved or chunk.text not in self._control.template_text:
                texts.append(chunk.text)
            texts += _metadata(chunk)
        return texts


def _metadata(chunk: Chunk) -> Iterator[str]:
    """Yield what a prompt may say of a chunk beside its text, by itself and behind its name."""
    values: dict[str, Any] = {"source": chunk.source, **chunk.metadata}
    for name, value in values.items():
        yield str(value)
        yield f"{name}: {value}"


def _surroundings(text: str, start: int, end: int) -> tuple[str, str, str]:
    """Return a string in a text and the characters on either side of it, no white space."""
    left = "".join(text[max(0, start - _MAX_LOOK) : start].split())
    right = "".join(text[end : end + _MAX_LOOK].split())
    return text[start:end], left[-_NUM_BESIDE:], right[:_NUM_BESIDE]
