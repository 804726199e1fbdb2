"""Control strings of a tokenizer, and tokenising text in which they are only text.

A tokenizer turns some strings into tokens that steer the model: the end of text, the beginning of
a turn. A document that holds them could end its own turn and begin another one. This module
separates such strings from those that a prompt's author or a chat template wrote, and tokenises
them as the characters that they are.

The tokens that result decide, not how the text looks: look-alikes that the tokenizer's normaliser
turns into a control string are found as well.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.models import templates
from kvrag.models.tokens import Span, SpliceOffsets, Tokens, encode, overlaps

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Tokenising text as if it held no control strings.


@dataclass(frozen=True)
class ControlToken:
    """A control token in a text: the characters that it came from, without white space."""

    token_id: int
    span: Span
    start: int
    end: int
    is_exact: bool


class BlindTokenizer:
    """A copy of a tokenizer that sees no control strings.

    Its two marks stand for the control token before or after a text: one for tokens that are looked
    up in the text as written, one for tokens looked up in normalised text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Iterable[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        definition = json.loads(tokenizer.backend_tokenizer.to_str())
        definition["truncation"] = definition["padding"] = None
        known = set(strings)
        self._normalised = set()
        for token in definition["added_tokens"]:
            # Tokens flagged special are hidden from the copy, so that no token number changes.
            token["special"] = token["content"] in known
            if token["normalized"] and not token["lstrip"]:
                self._normalised.add(token["id"])
        self._backend = Tokenizer.from_str(json.dumps(definition))
        self._backend.encode_special_tokens = True
        # Digits at the ends: unlike a letter, a digit does not combine with an accent after it.
        letters = [
            f"7{''.join(chr(ord('a') + byte % 26) for byte in secrets.token_bytes(24))}7"
            for _ in range(2)
        ]
        self.marks = (letters[0], letters[1])
        self._backend.add_tokens(
            [
                AddedToken(mark, normalized=bool(number), special=False)
                for number, mark in enumerate(self.marks)
            ]
        )
        self._mark_ids = {self._backend.token_to_id(mark) for mark in self.marks}

    def mark(self, control: ControlToken | None) -> str:
        """Return the mark for a control token beside a text; "" for the prompt's end."""
        if control is None:
            return ""
        return self.marks[control.token_id in self._normalised]

    def end_before(self, control: ControlToken) -> int:
        """Return where the text before a control token ends, for `encode` with its mark after it.

        If the token took a space for the one that normalising puts before it, that space is left to
        the mark, which gets a space as well.
        """
        return control.span[0] if control.token_id in self._normalised else control.start

    def encode(self, before: str, text: str, after: str) -> Iterator[tuple[int, int, int]]:
        """Yield id, first character and end of a text's tokens between two marks."""
        if not text:
            return
        ids: list[int] = []
        for marks in ((before, after), (before and self.marks[0], after and self.marks[0])):
            encoding = self._backend.encode(marks[0] + text + marks[1], add_special_tokens=False)
            ids = encoding.ids
            if sum(token_id in self._mark_ids for token_id in ids) == sum(map(bool, marks)):
                break  # otherwise the normaliser merged the mark and the text beside it
        skipped, size = len(marks[0]), len(text)
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token_id not in self._mark_ids:
                yield token_id, min(max(start - skipped, 0), size), min(max(end - skipped, 0), size)


KEEP = "keep"
"""Control strings in documents become control tokens, as in a plain pipeline."""
NEUTRALISE = "neutralise"
"""Control strings in documents and messages are tokenised as text."""
REFUSE = "refuse"
"""A document that holds control strings is not ingested; prompts are handled as in `NEUTRALISE`."""
CONTROL_TOKENS = (KEEP, NEUTRALISE, REFUSE)

# Added tokens that mark turns are not always flagged special: `<|user|>`, or DeepSeek's with
# full-width bars.
_MARKER = re.compile("<[|\uff5c].+[|\uff5c]>")
# Where a template cuts contents: at the end of the reasoning in an earlier answer.
_SPLIT_AT = re.compile(r"""split\(\s*(["'])(.+?)\1""")
_PROBES = (
    [{"role": "user", "content": "a"}],
    [{"role": role, "content": "a"} for role in ("user", "assistant", "user")],
    [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")],
)
# Overlapping tokens are found one after another, each in another pass.
_MAX_ROUNDS = 8


def check_control_tokens(mode: str | None) -> None:
    """Raise ParameterError for an unknown mode; None stands for the default."""
    if mode is not None and mode not in CONTROL_TOKENS:
        raise ParameterError(
            f"control_tokens {shown(mode)}: expected one of {', '.join(CONTROL_TOKENS)}"
        )


def default_control_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return `NEUTRALISE` for a chat model's tokenizer, `KEEP` for any other."""
    return NEUTRALISE if getattr(tokenizer, "chat_template", None) else KEEP


class ControlTokens:
    """The control strings of one tokenizer.

    They are all special tokens, and the added tokens that the chat template writes or that look
    like ``<|user|>``, whether flagged special or not. A string of one character does not count,
    because it cannot be distinguished from text.

    Parameters
    ----------
    tokenizer
        A fast tokenizer.

    Attributes
    ----------
    strings
        The control strings.

    Notes
    -----
    Safe to use from several threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend: Tokenizer = tokenizer.backend_tokenizer
        source = _template_source(tokenizer)
        self.template_text = "\n".join(_rendered_probes(tokenizer))
        added = backend.get_added_tokens_decoder().values()
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {token.content for token in added if token.special}
        written = source + self.template_text
        markers = {
            token.content
            for token in added
            if (token.content.strip() in written and not token.content.strip().isalnum())
            or _MARKER.fullmatch(token.content)
        }
        found = {text: backend.token_to_id(text) for text in special | markers}
        self._content_by_id = {
            number: text
            for text, number in found.items()
            if number is not None and len(text.strip()) > 1
        }
        self.strings = frozenset(self._content_by_id.values())
        self._unknown_id: int | None = _unknown_id(tokenizer)
        # The template may still see only these in what an assistant said.
        self._cut_at = frozenset(match[2] for match in _SPLIT_AT.finditer(source)) - special
        self._has_normaliser = backend.normalizer is not None

    # -- finding ------------------------------------------------------------------------------

    def find(self, text: str) -> list[Span]:
        """Return where a text holds control strings as written."""
        return [match.span() for match in self._pattern.finditer(text)]

    def find_any(self, text: str) -> list[Span]:
        """Return where a text holds strings that become control tokens, including look-alikes."""
        if not self._has_normaliser:
            return self.find(text)
        (tokens,) = encode(self._tokenizer, [text], False)
        return [one.span for one in self._controls(text, tokens.token_ids, tokens.offsets)]

    def hidden_spans(self, content: str, *, is_answer: bool = False) -> list[Span]:
        """Return the parts of a message's content to hide from the chat template and tokenizer.

        These are control strings, and pieces of one at the content's edge, which the template's own
        text might complete. Strings at which the template cuts earlier answers (``</think>``) stay
        visible in answers.
        """
        spans = [
            span
            for span in self.find(content)
            if not (is_answer and content[slice(*span)] in self._cut_at)
        ]
        stripped = content.strip()
        begin = content.find(stripped)
        end = begin + len(stripped)
        free_from = max((stop for _, stop in spans), default=begin)
        free_to = min((start for start, _ in spans), default=end)
        for length in range(min(self._longest, len(stripped)), 0, -1):
            if begin + length <= free_to and content[begin : begin + length] in self._ends:
                spans.insert(0, (begin, begin + length))
                free_from = max(free_from, begin + length)
                break
        for length in range(min(self._longest, len(stripped)), 0, -1):
            if end - length >= free_from and content[end - length : end] in self._beginnings:
                spans.append((end - length, end))
                break
        return spans

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        if not self.strings:
            return re.compile(r"(?!)")
        return re.compile(_trie_pattern(self.strings))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.strings), default=0)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self.strings for n in range(1, len(text)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self.strings for n in range(1, len(text)))

    # -- tokenising ---------------------------------------------------------------------------

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenise texts that are data throughout, without special tokens."""
        return [
            self._told_apart(text, tokens, False, ((0, len(text)),), _never)
            for text, tokens in zip(texts, encode(self._tokenizer, texts, False), strict=True)
        ]

    def prompt(
        self,
        text: str,
        tokens: Tokens | None = None,
        *,
        add_special_tokens: bool,
        data: Sequence[Span] = (),
        is_data: Callable[[int, int], bool] | None = None,
    ) -> Tokens:
        """Tokenise a prompt.

        Parameters
        ----------
        text
            The rendered prompt.
        tokens
            The tokenizer's own result; None: not known yet.
        add_special_tokens
            Whether the tokenizer adds its own.
        data
            Spans of characters in which no control string acts as control, in order.
        is_data
            Decides for any other control string whether it is data, by its first character and its
            end.

        Returns
        -------
        Tokens
            If no control string is data, the tokenizer's own result. Otherwise, each stretch
            between two genuine control tokens that holds such a string gets the tokens that it
            would have if such strings were ordinary words.
        """
        if tokens is None:
            (tokens,) = encode(self._tokenizer, [text], add_special_tokens)
        return self._told_apart(text, tokens, add_special_tokens, data, is_data or _never)

    def _told_apart(
        self,
        text: str,
        tokens: Tokens,
        add_special_tokens: bool,
        data: Sequence[Span],
        is_data: Callable[[int, int], bool],
    ) -> Tokens:
        def is_forged(one: ControlToken) -> bool:
            return not one.is_exact or overlaps(data, one.span) or is_data(*one.span)

        genuine = self._controls(text, tokens.token_ids, tokens.offsets)
        forged: list[ControlToken] = []
        # A forged token may hide a genuine one that it overlaps: search again without it.
        probe, round_number = text, 0
        while found := [one for one in genuine if is_forged(one)]:
            forged += found
            round_number += 1
            if data == ((0, len(text)),) or round_number == _MAX_ROUNDS:
                genuine = [one for one in genuine if not is_forged(one)]
                break
            probe = _overwritten(probe, [*data, *(one.span for one in found)])
            (again,) = encode(self._tokenizer, [probe], add_special_tokens)
            genuine = self._controls(probe, again.token_ids, again.offsets)
        if not forged:
            return Tokens(tokens.token_ids, tokens.offsets, 0, len(genuine))
        return self._spliced(text, add_special_tokens, genuine, len(forged))

    def _spliced(
        self, text: str, add_special_tokens: bool, genuine: Sequence[ControlToken], num_forged: int
    ) -> Tokens:
        """Tokenise a text whose genuine control tokens are known; everything else is text."""
        head, tail = self._framing(text) if add_special_tokens else ((), ())
        token_ids, offsets = list(head), [(0, 0)] * len(head)
        begin, left = 0, None
        for right in (*genuine, None):
            end = len(text) if right is None else self._blind.end_before(right)
            for token_id, start, stop in self._as_text(text, begin, end, left, right):
                token_ids.append(token_id)
                offsets.append((start, stop))
            if right is not None:
                token_ids.append(right.token_id)
                offsets.append((right.start, right.end))
                begin, left = right.end, right
        token_ids += tail
        offsets += [(0, 0)] * len(tail)
        return Tokens(tuple(token_ids), offsets, num_forged, len(genuine))

    def _controls(
        self, text: str, token_ids: Sequence[int], offsets: Sequence[Span]
    ) -> list[ControlToken]:
        content_by_id = self._content_by_id
        found = []
        # Known texts hold none.
        numbers = offsets.apart if isinstance(offsets, SpliceOffsets) else range(len(token_ids))
        for number in [one for one in numbers if token_ids[one] in content_by_id]:
            start, end = offsets[number]
            if start == end:
                continue  # added by the tokenizer
            token_id = token_ids[number]
            written = text[start:end]
            inner = written.strip()
            is_exact = inner == content_by_id[token_id].strip()
            if not is_exact and token_id == self._unknown_id:
                continue  # the token of any unknown word
            first = start + written.find(inner)
            span = (first, first + len(inner)) if inner else (start, end)
            found.append(ControlToken(token_id, span, start, end, is_exact))
        return found

    def _framing(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the tokenizer adds before and after a text."""
        encoded = self._tokenizer(
            text, return_special_tokens_mask=True, return_attention_mask=False, verbose=False
        )
        ids, mask = encoded["input_ids"], encoded["special_tokens_mask"]
        num_head = next((n for n, is_added in enumerate(mask) if not is_added), len(mask))
        num_tail = next((n for n, is_added in enumerate(reversed(mask)) if not is_added), 0)
        return tuple(ids[:num_head]), tuple(ids[len(ids) - num_tail :])

    def _as_text(
        self, text: str, begin: int, end: int, left: ControlToken | None, right: ControlToken | None
    ) -> list[tuple[int, int, int]]:
        """Return id, first character and end of a stretch's tokens, none of them control tokens.

        Parameters
        ----------
        left, right
            The control tokens before and after the stretch: they decide whether the tokenizer puts
            a space before the first word.
        """
        blind = self._blind
        cuts = [begin, end]
        while True:
            tokens: list[tuple[int, int, int]] = []
            more: set[int] = set()
            for start, stop in pairwise(cuts):
                before = blind.mark(left) if start == begin else blind.marks[0]
                after = blind.mark(right) if stop == end else blind.marks[0]
                for token_id, first, last in blind.encode(before, text[start:stop], after):
                    if token_id in self._content_by_id and token_id != self._unknown_id:
                        # The model's own vocabulary holds the string as a word: split the word.
                        if last - first > 1:
                            more.add(start + (first + last) // 2)
                            continue
                        # One character that is a control token by itself cannot be split.
                        if self._unknown_id is None:
                            continue
                        token_id = self._unknown_id
                    tokens.append((token_id, start + first, start + last))
            if not more:
                return tokens
            cuts = sorted({*cuts, *more})

    @cached_property
    def _blind(self) -> BlindTokenizer:
        return BlindTokenizer(self._tokenizer, self.strings)


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], control: ControlTokens | None
) -> list[Tokens]:
    """Tokenise documents without special tokens; `control` None keeps their control strings."""
    if control is None:
        return encode(tokenizer, texts, False)
    return control.documents(texts)


def _never(start: int, end: int) -> bool:  # noqa: ARG001
    return False


def _overwritten(text: str, spans: Iterable[Span]) -> str:
    """Return a text of the same length with some spans overwritten."""
    characters = list(text)
    for start, end in spans:
        characters[start:end] = "x" * (end - start)
    return "".join(characters)


def _unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of unknown words, unless that token also steers the model (GPT-2)."""
    unknown = tokenizer.unk_token_id
    others = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.sep_token_id,
        tokenizer.cls_token_id,
    )
    return None if unknown is None or unknown in others else int(unknown)


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def _rendered_probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield empty conversations, as far as the chat template renders them."""
    if not _template_source(tokenizer):
        return
    for messages in _PROBES:
        try:
            yield templates.render(tokenizer, messages, add_generation_prompt=True)
        except templates.TemplateRefusalError:  # perhaps of a role
            continue


def _trie_pattern(strings: Iterable[str]) -> str:
    """Return a regular expression for the longest of many strings, merged by common prefixes."""
    trie: dict[str, Any] = {}
    for string in strings:
        node = trie
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    # Without recursion: strings may be longer than the interpreter's stack.
    pieces: list[str] = []
    stack: list[Any] = [trie]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            pieces.append(node)
            continue
        edges = [(character, after) for character, after in node.items() if character]
        if not edges:
            continue
        if len(edges) == 1 and "" not in node:
            (character, after) = edges[0]
            pieces.append(re.escape(character))
            stack.append(after)
            continue
        stack.append(")?" if "" in node else ")")
        for number, (character, after) in reversed(list(enumerate(edges))):
            stack += [after, ("|" if number else "(?:") + re.escape(character)]
    return "".join(pieces)
