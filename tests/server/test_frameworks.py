"""The server as LangChain's and LlamaIndex's own OpenAI classes see it."""

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import SecretStr

from tests.llms.conftest import own_event_loop
from tests.support.api_server import Served
from tests.support.rag import PASSAGES

__all__ = ["own_event_loop"]

PROMPT = f"{PASSAGES['ledger']}\n\n{PASSAGES['clock']}\n\nQuestion: Who?\nAnswer:"
TURNS = [{"role": "system", "content": "Use the text."}, {"role": "user", "content": PROMPT}]


def langchain(served: Served, **options: Any) -> ChatOpenAI:
    key = SecretStr("none needed")
    return ChatOpenAI(model="model", base_url=served.url, api_key=key, max_retries=0, **options)


def test_langchains_chat_model(served: Served) -> None:
    expected = served.engine.generate(TURNS, max_tokens=10)
    messages = [SystemMessage("Use the text."), HumanMessage(PROMPT)]
    answer = langchain(served, max_completion_tokens=10).invoke(messages)
    assert answer.content == expected.text != ""
    assert answer.usage_metadata["input_token_details"] == {
        "cache_read": expected.usage.cached_tokens
    }
    assert answer.response_metadata["finish_reason"] == expected.finish_reason


def test_langchains_stream(served: Served) -> None:
    expected = served.engine.generate(PROMPT_ALONE, max_tokens=10)
    model = langchain(served, max_completion_tokens=10, stream_usage=True)
    chunks = list(model.stream(PROMPT))
    pieces = [str(chunk.content) for chunk in chunks]
    assert "".join(pieces) == expected.text
    assert len([piece for piece in pieces if piece]) > 1
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert used[-1]["output_tokens"] == expected.usage.completion_tokens


PROMPT_ALONE = [{"role": "user", "content": PROMPT}]


def llamaindex(served: Served, **options: Any) -> OpenAILike:
    return OpenAILike(
        model="model",
        api_base=served.url,
        api_key="none needed",
        max_retries=0,
        max_tokens=10,
        temperature=0.0,
        **options,
    )


@pytest.mark.usefixtures("own_event_loop")
def test_llamaindexs_model(served: Served) -> None:
    expected = served.engine.generate(TURNS, max_tokens=10).text
    messages = [ChatMessage(role=one["role"], content=one["content"]) for one in TURNS]
    model = llamaindex(served, is_chat_model=True)
    assert model.chat(messages).message.content == expected
    streamed = [one.delta or "" for one in model.stream_chat(messages)]
    assert "".join(streamed) == expected
