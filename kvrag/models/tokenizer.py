"""A fast tokenizer as Transformers makes it of a model's files, without importing Transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

from kvrag.errors import UnsupportedModelError

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

    own = {name for kind in type(tokenizer).__mro__ for name in vars(kind) if kind not in _known()}
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


def _known() -> set[type]:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    return set(TokenizersBackend.__mro__)
