"""Prompts of one call, and of one event loop, are answered in one batch."""

import asyncio
import threading
from typing import Any

import pytest

from kvrag.fusion.decoding import RowDecoder
from kvrag.llms.langchain import ChatKVRag, KVRagLLM
from tests.support.rag import Rag, rag

__all__ = ["rag"]

PROMPTS = ["Hello", "Who keeps the ledger?", "The quick brown fox"]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers each step has written a token of."""
    found: list[int] = []
    step_each = RowDecoder.step_each

    def counted(decoders: Any, token_ids: Any) -> Any:
        found.append(len(decoders))
        return step_each(decoders, token_ids)

    monkeypatch.setattr(RowDecoder, "step_each", staticmethod(counted))
    return found


@pytest.mark.parametrize("model_class", [KVRagLLM, ChatKVRag])
def test_langchain(rag: Rag, model_class: Any, sizes: list[int]) -> None:
    llm = model_class(index=rag.index, max_tokens=60)
    one_by_one = [_text(llm.invoke(prompt)) for prompt in PROMPTS]
    assert set(sizes) == {1}
    sizes.clear()
    assert [_text(one) for one in llm.batch(PROMPTS)] == one_by_one
    assert max(sizes) > 1
    sizes.clear()
    assert [_text(one) for one in asyncio.run(llm.abatch(PROMPTS))] == one_by_one
    assert max(sizes) > 1


def test_streams_share_one_thread_and_leave_when_closed(rag: Rag, sizes: list[int]) -> None:
    llm = KVRagLLM(index=rag.index, max_tokens=1000)
    engine = llm.engine()

    async def main() -> None:
        streams: list[Any] = [llm.astream(prompt) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        assert [one.name for one in threading.enumerate()].count("kvrag-batch") == 1
        for stream in streams:
            await stream.aclose()

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "kvrag-batch":
            thread.join(30)
    assert engine._scheduler.num_open == 0
    assert len(sizes) < 990


def _text(answer: Any) -> str:
    return str(getattr(answer, "content", answer))
