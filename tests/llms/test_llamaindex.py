"""LlamaIndex's own query engines, unchanged, reuse KV and do not change what is answered."""

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode

from kvrag.errors import ParameterError
from kvrag.llms.llamaindex import KVRagLLM
from kvrag.retrievers.llamaindex import KVRagRetriever
from tests.support.rag import PASSAGES, Rag

pytestmark = pytest.mark.usefixtures("own_event_loop")

QUESTION = "Who keeps the harbour ledger?"
MAX_TOKENS = 8


class Calls(BaseEventHandler):
    """Keeps every prompt, answer and report of a query."""

    prompts: list[Any] = []  # noqa: RUF012 - a pydantic field
    texts: list[str] = []  # noqa: RUF012
    raws: list[dict[str, Any]] = []  # noqa: RUF012

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMCompletionStartEvent):
            self.prompts.append(event.prompt)
        elif isinstance(event, LLMChatStartEvent):
            turns = [{"role": m.role.value, "content": m.content} for m in event.messages]
            self.prompts.append(turns)
        elif isinstance(event, LLMCompletionEndEvent):
            self.texts.append(event.response.text)
            self.raws.append(event.response.raw)
        elif isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.texts.append(event.response.message.content or "")
            self.raws.append(event.response.raw)


@pytest.fixture
def calls() -> Iterator[Calls]:
    dispatcher = get_dispatcher()
    handler = Calls()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


@pytest.fixture(autouse=True)
def model_tokenizer(rag: Rag) -> Iterator[None]:
    before = Settings._tokenizer
    Settings.tokenizer = KVRagLLM(index=rag.path).token_ids
    yield
    Settings._tokenizer = before


@pytest.fixture(params=[None, 1.0], ids=["default", "exact"])
def ratio(request: pytest.FixtureRequest) -> float | None:
    return request.param


@pytest.mark.parametrize("is_chat_model", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
def test_query_engine(
    rag: Rag, calls: Calls, ratio: float | None, mode: Any, is_chat_model: bool
) -> None:
    llm = KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS, ratio=ratio, is_chat_model=is_chat_model)
    nodes = [TextNode(text=text) for text in PASSAGES.values()]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3)
    response = engine.query(QUESTION)
    assert str(response) == calls.texts[-1]
    assert len(calls.raws) == (3 if mode == "refine" else 1)
    for prompt, text, raw in zip(calls.prompts, calls.texts, calls.raws, strict=True):
        report = raw["report"]
        assert report["num_chunks"] == (1 if mode == "refine" else 3)
        assert raw["usage"]["cached_tokens"] == report["num_cached"]
        if ratio is None:
            assert report["num_cached"] > 20
        else:
            assert report["num_recomputed"] > 20
            assert text == rag.plain_answer(prompt, MAX_TOKENS)


async def test_async_and_streaming_query(rag: Rag) -> None:
    llm = KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS)
    retriever = KVRagRetriever(rag.path, k=3)
    whole = str(RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION))
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
    streamed = engine.query(QUESTION)
    assert "".join(streamed.response_gen) == whole
    later = await engine.aquery(QUESTION)
    assert "".join([piece async for piece in later.response_gen]) == whole


async def test_all_eight_calls_agree(rag: Rag) -> None:
    llm = KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS)
    whole = llm.complete("Hello")
    assert whole.text
    other = KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS)  # remembers nothing
    pieces = list(other.stream_complete("Hello"))
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].text == whole.text
    assert pieces[-1].raw["usage"] == whole.raw["usage"]
    assert (await llm.acomplete("Hello")).text == whole.text
    assert [p.text async for p in await llm.astream_complete("Hello")][-1] == whole.text

    messages = [ChatMessage("Be brief.", role=MessageRole.SYSTEM), ChatMessage("Hello")]
    answer = llm.chat(messages).message
    assert answer.role == MessageRole.ASSISTANT
    assert answer.additional_kwargs == {}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert answer.content == rag.plain_answer(turns, MAX_TOKENS)
    assert list(llm.stream_chat(messages))[-1].message.content == answer.content
    assert (await llm.achat(messages)).message.content == answer.content
    stream = await llm.astream_chat(messages)
    assert [p.message.content async for p in stream][-1] == answer.content


def test_copied_and_pickled_after_use(rag: Rag, caplog: pytest.LogCaptureFixture) -> None:
    llm = KVRagLLM(index=rag.index, max_tokens=MAX_TOKENS)
    said = llm.complete(QUESTION).text
    assert copy.deepcopy(llm).index is rag.index
    with caplog.at_level(logging.WARNING):
        restored = pickle.loads(pickle.dumps(llm))
    assert caplog.messages == []  # LlamaIndex tells what it had to leave out
    assert restored.index == str(rag.path)
    for other in (restored, copy.deepcopy(llm), llm):
        assert other.complete(QUESTION).text == said


def test_call_parameters(rag: Rag) -> None:
    llm = KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS)
    assert llm.complete("Hello", max_tokens=2).raw["usage"]["completion_tokens"] == 2
    whole = llm.complete("Hello").text
    assert llm.complete("Hello", stop=[whole[3:5]]).text == whole[: whole.index(whole[3:5])]
    with pytest.raises(ParameterError, match="max_new_tokens"):
        llm.complete("Hello", max_new_tokens=2)
    with pytest.raises(ValueError, match="temprature"):
        KVRagLLM(index=rag.path, temprature=1.0)


@pytest.mark.parametrize("prompt", [None, 5, ["a"], [], [{"content": "a"}]])
def test_what_is_no_prompt(rag: Rag, prompt: Any) -> None:
    llm = KVRagLLM(index=rag.path)
    for call in (llm.complete, lambda prompt: next(llm.stream_complete(prompt))):
        with pytest.raises(ParameterError, match="prompt"):
            call(prompt)


def test_own_prompt_functions(rag: Rag) -> None:
    llm = KVRagLLM(
        index=rag.path,
        max_tokens=MAX_TOKENS,
        completion_to_prompt=lambda text: f"<<{text}>>",
        messages_to_prompt=lambda messages: "".join(m.content for m in messages),
    )
    assert llm.complete("Hello").text == rag.plain_answer("<<Hello>>", MAX_TOKENS)
    answer = llm.chat([ChatMessage("Hel"), ChatMessage("lo")]).message.content
    assert answer == rag.plain_answer("Hello", MAX_TOKENS)


def test_what_cannot_be_rendered_is_refused(rag: Rag) -> None:
    with pytest.raises(ParameterError, match="cannot be rendered"):
        KVRagLLM(index=rag.path).chat([ChatMessage(blocks=[ImageBlock(image=b"\x89PNG")])])
