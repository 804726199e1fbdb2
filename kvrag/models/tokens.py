"""Text to token ids with their places, as the plain pipeline does it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""First character, and the first behind."""


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes
    ----------
    token_ids
        Length T.
    offsets
        For each token its first character and the first behind, ``(0, 0)`` for tokens that the
        tokenizer adds. Length T; empty for a tokenizer that gives none.
    num_neutralised
        Control strings that were tokenised as text.
    num_control
        Control strings that are control tokens, those not counted that the tokenizer adds.
    """

    token_ids: tuple[int, ...]
    offsets: Sequence[Span]
    num_neutralised: int = 0
    num_control: int = 0


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_special_tokens: bool
) -> list[Tokens]:
    """Tokenise texts as the plain pipeline does."""
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        return_token_type_ids=False,
        padding=False,
        truncation=False,
        verbose=False,
    )
    offsets = encoded["offset_mapping"] if tokenizer.is_fast else [()] * len(texts)
    return [
        Tokens(tuple(ids), places)
        for ids, places in zip(encoded["input_ids"], offsets, strict=True)
    ]


def overlaps(spans: Sequence[Span], span: Span) -> bool:
    """Return whether a span shares a character with one of several, in order and apart."""
    place = bisect_left(spans, span[0], key=lambda one: one[1])
    while place < len(spans) and spans[place][0] < span[1]:
        if spans[place][1] > span[0]:
            return True
        place += 1
    return False
