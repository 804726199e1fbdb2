"""Token ids instead of texts, as OpenAI's API takes them: decoded, so that all else sees texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrag.server.problems import RequestError


def prompts_of(tokenizer: Any, given: Sequence[str | list[int]]) -> list[str]:
    """Return prompts as texts, without the token that the tokenizer puts first by itself."""
    first = tokenizer.bos_token_id
    is_added = first is not None and list(tokenizer("")["input_ids"])[:1] == [first]
    ids = [
        one[1:] if is_added and not isinstance(one, str) and one[0] == first else one
        for one in given
    ]
    return [_text(tokenizer, one, "prompt", skips_special=False) for one in ids]


def inputs_of(tokenizer: Any, given: Sequence[str | list[int]]) -> list[str]:
    """Return texts to embed as texts, without special tokens."""
    return [_text(tokenizer, one, "input", skips_special=True) for one in given]


def _text(tokenizer: Any, one: str | list[int], param: str, *, skips_special: bool) -> str:
    if isinstance(one, str):
        return one
    if max(one, default=0) >= len(tokenizer):
        raise RequestError(
            400,
            f"{param}: there is no token {max(one)}: this model's tokenizer has "
            f"{len(tokenizer):,}; send token ids of that tokenizer, or texts",
            param=param,
        )
    text = tokenizer.decode(
        one, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
    )
    return str(text)
