"""The tokens of a prompt over an index, the same for every caller.

The engine, full prefill, the adapters and their token counters all use this module, so that one
prompt has the same tokens everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvrag.chunk import Chunk
from kvrag.errors import IndexFormatError, StoreError
from kvrag.models import templates
from kvrag.models.chat import PromptText
from kvrag.models.control import ControlTokens
from kvrag.models.tokens import Span, Tokens, overlaps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvrag.ingest.index import Index
    from kvrag.models.known_text import KnownText

# Characters next to a control string, without white space, that identify a changed copy. At the
# beginning or end of a document fewer will do, but more than every prompt has.
_NUM_BESIDE = 16
_MIN_BESIDE = 8
# Characters, with white space, in which those are searched for.
_MAX_LOOK = 1024
# Characters, without white space, that identify one of the chat template's places.
_NUM_AT_PLACE = 64
# The beginning or end of a prompt. White space is removed elsewhere, so no text can hold it.
_EDGE = "\n"
# Stands for the contents of messages in a rendered template.
_CONTENT = "\ue012"
_ROLES = (("user",), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))
_SYSTEM = (("system", "user"),)


def tokenise_prompt(
    index: Index, prompt: PromptText, hints: Sequence[str] = (), known: Sequence[KnownText] = ()
) -> Tokens:
    """Tokenise a prompt according to the index's setting for control strings.

    Parameters
    ----------
    index
        The index: its tokenizer, setting and chunks are used.
    prompt
        The prompt. In messages, all control strings are data. In a single string, these are data:
        those inside the text of a chunk, wherever the prompt holds it; those whose surroundings
        come from recently found or retrieved chunks, or from their metadata; and all others that
        such chunks hold, except at the chat template's own places. Where such a chunk imitates the
        template and was rewritten, only the prompt's beginning and end are such places.
    hints
        Ids of chunks that the prompt is likely to hold.
    known
        Where it holds chunks, in order, without overlap: that only saves time.
    """
    control, adds = index.control, prompt.add_special_tokens
    tokens = index.known_texts.encode(prompt.text, adds, known)
    if control is None:
        return tokens
    if prompt.data is not None:
        tokens = control.prompt(prompt.text, tokens, add_special_tokens=adds, data=prompt.data)
        # The remaining ones are the template's.
        return replace(tokens, num_control=0)
    origin = _Origin(index, control, prompt.text, hints)
    return control.prompt(prompt.text, tokens, add_special_tokens=adds, is_data=origin)


class _Origin:
    """Decides whether a control string in a single-string prompt comes from a document.

    Both parts are built at the first such string and answer in constant time: a prompt may hold
    thousands.
    """

    def __init__(
        self, index: Index, control: ControlTokens, prompt: str, hints: Sequence[str]
    ) -> None:
        self._index = index
        self._control = control
        self._prompt = prompt
        self._hints = hints

    def __call__(self, start: int, end: int) -> bool:
        if self._is_copied(start, end):
            return True
        # However the caller changed or cut the string's surroundings: it is not the template's.
        if self._prompt[start:end] not in self._likely_strings:
            return False
        # A chunk that imitates turns has its strings at the template's places too.
        if self._is_imitated:
            return (start, end) not in self._frame
        return not self._is_template_place(start, end)

    def _is_copied(self, start: int, end: int) -> bool:
        """Return whether a control string's surroundings come from a document."""
        spans, is_whole = self._chunk_spans
        # There were far too many candidates to compare: only an attacker writes such text.
        # A string that overlaps a chunk only partly consists of its characters too.
        if not is_whole or overlaps(spans, (start, end)):
            return True
        string, left, right = _surroundings(self._prompt, start, end)
        return (string, left, right) in self._copies or any(
            left.endswith(before) and right.startswith(behind)
            for before, behind in self._short_copies.get(string, ())
        )

    def _is_template_place(self, start: int, end: int) -> bool:
        """Return whether a control string is at a place where the chat template writes it."""
        string, left, right = _surroundings(self._prompt, start, end, _NUM_AT_PLACE)
        left = f"{_EDGE if start <= _MAX_LOOK else ''}{left}"[-_NUM_AT_PLACE:]
        right += _EDGE if len(self._prompt) - end <= _MAX_LOOK else ""
        for before, behind in self._template_places.get(string, ()):
            if not (left.endswith(before) and right.startswith(behind)):
                continue
            # A document's own string beside it makes no place: a title before a chunk's text, say.
            beside: list[Span] = []
            if self._control.find(before):
                begin = max(0, start - _MAX_LOOK)
                found = self._control.find(self._prompt[begin:start])
                beside += [(begin + first, begin + last) for first, last in found[-1:]]
            if self._control.find(behind):
                found = self._control.find(self._prompt[end : end + _MAX_LOOK])
                beside += [(end + first, end + last) for first, last in found[:1]]
            if not any(self._is_copied(*span) for span in beside):
                return True
        return False

    @cached_property
    def _is_imitated(self) -> bool:
        """Return whether a likely text that imitates the template is not in the prompt as it is.

        The prompt may hold it rewritten beyond recognition.
        """
        prompt = "".join(self._prompt.split())
        return any(
            self._imitates(text)
            for text in dict.fromkeys(self._likely_texts)
            if "".join(text.split()) not in prompt
        )

    def _imitates(self, text: str) -> bool:
        """Return whether a text has a control string at one of the template's places.

        Where the text ends before the place does, another text may complete it.
        """
        for span in self._control.find(text):
            string, left, right = _surroundings(text, *span, _NUM_AT_PLACE)
            for before, behind in self._template_places.get(string, ()):
                before, behind = before[-len(left) :] if left else "", behind[: len(right)]
                if left.endswith(before) and right.startswith(behind):
                    return True
        return False

    @cached_property
    def _frame(self) -> set[Span]:
        """Return the control strings that begin and end the prompt as the template does.

        The turn after a system message counts if the prompt has only one like it.
        """
        found: list[Span] = []
        for prompt in _rendered(self._index.tokenizer, _ROLES[:1] + _SYSTEM):
            begin = self._index.tokenizer.bos_token or ""
            first, *others = prompt.removeprefix(begin).split(_CONTENT)
            head = re.match(rf"({_spaced(begin)})?{_spaced(first)}", self._prompt)
            tail = re.search(rf"{_spaced(others[-1])}\Z", self._prompt) if others else None
            found += [match.span() for match in (head, tail) if match]
            if head and first.strip() and len(others) == 2:
                turns = list(re.finditer(_spaced(others[0]), self._prompt[head.end() :]))
                if len(turns) == 1:
                    start, end = turns[0].span()
                    found.append((head.end() + start, head.end() + end))
        return {
            (begin + start, begin + end)
            for begin, stop in found
            for start, end in self._control.find(self._prompt[begin:stop])
        }

    @cached_property
    def _template_places(self) -> dict[str, set[tuple[str, str]]]:
        return _template_places(self._index.tokenizer, self._control)

    @cached_property
    def _chunk_spans(self) -> tuple[list[Span], bool]:
        """Return where the prompt holds chunks, and whether the list is complete."""
        try:
            found, is_whole = self._index.matcher.find_all(self._prompt, self._hints)
        except (IndexFormatError, StoreError):
            return [], True
        spans: list[Span] = []
        for start, end in found:
            # A document that says no more than every rendered prompt would match all of them.
            if self._prompt[start:end] in self._control.template_text:
                continue
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return spans, is_whole

    @cached_property
    def _copies(self) -> set[tuple[str, str, str]]:
        """Return control strings of chunks that the prompt may hold changed, with neighbours."""
        return {
            _surroundings(text, *span)
            for text in self._likely_texts
            for span in self._control.find(text)
        }

    @cached_property
    def _likely_strings(self) -> set[str]:
        """Return the control strings anywhere in chunks that the prompt is likely to hold."""
        return {string for string, _, _ in self._copies}

    @cached_property
    def _short_copies(self) -> dict[str, set[tuple[str, str]]]:
        """Return, by string, the neighbours of those near the beginning or end of their text."""
        short: dict[str, set[tuple[str, str]]] = {}
        for string, left, right in self._copies:
            if min(len(left), len(right)) < _NUM_BESIDE and len(left) + len(right) >= _MIN_BESIDE:
                short.setdefault(string, set()).add((left, right))
        return short

    @cached_property
    def _likely_texts(self) -> list[str]:
        """Return texts and metadata of chunks that were retrieved, or that the prompt holds."""
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
    """Yield what a prompt may say of a chunk in addition to its text.

    Yields each value alone and after its name, strings inside lists and mappings likewise, and for
    a source its base name and stem as well.
    """
    path = PurePath(chunk.source)
    yield path.name
    yield path.stem
    values: list[tuple[Any, Any]] = [("source", chunk.source), *chunk.metadata.items()]
    while values:
        name, value = values.pop()
        yield str(value)
        yield f"{name}: {value}"
        if isinstance(value, Mapping):
            values += value.items()
        elif isinstance(value, list | tuple):
            values += [(name, one) for one in value]


def _template_places(
    tokenizer: PreTrainedTokenizerBase, control: ControlTokens
) -> dict[str, set[tuple[str, str]]]:
    """Return, by control string, what the chat template writes before and after it.

    Each side reaches to the next control string or the prompt's edge. A side that holds neither
    counts only if the other side holds neither as well: role names and dates change. A string with
    contents on both sides has no place: it looks like one inside the contents.
    """
    begin = tokenizer.bos_token
    places: dict[str, set[tuple[str, str]]] = {}
    if begin:
        places[begin] = {(_EDGE, "")}
    for rendered in _rendered(tokenizer):
        # Callers let the tokenizer add the first token, or write it themselves.
        bare = rendered.removeprefix(begin or "")
        for prompt in {rendered, bare, f"{begin or ''}{bare}"}:
            pieces = prompt.split(_CONTENT)
            for number, piece in enumerate(pieces):
                edges = (_EDGE if number == 0 else "", _EDGE if number == len(pieces) - 1 else "")
                for string, place in _places_in(piece, edges, control.find(piece)):
                    places.setdefault(string, set()).add(place)
    return places


def _places_in(
    piece: str, edges: tuple[str, str], spans: Sequence[Span]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the control strings between contents, with their neighbours."""
    for number, (start, end) in enumerate(spans):
        is_first, is_last = number == 0, number == len(spans) - 1
        left = "".join(piece[0 if is_first else spans[number - 1][0] : start].split())
        right = "".join(piece[end : None if is_last else spans[number + 1][1]].split())
        left, right = (edges[0] if is_first else "") + left, right + (edges[1] if is_last else "")
        is_left_bound = not is_first or bool(edges[0])
        is_right_bound = not is_last or bool(edges[1])
        if is_left_bound and not is_right_bound:
            right = ""
        elif is_right_bound and not is_left_bound:
            left = ""
        if left or right:
            yield piece[start:end], (left[-_NUM_AT_PLACE:], right[:_NUM_AT_PLACE])


def _rendered(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[str]] = _ROLES
) -> Iterator[str]:
    """Yield the conversations, given by roles, that the chat template can render."""
    if not getattr(tokenizer, "chat_template", None):
        return
    for roles in conversations:
        messages = [{"role": role, "content": _CONTENT} for role in roles]
        try:
            yield templates.render(tokenizer, messages, add_generation_prompt=True)
        except templates.TemplateRefusalError:  # perhaps of a role
            continue


def _spaced(text: str) -> str:
    """Return a pattern for a text with any white space anywhere in it and around it."""
    return r"\s*" + "".join(re.escape(one) + r"\s*" for one in "".join(text.split()))


def _surroundings(
    text: str, start: int, end: int, number: int = _NUM_BESIDE
) -> tuple[str, str, str]:
    """Return a string in a text and the characters on both sides, without white space."""
    left = "".join(text[max(0, start - _MAX_LOOK) : start].split())
    right = "".join(text[end : end + _MAX_LOOK].split())
    return text[start:end], left[-number:], right[:number]
