"""How likely the tokens of answers were, in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from kvrag.engine.answer import TokenLogprob
from kvrag.models.tokens import token_bytes
from kvrag.server import responses as r

# OpenAI's, for what JSON has no number for.
_LEAST = -9999.0


def of_chat(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[TokenLogprob]) -> r.ChatLogprobs:
    """Return the field ``logprobs`` of a chat choice."""

    def one(token_id: int, logprob: float) -> r.LikelyToken:
        data = token_bytes(tokenizer, token_id)
        return r.LikelyToken(token=_text(data), logprob=max(logprob, _LEAST), bytes=list(data))

    content = [
        r.ChosenToken(
            **one(token.token_id, token.logprob).model_dump(),
            top_logprobs=[one(*likely) for likely in token.top],
        )
        for token in tokens
    ]
    return r.ChatLogprobs(content=content)


def of_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[TokenLogprob]) -> r.TextLogprobs:
    """Return the field ``logprobs`` of a completion."""

    def text(token_id: int) -> str:
        return _text(token_bytes(tokenizer, token_id))

    found = r.TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        found.tokens.append(text(token.token_id))
        found.token_logprobs.append(max(token.logprob, _LEAST))
        # The chosen token, too, as in OpenAI's API; two tokens of one text count as the likelier.
        both = sorted([*token.top, (token.token_id, token.logprob)], key=lambda one: one[1])
        likely = {text(token_id): max(logprob, _LEAST) for token_id, logprob in both}
        found.top_logprobs.append(dict(reversed(likely.items())) if token.top else {})
        found.text_offset.append(token.start)
    return found


def _text(data: bytes) -> str:
    r"""Return a token as text; a part of a character as ``bytes:\xe2\x80``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{one:02x}" for one in data)
