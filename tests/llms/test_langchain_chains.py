"""LangChain's own chains and agents, unchanged, reuse KV and do not change what is answered."""

from typing import Any

import pytest
from langchain_classic.chains import (
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from kvrag.llms.langchain import ChatKVRag, KVRagLLM
from kvrag.retrievers.langchain import KVRagRetriever
from tests.support.rag import Rag

QUESTION = "Who keeps the harbour ledger?"
MAX_TOKENS = 8


class Calls(BaseCallbackHandler):
    """Keeps every prompt, answer and report of a run."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.texts: list[str] = []
        self.reports: list[dict[str, Any]] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts.extend(prompts)

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        roles = {"human": "user", "ai": "assistant", "system": "system"}
        if kwargs["metadata"]["ls_provider"] == "kvrag":
            turns = [{"role": roles[one.type], "content": one.text} for one in messages[0]]
            self.prompts.append(turns)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for (generation,) in response.generations:
            message = getattr(generation, "message", None)
            details = generation.generation_info if message is None else message.response_metadata
            if "report" in details:
                self.texts.append(generation.text)
                self.reports.append(details["report"])


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def text_of(result: Any) -> str:
    """Return the answer in what a chain or an agent returns."""
    if isinstance(result, dict) and "messages" in result:
        return str(result["messages"][-1].text)
    if isinstance(result, dict):
        return str(result.get("answer") or result.get("result") or result["output"])
    return str(result)


PLAIN = PromptTemplate.from_template("Context:\n{context}\n\nQuestion: {question}\nAnswer:")


def lcel(llm: Any, retriever: KVRagRetriever, _: Calls) -> Any:
    given = {"context": retriever | join, "question": RunnablePassthrough()}
    return given | PLAIN | llm | StrOutputParser()


def retrieval_chain(llm: Any, retriever: KVRagRetriever, _: Calls) -> Any:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use the context to answer.\n\n{context}"), ("human", "{input}")]
    )
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))
    return RunnableLambda(lambda question: {"input": question}) | chain


def history_aware(llm: Any, retriever: KVRagRetriever, _: Calls) -> Any:
    rephrase = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "Rephrase it.")]
    )
    answer = ChatPromptTemplate.from_messages(
        [("system", "{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    chain = create_retrieval_chain(
        create_history_aware_retriever(llm, retriever, rephrase),
        create_stuff_documents_chain(llm, answer),
    )
    history = [HumanMessage("Who repairs the clock?"), AIMessage("Tomas.")]
    return RunnableLambda(lambda question: {"input": question, "chat_history": history}) | chain


@pytest.mark.parametrize("ratio", [None, 1.0], ids=["default", "exact"])
@pytest.mark.parametrize(
    ("model_class", "build"),
    [
        (KVRagLLM, lcel),
        *((ChatKVRag, build) for build in (retrieval_chain, history_aware)),
    ],
)
def test_a_chain_reuses_its_passages_and_answers_as_transformers_does(
    rag: Rag, model_class: Any, build: Any, ratio: float | None
) -> None:
    calls = Calls()
    llm = model_class(index=rag.path, max_tokens=MAX_TOKENS, ratio=ratio)
    chain = build(llm, KVRagRetriever(index=rag.path, k=3), calls)
    answer = text_of(chain.invoke(QUESTION, config={"callbacks": [calls]}))
    assert answer == calls.texts[-1]
    *before, report = calls.reports
    assert all(one["num_chunks"] == 0 for one in before)
    assert report["num_chunks"] == 3
    assert report["num_reused"] + report["num_exact"] + report["num_recomputed"] > 50
    if ratio is None:
        assert report["num_cached"] > 50
    else:
        assert answer == rag.plain_answer(calls.prompts[-1], MAX_TOKENS)
