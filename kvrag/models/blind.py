"""Tokenising text as if it held no control strings."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrag.models.tokens import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
