"""Text to token ids with their places, as in the plain pipeline."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from kvrag.arguments import shown
from kvrag.errors import ModelLoadError, UnsupportedModelError
from kvrag.plugins import reason
from kvrag.process import working

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

# -- a fast tokenizer without Transformers -------------------------------------------------------

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """Those members of Transformers' tokenizers that kvrag uses; it has the others made.

    Parameters
    ----------
    backend
        What tokenises.
    facts
        What `facts_of` returned for Transformers' own.
    name_or_path
        The folder.
    load
        Returns Transformers' own.
    """

    is_fast = True

    def __init__(
        self,
        backend: Backend,
        facts: Mapping[str, Any],
        name_or_path: str,
        load: Callable[[], Any],
    ) -> None:
        self.backend_tokenizer = backend
        self.name_or_path = name_or_path
        self._load = load
        self.special_tokens_map: dict[str, Any] = dict(facts["special"])
        self.all_special_tokens: list[str] = list(facts["all_special"])
        self.chat_template: str | dict[str, str] | None = facts["template"]
        self.fingerprint: str = facts["fingerprint"]

    @cached_property
    def _whole(self) -> Any:
        """Transformers' own."""
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "backend_tokenizer" not in self.__dict__:
            raise AttributeError(name)
        base, _, ending = name.partition("_token")
        if base in _NAMED and ending in ("", "_id"):
            token = self.special_tokens_map.get(f"{base}_token")
            return token if token is None or not ending else self.convert_tokens_to_ids(str(token))
        return getattr(self._whole, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(*args, **kwargs)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        """Return each token's id."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return a token's id, that of the unknown token for others; for several, a list."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        unknown = self.special_tokens_map.get("unk_token")
        if found is None and unknown is not None:
            return self.backend_tokenizer.token_to_id(str(unknown))
        return found

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return an id's token, None if there is none; for several, a list."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids]

    def encode(self, text: str, *args: Any, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        """Return a text's ids."""
        if args or kwargs:
            return self._whole.encode(text, *args, add_special_tokens=add_special_tokens, **kwargs)
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any:
        """Return the text of ids."""
        if kwargs.pop("clean_up_tokenization_spaces", False) or kwargs:
            return self._whole.decode(ids, skip_special_tokens=skip_special_tokens, **kwargs)
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(ids, int):
            ids = [ids]
        if any(not isinstance(one, int) for one in ids):
            return self._whole.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> Any:
        """Return the template for messages, with tools or without."""
        if chat_template is None and isinstance(self.chat_template, str):
            return self.chat_template
        self._whole.chat_template = self.chat_template
        return self._whole.get_chat_template(chat_template, tools)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return `tokenizer` if it reports character offsets, otherwise raise UnsupportedModelError."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} is a slow tokenizer and reports no character offsets; "
            "convert it to a fast one (a tokenizer.json file)"
        )
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that decides a text's token ids, 32 hexadecimal digits."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.fingerprint
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # The last caller of the tokenizer sets both; they are not part of it.
    definition.pop("padding", None)
    definition.pop("truncation", None)
    return hashlib.blake2b(
        json.dumps(definition, sort_keys=True).encode(), digest_size=16, person=b"kvrag-token"
    ).hexdigest()


def facts_of(tokenizer: Any) -> dict[str, Any] | None:
    """Return what a `Tokenizer` needs to know of Transformers' own; None if it computes otherwise.

    Some classes tokenise or decode by other code.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    known = TokenizersBackend.__mro__
    own = {name for kind in type(tokenizer).__mro__ for name in vars(kind) if kind not in known}
    cleans = tokenizer.clean_up_tokenization_spaces
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    if (
        not isinstance(tokenizer, TokenizersBackend)
        or own & _COMPUTE
        or tokenizer.split_special_tokens
        or (cleans and not is_bpe)
        or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    ):
        return None
    return {
        "special": dict(tokenizer.special_tokens_map),
        "all_special": list(tokenizer.all_special_tokens),
        "template": tokenizer.chat_template,
        "fingerprint": tokenizer_fingerprint(tokenizer),
    }


# What kvrag's own class does itself.
_COMPUTE = {
    *("__call__", "_call_one", "_encode_plus", "_decode", "decode", "get_vocab", "__len__"),
    *("convert_ids_to_tokens", "convert_tokens_to_ids", "_convert_token_to_id_with_added_voc"),
    *("added_tokens_decoder", "all_special_tokens", "get_chat_template", "encode"),
}


# -- token ids with their places -----------------------------------------------------------------

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
