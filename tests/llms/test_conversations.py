"""Conversations of frameworks take the KV of their earlier turns."""

from typing import Any

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatResponse
from llama_index.core.memory import ChatMemoryBuffer

from kvrag.llms.langchain import ChatKVRag
from kvrag.llms.llamaindex import KVRagLLM
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag"]

QUESTIONS = ("Who keeps the ledger?", "And when does she write?")


# Deprecated, and still what many programs use.
@pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")
def test_langchains_message_history(rag: Rag) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Use this:\n\n" + PASSAGES["clock"] + "\n\n" + PASSAGES["book"]),
            MessagesPlaceholder("history"),
            ("human", "{question}"),
        ]
    )
    histories: dict[str, InMemoryChatMessageHistory] = {}
    chain = RunnableWithMessageHistory(
        prompt | ChatKVRag(index=rag.path, max_tokens=6),
        lambda session_id: histories.setdefault(session_id, InMemoryChatMessageHistory()),
        input_messages_key="question",
        history_messages_key="history",
    )

    def ask(question: str, session: str) -> dict[str, Any]:
        answer = chain.invoke(
            {"question": question}, config={"configurable": {"session_id": session}}
        )
        report: dict[str, Any] = answer.response_metadata["report"]
        cached = answer.usage_metadata["input_token_details"]["cache_read"]
        assert cached == report["num_cached"] >= report["num_kept"]
        return report

    first, second = (ask(question, "ines") for question in QUESTIONS)
    assert first["num_kept"] == 0
    assert second["num_kept"] >= first["num_tokens"]
    # Another conversation begins with the same question, and goes on otherwise.
    assert ask(QUESTIONS[0], "tomas")["num_kept"] == first["num_tokens"]


def test_llamaindexs_chat_engine(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = KVRagLLM(index=rag.path, max_tokens=6)
    reports: list[dict[str, Any]] = []
    chat = KVRagLLM.chat

    def noted(self: KVRagLLM, *given: Any, **named: Any) -> ChatResponse:
        response = chat(self, *given, **named)
        reports.append(response.raw["report"])  # type: ignore[index]
        return response

    monkeypatch.setattr(KVRagLLM, "chat", noted)
    memory = ChatMemoryBuffer.from_defaults(token_limit=1500)
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    for question in QUESTIONS:
        assert str(engine.chat(question))
    first, second = reports
    assert second["num_kept"] >= first["num_tokens"]
