"""The tokens of a prompt over an index: one answer for all who ask.

The engine, plain prefill beside it, the adapters and their token counters all come here, so that
the same prompt has the same tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvrag.chunk import Chunk
from kvrag.errors import IndexFormatError, StoreError
from kvrag.models.chat import PromptText
from kvrag.models.control import Span, Tokens, encode

if TYPE_CHECKING:
    from kvrag.ingest.index import Index

# Characters beside a control string, white space left out, by which a changed copy is recognised;
# fewer where the document begins or ends, but not so few that any prompt has them.
_NUM_BESIDE = 16
_MIN_BESIDE = 8


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
    """Says whether a control string in a prompt that is one string comes from a document."""

    def __init__(self, index: Index, prompt: str, hints: Sequence[str]) -> None:
        self._index = index
        self._prompt = prompt
        self._hints = hints
        self._spans: list[Span] | None = None
        self._is_whole = True
        self._texts: list[str] | None = None

    def __call__(self, start: int, end: int) -> bool:
        if self._spans is None:
            self._spans = self._found_spans()
        # Far too many candidates were to be compared: nobody but an attacker writes such text.
        if not self._is_whole:
            return True
        # One that only touches a chunk is made of its characters as well.
        if any(first < end and start < last for first, last in self._spans):
            return True
        if self._texts is None:
            self._texts = list(self._likely_texts())
        return any(self._is_copied(start, end, text) for text in self._texts)

    def _found_spans(self) -> list[Span]:
        control = self._index.control
        assert control is not None
        try:
            spans, self._is_whole = self._index.matcher.find_all(self._prompt, self._hints)
        except (IndexFormatError, StoreError):
            return []
        # A document that says no more than any rendered prompt does would turn all of them to text.
        return [span for span in spans if self._prompt[slice(*span)] not in control.template_text]

    def _likely_texts(self) -> Iterator[str]:
        """Yield texts and metadata of chunks that may stand in the prompt in another form."""
        control = self._index.control
        assert control is not None
        retrieved = dict.fromkeys([*self._hints, *self._index.recent_chunk_ids])
        try:
            found = [match.chunk_id for match in self._index.matcher.find(self._prompt)]
            chunks = self._index.get_chunks(list(dict.fromkeys([*retrieved, *found])))
        except (IndexFormatError, StoreError):
            return
        for chunk in chunks:
            if chunk.chunk_id in retrieved or chunk.text not in control.template_text:
                yield chunk.text
            yield from _metadata(chunk)

    def _is_copied(self, start: int, end: int, text: str) -> bool:
        """Return whether a control string has the same characters beside it as in a text."""
        prompt, string = self._prompt, self._prompt[start:end]
        before, behind = _last(prompt[:start]), _first(prompt[end:])
        place = text.find(string)
        while place >= 0:
            left, right = _last(text[:place]), _first(text[place + len(string) :])
            if (
                len(left) + len(right) >= _MIN_BESIDE
                and before.endswith(left)
                and behind.startswith(right)
            ):
                return True
            place = text.find(string, place + 1)
        return False


def _metadata(chunk: Chunk) -> Iterator[str]:
    """Yield what a prompt may say of a chunk beside its text, by itself and behind its name."""
    values: dict[str, Any] = {"source": chunk.source, **chunk.metadata}
    for name, value in values.items():
        yield str(value)
        yield f"{name}: {value}"


def _last(text: str) -> str:
    """Return the last characters of a text, white space left out."""
    return "".join(text[-8 * _NUM_BESIDE :].split())[-_NUM_BESIDE:]


def _first(text: str) -> str:
    return "".join(text[: 8 * _NUM_BESIDE].split())[:_NUM_BESIDE]
