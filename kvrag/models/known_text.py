"""Tokenising a prompt without tokenising again what it holds of texts whose tokens are known.

Between a letter and a space with a letter after it, the pre-tokenizers of GPT-2, Llama 3, Qwen 2
and their like always cut, whatever is around: each of their alternatives that takes a letter ends
before a space, and none looks back. What is between two such borders has the same tokens in every
text. So a known text is taken out of the prompt from its first border to its last, which leaves a
border there, and its own tokens are put in afterwards.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import Chunk
from kvrag.models.tokens import Span, SpliceOffsets, Tokens, byte_characters, encode

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

_FIRST = re.compile("[A-Za-z](?= [A-Za-z])")
_LAST = re.compile(".*[A-Za-z](?= [A-Za-z])", re.DOTALL)
_MIN_TAKEN = 32  # characters; fewer are tokenised as quickly
_MOST_KNOWN = 256
# What pre-tokenizers split by: GPT-2's, Llama 3's, that of Qwen 2 and 3, and kvrag-tiny's.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_WORDS}\p{{N}}{{1,3}}{_OTHERS}",
    rf"{_WORDS}\p{{N}}{_OTHERS}",
    r" ?[A-Za-z]+| ?[0-9]+|\n+| ?[^\sA-Za-z0-9]+|\s",
)


@dataclass(frozen=True)
class KnownText:
    """Characters ``[start, end)`` of a prompt, which a chunk's text begins with."""

    start: int
    end: int
    chunk: Chunk


@dataclass(frozen=True, eq=False)
class _Middle:
    """What a text has between its first border and its last: characters and tokens."""

    first: int
    end: int
    token_ids: tuple[int, ...]
    ids: NDArray[np.int64]
    starts: NDArray[np.int64]


class KnownTexts:
    """Tokenises prompts that hold known texts, exactly as they are without. Safe to use by threads.

    Parameters
    ----------
    tokenizer
        The tokenizer that the texts' tokens are of. If it is not known to cut at borders, prompts
        are tokenised as a whole.
    holds_control
        Returns whether a text has tokens of another kind in a prompt than alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        holds_control: Callable[[str], object] = lambda _: False,
    ) -> None:
        self._tokenizer = tokenizer
        self._holds_control = holds_control
        self._spellings = _Spellings(tokenizer) if cuts_at_borders(tokenizer) else None
        # By chunk and number of characters; None: the text has no tokens that stay.
        self._middles: dict[tuple[str, int], tuple[Chunk, _Middle | None]] = {}

    def encode(self, text: str, add_special_tokens: bool, known: Sequence[KnownText]) -> Tokens:
        """Tokenise a prompt, as `kvrag.models.tokens.encode` does.

        Parameters
        ----------
        known
            What is known of it, in order, without overlap.
        """

        def whole() -> Tokens:
            return encode(self._tokenizer, [text], add_special_tokens)[0]

        taken: list[tuple[int, _Middle]] = []
        for one in known if self._spellings is not None else ():
            own = one.chunk.text[: one.end - one.start]
            middle = self._middle(one.chunk, len(own))
            if middle is not None and text.startswith(own, one.start):
                taken.append((one.start, middle))
        if not taken:
            return whole()
        left, begin = [], 0
        for start, middle in taken:
            left.append(text[begin : start + middle.first])
            begin = start + middle.end
        left.append(text[begin:])
        (rest,) = encode(self._tokenizer, ["".join(left)], add_special_tokens)
        return _joined(rest, taken, lambda: whole().offsets)

    def _middle(self, chunk: Chunk, size: int) -> _Middle | None:
        key = chunk.chunk_id, size
        known, middle = self._middles.get(key, (None, None))
        if known is not chunk:
            middle = self._middle_of(chunk, size)
            if len(self._middles) >= _MOST_KNOWN:
                self._middles.clear()
            self._middles[key] = chunk, middle
        return middle

    def _middle_of(self, chunk: Chunk, size: int) -> _Middle | None:
        text, (ids, starts) = chunk.text[:size], chunk.arrays
        borders = _FIRST.search(text), _LAST.match(text)
        first, end = (0 if border is None else border.end() for border in borders)
        if end - first < _MIN_TAKEN or self._holds_control(chunk.text):
            return None
        # A token's first character may be the one after its space.
        tokens = slice(*np.searchsorted(np.maximum.accumulate(starts), (first, end)).tolist())
        token_ids = chunk.token_ids[tokens]
        assert self._spellings is not None
        spelt = b"".join(map(self._spellings.__getitem__, token_ids))
        if spelt != text[first:end].encode():
            return None
        return _Middle(first, end, token_ids, ids[tokens], starts[tokens])


class _Spellings(dict[int, bytes]):
    """The bytes of each token, as they are asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes = {character: number for number, character in byte_characters().items()}

    def __missing__(self, token_id: int) -> bytes:
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        # What no text holds, for a token that is none of bytes.
        known = all(character in self._bytes for character in piece)
        spelt = bytes(map(self._bytes.__getitem__, piece)) if known else b"\xff"
        self[token_id] = spelt
        return spelt


def _joined(
    rest: Tokens,
    taken: Sequence[tuple[int, _Middle]],
    offsets: Callable[[], Sequence[Span]],
) -> Tokens:
    """Return a prompt's tokens: those of what was left of it, and of what was taken out."""
    apart = np.array(rest.offsets, np.int64).reshape(-1, 2)
    shifts = np.cumsum([0, *(middle.end - middle.first for _, middle in taken)])
    firsts = np.array([start + middle.first for start, middle in taken]) - shifts[:-1]
    ends = np.searchsorted(np.maximum.accumulate(apart[:, 0]), firsts)
    edges = [0, *ends.tolist(), len(apart)]
    # What the tokenizer adds has no place.
    places = apart + (np.repeat(shifts, np.diff(edges)) * (apart[:, 1] > 0))[:, None]
    listed = list(map(tuple, places.tolist()))
    own = np.array(rest.token_ids, np.int64)
    token_ids: list[int] = []
    ids: list[NDArray[np.int64]] = []
    starts: list[NDArray[np.int64]] = []
    spans: dict[int, Span] = {}
    for (begin, end), one in zip(pairwise(edges), (*taken, None), strict=True):
        spans.update(enumerate(listed[begin:end], len(token_ids)))
        token_ids += rest.token_ids[begin:end]
        ids.append(own[begin:end])
        starts.append(places[begin:end, 0])
        if one is not None:
            token_ids += one[1].token_ids
            ids.append(one[1].ids)
            starts.append(one[1].starts + one[0])
    made = tuple(token_ids)
    ids_of(made, np.concatenate(ids))
    return Tokens(made, SpliceOffsets(np.concatenate(starts), spans, offsets))


_latest: tuple[Sequence[int], NDArray[np.int64]] = (), np.empty(0, np.int64)


def ids_of(token_ids: tuple[int, ...], known: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return tokens as an array, which nobody writes to; `known` is that array, if it is there.

    The latest one is kept: a prompt is asked for several times, and it takes a tenth of a
    millisecond for thousands of tokens.
    """
    global _latest
    held, found = _latest
    if held is not token_ids:
        found = np.array(token_ids, np.int64) if known is None else known
        _latest = token_ids, found
    return found


def cuts_at_borders(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer is known to cut before a space between letters, in any text."""
    from tokenizers.models import BPE

    if not tokenizer.is_fast:
        return False
    backend = tokenizer.backend_tokenizer
    return (
        # An ASCII character joins none before it.
        _made(backend.normalizer) in (None, {"type": "NFC"})
        and isinstance(backend.model, BPE)
        and not backend.model.dropout
        and _splits_so(_made(backend.pre_tokenizer))
        and _only_adds(_made(backend.post_processor))
        and not any(map(_may_cross, backend.get_added_tokens_decoder().values()))
    )


def _made(part: Any) -> dict[str, Any] | None:
    """Return how a part of a tokenizer was made."""
    return None if part is None else dict(json.loads(part.__getstate__()))


def _splits_so(made: Mapping[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer cuts at borders, by steps of which none looks back."""
    steps = list(_steps(made, "pretokenizers"))
    splits = [one for one in steps if one["type"] == "Split"]
    levels = [one for one in steps if one["type"] == "ByteLevel"]
    return (
        len(levels) == 1
        and steps[-1] is levels[0]
        and not levels[0]["add_prefix_space"]
        and all(one["type"] in ("Split", "ByteLevel", "Digits") for one in steps)
        and all(
            one["pattern"].get("Regex") in PATTERNS
            and one["behavior"] == "Isolated"
            and not one["invert"]
            for one in splits
        )
        and bool(splits or levels[0]["use_regex"])
    )


def _only_adds(made: Mapping[str, Any] | None) -> bool:
    """Return whether a post-processor only adds tokens before and after the text's."""
    return all(
        one["type"] == "ByteLevel"
        or (
            one["type"] == "TemplateProcessing"
            and sum("Sequence" in part for part in one["single"]) == 1
        )
        for one in _steps(made, "processors")
    )


def _steps(made: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    if made is None:
        return
    if made["type"] == "Sequence":
        for one in made[name]:
            yield from _steps(one, name)
    else:
        yield made


def _may_cross(token: AddedToken) -> bool:
    """Return whether an added token may be found across a border, or take characters beside it."""
    if token.lstrip or token.rstrip or token.single_word:
        return True
    return re.search("[A-Za-z] ", unicodedata.normalize("NFC", token.content)) is not None
