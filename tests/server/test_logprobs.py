"""How likely tokens were, as OpenAI's own client reads it."""

from typing import Any

import pytest
from openai import OpenAI

from tests.server.test_openai_client import MESSAGES, PROMPT
from tests.support.api_server import Served

# Random weights at this temperature write parts of characters, too.
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": MESSAGES,
    "max_tokens": 24,
    "temperature": 2,
    "seed": 4,
}
TEXT: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": 10}


def as_bytes(token: str) -> bytes:
    """Return a token's bytes, written as in ``bytes:\\xe2\\x80`` if it is a part of a character."""
    is_part = token.startswith("bytes:\\x")
    return bytes.fromhex(token[6:].replace("\\x", "")) if is_part else token.encode()


def test_a_chat_answers_tokens(client: OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=3)
    options: Any = {"max_tokens": 24, "temperature": 2.0, "logprobs": 3}
    for choice in answer.choices:
        expected = served.engine.generate(MESSAGES, seed=4 + choice.index, **options)
        content = choice.logprobs.content or []
        assert [one.logprob for one in content] == pytest.approx(
            [one.logprob for one in expected.logprobs], abs=1e-3
        )
        data = b"".join(bytes(one.bytes or ()) for one in content)
        assert data.decode(errors="replace") == choice.message.content == expected.text
        assert any(one.token.startswith("bytes:\\x") for one in content)
        for one in content:
            assert len(one.top_logprobs) == 3
            values = [likely.logprob for likely in one.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert values[0] >= one.logprob
    named = client.chat.completions.create(**CHAT, logprobs=True).choices[0].logprobs
    assert all(one.top_logprobs == [] for one in named.content or [])
    assert client.chat.completions.create(**CHAT).choices[0].logprobs is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_completions_tokens(client: OpenAI, is_streamed: bool) -> None:
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    numbers: list[float] = []
    text = ""
    answer: Any = client.completions.create(**TEXT, logprobs=2, stream=is_streamed)
    for body in answer if is_streamed else [answer]:
        choice = body.choices[0]
        text += choice.text
        tokens += choice.logprobs.tokens
        offsets += choice.logprobs.text_offset
        tops += choice.logprobs.top_logprobs
        numbers += choice.logprobs.token_logprobs
    assert b"".join(map(as_bytes, tokens)).decode(errors="replace") == text != ""
    assert offsets == sorted(offsets)
    for offset, token in zip(offsets, tokens, strict=True):
        if "bytes:" not in token:
            assert text[offset:].startswith(token)
    for token, logprob, top in zip(tokens, numbers, tops, strict=True):
        assert len(top) == 2
        assert next(iter(top)) == max(top, key=lambda one: top[one]) == token
        assert top[token] == logprob < 0
