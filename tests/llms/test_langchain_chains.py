"""LangChain's own chains and agents, unchanged, reuse KV and do not change what is answered."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt, wrap_model_call
from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_classic.agents.output_parsers import ReActSingleInputOutputParser
from langchain_classic.chains import (
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.agents import AgentAction, AgentFinish
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from kvrag.llms.langchain import ChatKVRag, KVRagLLM
from kvrag.retrievers.langchain import KVRagRetriever
from tests.support.rag import PASSAGES, Rag

QUESTION = "Who keeps the harbour ledger?"
MAX_TOKENS = 8


class Calls(BaseCallbackHandler):
    """Keeps every prompt, answer and report of a run."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.reports: list[dict[str, Any]] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts.extend(prompts)

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        pass

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for (generation,) in response.generations:
            message = getattr(generation, "message", None)
            details = generation.generation_info if message is None else message.response_metadata
            self.texts.append(generation.text)
            self.reports.append(details["report"])


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


@pytest.fixture
def retriever(rag: Rag) -> KVRagRetriever:
    return KVRagRetriever(index=rag.path, k=3)


@pytest.fixture(params=[None, 1.0], ids=["default", "exact"])
def llm(rag: Rag, request: pytest.FixtureRequest) -> KVRagLLM:
    return KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS, ratio=request.param)


@pytest.fixture(params=[None, 1.0], ids=["default", "exact"])
def chat(rag: Rag, request: pytest.FixtureRequest) -> ChatKVRag:
    return ChatKVRag(index=rag.path, max_tokens=MAX_TOKENS, ratio=request.param)


def check_reuse(report: dict[str, Any], ratio: float | None, num_chunks: int = 3) -> None:
    assert report["num_chunks"] == num_chunks
    assert report["num_reused"] + report["num_exact"] + report["num_recomputed"] > 50
    if ratio is None:
        assert report["num_cached"] > 50


def test_lcel(rag: Rag, retriever: KVRagRetriever, llm: KVRagLLM) -> None:
    prompt = PromptTemplate.from_template("Context:\n{context}\n\nQuestion: {question}\nAnswer:")
    calls = Calls()
    chain = (
        {"context": retriever | join, "question": RunnablePassthrough()}
        | prompt
        | llm
        | StrOutputParser()
    )
    answer = chain.invoke(QUESTION, config={"callbacks": [calls]})
    check_reuse(calls.reports[0], llm.ratio)
    if llm.ratio == 1.0:
        assert answer == rag.plain_answer(calls.prompts[0], MAX_TOKENS)


async def test_lcel_async_stream(rag: Rag, retriever: KVRagRetriever, llm: KVRagLLM) -> None:
    prompt = PromptTemplate.from_template("Context:\n{context}\n\nQuestion: {question}\nAnswer:")
    calls = Calls()
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm
    pieces = [piece async for piece in chain.astream(QUESTION, config={"callbacks": [calls]})]
    check_reuse(calls.reports[0], llm.ratio)
    assert "".join(pieces) == chain.invoke(QUESTION)


def test_stuff_documents_chain(rag: Rag, retriever: KVRagRetriever, llm: KVRagLLM) -> None:
    prompt = PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")
    calls = Calls()
    documents = retriever.invoke(QUESTION)
    answer = create_stuff_documents_chain(llm, prompt).invoke(
        {"context": documents, "question": QUESTION}, config={"callbacks": [calls]}
    )
    check_reuse(calls.reports[0], llm.ratio)
    if llm.ratio == 1.0:
        assert answer == rag.plain_answer(calls.prompts[0], MAX_TOKENS)


def test_retrieval_chain_with_chat_model(
    rag: Rag, retriever: KVRagRetriever, chat: ChatKVRag
) -> None:
    system = "Use the given context to answer.\n\nContext: {context}"
    prompt = ChatPromptTemplate.from_messages([("system", system), ("human", "{input}")])
    calls = Calls()
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, prompt))
    result = chain.invoke({"input": QUESTION}, config={"callbacks": [calls]})
    check_reuse(calls.reports[0], chat.ratio)
    if chat.ratio == 1.0:
        turns = [
            {"role": "system", "content": system.format(context=join(result["context"]))},
            {"role": "user", "content": QUESTION},
        ]
        assert result["answer"] == rag.plain_answer(turns, MAX_TOKENS)


def test_history_aware_retrieval_chain(retriever: KVRagRetriever, chat: ChatKVRag) -> None:
    rephrase = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "Rephrase it.")]
    )
    answer = ChatPromptTemplate.from_messages(
        [("system", "{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    calls = Calls()
    chain = create_retrieval_chain(
        create_history_aware_retriever(chat, retriever, rephrase),
        create_stuff_documents_chain(chat, answer),
    )
    history = [HumanMessage("Who repairs the clock?"), AIMessage("Tomas.")]
    chain.invoke({"input": QUESTION, "chat_history": history}, config={"callbacks": [calls]})
    assert calls.reports[0]["num_chunks"] == 0
    check_reuse(calls.reports[1], chat.ratio)


def test_retrieval_qa(rag: Rag, retriever: KVRagRetriever, llm: KVRagLLM) -> None:
    calls = Calls()
    chain = RetrievalQA.from_chain_type(llm, retriever=retriever)
    answer = chain.invoke({"query": QUESTION}, config={"callbacks": [calls]})["result"]
    check_reuse(calls.reports[0], llm.ratio)
    if llm.ratio == 1.0:
        assert answer == rag.plain_answer(calls.prompts[0], MAX_TOKENS)


def test_react_agent_with_retriever_tool(
    rag: Rag, retriever: KVRagRetriever, llm: KVRagLLM
) -> None:
    """A text agent; only the parsing is scripted, since a random model decides nothing."""

    class Script(ReActSingleInputOutputParser):
        def parse(self, text: str) -> AgentAction | AgentFinish:
            calls_made = len(calls.texts)
            if calls_made == 1:
                return AgentAction("passages", QUESTION, f"{text}\nAction: passages")
            return AgentFinish({"output": text}, text)

    calls = Calls()
    tool = create_retriever_tool(retriever, "passages", "Passages about Varn.")
    prompt = PromptTemplate.from_template(
        "Tools: {tools} ({tool_names})\nQuestion: {input}\nThought:{agent_scratchpad}"
    )
    agent = create_react_agent(llm, [tool], prompt, output_parser=Script())
    executor = AgentExecutor(agent=agent, tools=[tool])
    result = executor.invoke({"input": QUESTION}, config={"callbacks": [calls]})
    assert calls.reports[0]["num_chunks"] == 0
    check_reuse(calls.reports[1], llm.ratio)
    assert result["output"] == calls.texts[1]
    if llm.ratio == 1.0:
        assert calls.texts[1] == rag.plain_answer(calls.prompts[1], MAX_TOKENS)


def test_agent_with_retrieval_middleware(
    rag: Rag, retriever: KVRagRetriever, chat: ChatKVRag
) -> None:
    @dynamic_prompt
    def with_context(request: ModelRequest) -> str:
        return "Answer from this:\n\n" + join(retriever.invoke(request.messages[-1].text))

    agent = create_agent(chat, tools=[], middleware=[with_context])
    result = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    message = result["messages"][-1]
    check_reuse(message.response_metadata["report"], chat.ratio)
    if chat.ratio == 1.0:
        system = "Answer from this:\n\n" + join(retriever.invoke(QUESTION))
        turns = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
        assert message.text == rag.plain_answer(turns, MAX_TOKENS)


def test_agent_with_retriever_tool(rag: Rag, retriever: KVRagRetriever, chat: ChatKVRag) -> None:
    """One model plans (scripted here), ours answers from what the tool returned."""

    class Planner(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self

    tool = create_retriever_tool(
        retriever, "passages", "Passages about Varn.", response_format="content_and_artifact"
    )
    plan = AIMessage("", tool_calls=[{"name": tool.name, "args": {"query": QUESTION}, "id": "1"}])

    @wrap_model_call
    def answer_from_passages(request: ModelRequest, handler: Any) -> Any:
        last = request.messages[-1]
        if not isinstance(last, ToolMessage):
            return handler(request)
        message = HumanMessage(f"{last.text}\n\nQuestion: {QUESTION}")
        return handler(request.override(model=chat, tools=[], messages=[message]))

    agent = create_agent(
        Planner(messages=iter([plan])), tools=[tool], middleware=[answer_from_passages]
    )
    message = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"][-1]
    check_reuse(message.response_metadata["report"], chat.ratio)
    if chat.ratio == 1.0:
        content = f"{join(retriever.invoke(QUESTION))}\n\nQuestion: {QUESTION}"
        assert message.text == rag.plain_answer([{"role": "user", "content": content}], MAX_TOKENS)


def test_escaped_chunks_are_answered_and_told_once(
    rag: Rag, caplog: pytest.LogCaptureFixture
) -> None:
    llm = KVRagLLM(index=rag.path, max_tokens=MAX_TOKENS)
    prompt = PromptTemplate.from_template("{{context}}\n\nAnswer:", template_format="mustache")
    chain = {"context": KVRagRetriever(index=rag.path, k=1) | join} | prompt | llm
    answers = [chain.invoke(PASSAGES["bridge"]) for _ in range(2)]
    escaped = PASSAGES["bridge"].replace("&", "&amp;")
    assert answers == [rag.plain_answer(f"{escaped}\n\nAnswer:", MAX_TOKENS)] * 2
    told = [r for r in caplog.records if "contains none of their texts" in r.message]
    assert len(told) == 1


def test_batch_of_chains(retriever: KVRagRetriever, llm: KVRagLLM) -> None:
    prompt = PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")
    chain = (
        {"context": itemgetter("q") | retriever | join, "question": itemgetter("q")} | prompt | llm
    )
    questions = [{"q": QUESTION}, {"q": "Who repairs the clock?"}]
    assert chain.batch(questions) == [chain.invoke(question) for question in questions]
