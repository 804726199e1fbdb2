"""Text to token ids with their places, as in the plain pipeline."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

from kvrag.arguments import shown
from kvrag.errors import ModelLoadError
from kvrag.models.tokenizer import Tokenizer
from kvrag.plugins import reason
from kvrag.process import working

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

# How some tokenizers write the token of a byte.
_BYTE = re.compile("<0x[0-9A-F]{2}>")

# Bytes of a character before its last one.
_MOST_INCOMPLETE = 3

Span = tuple[int, int]
"""First character, and the character after the last."""


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes
    ----------
    token_ids
        Token ids, length T.
    offsets
        For each token its first character and its end, ``(0, 0)`` for tokens that the tokenizer
        adds. Length T; empty for a tokenizer that reports none.
    num_neutralised
        Number of control strings that were tokenised as text.
    num_control
        Number of control strings that are control tokens, without those that the tokenizer adds.
    """

    token_ids: tuple[int, ...]
    offsets: Sequence[Span]
    num_neutralised: int = 0
    num_control: int = 0


class SpliceOffsets(Sequence[Span]):
    """Offsets of a prompt whose tokens are partly those of known texts.

    Parameters
    ----------
    starts
        Each token's first character ``[T]``.
    apart
        The offsets of the tokens that are of no known text.
    whole
        Tokenises the prompt as a whole, for the ends of the others: they are seldom asked for.
    """

    def __init__(
        self,
        starts: NDArray[np.int64],
        apart: Mapping[int, Span],
        whole: Callable[[], Sequence[Span]],
    ) -> None:
        self.starts, self.apart, self._tokenise = starts, apart, whole

    @cached_property
    def _whole(self) -> Sequence[Span]:
        return self._tokenise()

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> Span: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Span]: ...

    def __getitem__(self, number: int | slice) -> Span | Sequence[Span]:
        if isinstance(number, int) and number in self.apart:
            return self.apart[number]
        return self._whole[number]


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_special_tokens: bool
) -> list[Tokens]:
    """Tokenise texts as in the plain pipeline.

    Raises
    ------
    ModelLoadError
        When the tokenizer fails: its files can make it panic over some texts.
    """
    try:
        with working():
            if isinstance(tokenizer, Tokenizer):
                return [
                    Tokens(tuple(one.ids), one.offsets)
                    for one in tokenizer.backend_tokenizer.encode_batch(
                        list(texts), add_special_tokens=add_special_tokens
                    )
                ]
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
    except (TypeError, UnicodeError):  # no text: the caller's fault
        raise
    except BaseException as error:
        raise ModelLoadError(
            f"the tokenizer {shown(tokenizer.name_or_path)} fails over a text of "
            f"{max(map(len, texts), default=0):,} characters: {reason(error)}; restore its "
            "tokenizer.json and tokenizer_config.json"
        ) from error
    offsets = encoded["offset_mapping"] if tokenizer.is_fast else [()] * len(texts)
    return [
        Tokens(tuple(ids), places)
        for ids, places in zip(encoded["input_ids"], offsets, strict=True)
    ]


def byte_characters() -> dict[int, str]:
    """Return how tokenizers of GPT-2's kind write each byte."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in shown]
    named = {byte: chr(0x100 + number) for number, byte in enumerate(hidden)}
    return {byte: named.get(byte, chr(byte)) for byte in (*sorted(shown), *hidden)}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """Return what a token adds to a text, in UTF-8; it may be a part of a character."""
    # None for rows that pad the vocabulary.
    piece = str(tokenizer.convert_ids_to_tokens(token_id) or "")
    if _BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    if "\ufffd" in text:
        byte_of = {character: number for number, character in byte_characters().items()}
        if all(character in byte_of for character in piece):
            return bytes(byte_of[character] for character in piece)
    # Decoders drop the space before a text's first word.
    is_later = piece.startswith("\u2581") and not text.startswith(" ")
    return (" " * is_later + text).encode()


def num_continued(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], token_id: int
) -> int:
    """Return how many characters at the end of a text the next token adds bytes to.

    Such characters are U+FFFD: one for an incomplete character, or one for each of its bytes where
    tokens are single bytes.

    Parameters
    ----------
    tokenizer
        The tokenizer, which decodes the text.
    token_ids
        The text's tokens, without those that it hides; the last three matter.
    token_id
        The next token.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for one in token_ids[-_MOST_INCOMPLETE:]:
        decoder.decode(token_bytes(tokenizer, one))
    incomplete, _ = decoder.getstate()
    if not incomplete:
        return 0
    # The first byte of the next character would make one of them at once.
    if decoder.decode(token_bytes(tokenizer, token_id)[:1]).startswith("\ufffd"):
        return 0
    piece = str(tokenizer.convert_ids_to_tokens(token_ids[-1]))
    return len(incomplete) if _BYTE.fullmatch(piece) else 1


def overlaps(spans: Sequence[Span], span: Span) -> bool:
    """Return whether a span shares a character with one of several ordered, disjoint spans."""
    place = bisect_left(spans, span[0], key=lambda one: one[1])
    while place < len(spans) and spans[place][0] < span[1]:
        if spans[place][1] > span[0]:
            return True
        place += 1
    return False


def num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    for index, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return index
    return min(len(ids), len(others))
