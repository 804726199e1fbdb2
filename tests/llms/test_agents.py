"""Agents of both frameworks with a retriever tool; what the model says is scripted."""

import json
import re
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, create_retriever_tool
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import RetrieverTool
from pydantic import BaseModel

from kvrag.errors import ParameterError
from kvrag.llms.langchain import ChatKVRag, KVRagLLM
from kvrag.llms.llamaindex import KVRagLLM as LlamaIndexLLM
from kvrag.retrievers.langchain import KVRagRetriever
from kvrag.retrievers.llamaindex import KVRagRetriever as LlamaIndexRetriever
from tests.support import tool_templates
from tests.support.rag import PASSAGES, Rag
from tests.support.scripted import follow

QUESTION = "Who keeps the harbour ledger?"
ANSWER = "Ines keeps it."


def call(**given: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'passages', 'arguments': given})}\n</tool_call>"


def script(prompt: str) -> str:
    answers = "<tool_response>\n" in prompt
    return ANSWER if answers else "I look it up.\n" + call(query="harbour ledger")


@pytest.fixture(params=["text", "template"])
def prompts(request: pytest.FixtureRequest, rag: Rag, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the scripted model got: tools as text, and by a template that knows them."""
    if request.param == "template":
        monkeypatch.setattr(rag.index.tokenizer, "chat_template", tool_templates.HERMES)
    return follow(monkeypatch, rag, script)


@pytest.fixture
def chat(rag: Rag) -> ChatKVRag:
    return ChatKVRag(index=rag.index, max_tokens=100)


@pytest.fixture
def passages(rag: Rag) -> BaseTool:
    return create_retriever_tool(KVRagRetriever(index=rag.index, k=2), "passages", "About Varn.")


def test_langchains_agent(prompts: list[str], chat: ChatKVRag, passages: BaseTool) -> None:
    result = create_agent(chat, [passages]).invoke({"messages": [HumanMessage(QUESTION)]})
    asked, called, found, answered = result["messages"]
    assert asked.text == QUESTION
    assert called.text == "I look it up."
    assert [one["args"] for one in called.tool_calls] == [{"query": "harbour ledger"}]
    assert PASSAGES["ledger"] in found.text
    assert answered.text == ANSWER
    # The tool's result is in the final prompt, and its chunks' KV is reused.
    assert PASSAGES["ledger"] in prompts[1]
    assert re.search(r"I look it up\.\s*<tool_call>", prompts[1])
    report = answered.response_metadata["report"]
    assert report["num_cached"] > 30
    sources = {one["source"] for one in answered.response_metadata["sources"]}
    assert "ledger" in sources


class Keeper(BaseModel):
    """Who keeps something."""

    name: str
    since: int | None = None


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
def test_an_agent_with_a_structured_answer(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, chat: ChatKVRag, passages: BaseTool, strategy: Any
) -> None:
    said = json.dumps({"name": "Ines", "since": 1987})

    def structured(prompt: str) -> str:
        if "<tool_response>\n" not in prompt:
            return call(query="ledger")
        if strategy is ProviderStrategy:
            return said
        return f'<tool_call>\n{{"name": "Keeper", "arguments": {said}}}\n</tool_call>'

    follow(monkeypatch, rag, structured)
    agent = create_agent(chat, [passages], response_format=strategy(Keeper))
    result = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    assert result["structured_response"] == Keeper(name="Ines", since=1987)


def test_structured_output_keeps_the_raw_answer(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, chat: ChatKVRag
) -> None:
    follow(monkeypatch, rag, lambda prompt: '{"name": "Ines", "since": null}')
    for method in ("json_schema", "json_mode"):
        model = chat.with_structured_output(Keeper, method=method, include_raw=True)  # type: ignore[arg-type]
        found = model.invoke(QUESTION)
        assert found["parsed"] == Keeper(name="Ines")
        assert found["raw"].usage_metadata["input_tokens"] > 0
        assert found["parsing_error"] is None
    short = chat.with_structured_output(Keeper, include_raw=True, max_tokens=2).invoke(QUESTION)
    assert short["parsed"] is None
    assert short["parsing_error"] is not None
    with pytest.raises(ParameterError, match="expected json_schema, json_mode or function"):
        chat.with_structured_output(Keeper, method="xml")  # type: ignore[arg-type]


def test_a_form_is_part_of_the_cache_key(rag: Rag) -> None:
    from langchain_core.caches import InMemoryCache

    llm = KVRagLLM(index=rag.index, max_tokens=8, cache=InMemoryCache())
    free = llm.invoke(QUESTION)
    digits = llm.invoke(QUESTION, response_format={"type": "regex", "regex": "[0-9]{3}"})
    assert digits.isdigit()
    assert len(digits) == 3
    assert llm.invoke(QUESTION) == free
    made = KVRagLLM(index=rag.index, response_format={"type": "regex", "regex": "[ab]{2}"})
    assert set(made.invoke(QUESTION)) <= {"a", "b"}
    with pytest.raises(ValueError, match="response_format"):
        KVRagLLM(index=rag.index, response_format={"type": "xml"})


# -- LlamaIndex --------------------------------------------------------------------------------


@pytest.fixture
def llm(rag: Rag) -> LlamaIndexLLM:
    return LlamaIndexLLM(index=rag.index, max_tokens=300)


@pytest.fixture
def retriever_tool(rag: Rag) -> RetrieverTool:
    retriever = LlamaIndexRetriever(rag.index, k=2)
    return RetrieverTool.from_defaults(retriever, name="passages", description="About Varn.")


def scripted_input(prompt: str) -> str:
    answers = "<tool_response>\n" in prompt
    return ANSWER if answers else call(input="harbour ledger")


# LlamaIndex's workflows read every attribute of the agent.
ignore_their_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@ignore_their_warnings
@pytest.mark.parametrize("streaming", [True, False])
async def test_llamaindexs_function_agent(
    rag: Rag,
    monkeypatch: pytest.MonkeyPatch,
    llm: LlamaIndexLLM,
    retriever_tool: RetrieverTool,
    streaming: bool,
) -> None:
    prompts = follow(monkeypatch, rag, scripted_input)
    agent = FunctionAgent(tools=[retriever_tool], llm=llm, streaming=streaming)
    result = await agent.run(QUESTION)
    assert str(result) == ANSWER
    assert [one.tool_name for one in result.tool_calls] == ["passages"]
    assert "Ines keeps the harbour ledger of Varn." in prompts[-1]


@pytest.mark.usefixtures("own_event_loop")
def test_structured_predict(rag: Rag, monkeypatch: pytest.MonkeyPatch, llm: LlamaIndexLLM) -> None:
    follow(
        monkeypatch,
        rag,
        lambda prompt: (
            '<tool_call>\n{"name": "Keeper", "arguments": {"name": "Ines"}}\n</tool_call>'
        ),
    )
    prompt = PromptTemplate("{context}\n\nWho keeps it?")
    assert llm.structured_predict(Keeper, prompt, context=PASSAGES["ledger"]) == Keeper(name="Ines")
    structured = llm.as_structured_llm(Keeper)
    assert structured.chat([ChatMessage("Who?")]).raw == Keeper(name="Ines")


@pytest.mark.usefixtures("own_event_loop")
def test_a_model_that_would_rather_talk_calls_all_the_same(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, llm: LlamaIndexLLM, retriever_tool: RetrieverTool
) -> None:
    follow(monkeypatch, rag, lambda prompt: "I would rather talk.")
    free = llm.chat_with_tools([retriever_tool], QUESTION)
    assert free.message.content == "I would rather talk."
    assert llm.get_tool_calls_from_response(free, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="calls no tool"):
        llm.get_tool_calls_from_response(free)
    forced = llm.chat_with_tools([retriever_tool], QUESTION, tool_required=True)
    (chosen,) = llm.get_tool_calls_from_response(forced)
    assert chosen.tool_name == "passages"


@pytest.mark.usefixtures("own_event_loop")
def test_one_call_unless_several_are_allowed(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, llm: LlamaIndexLLM, retriever_tool: RetrieverTool
) -> None:
    follow(monkeypatch, rag, lambda prompt: call(input="a") + call(input="b"))
    one = llm.chat_with_tools([retriever_tool], QUESTION)
    assert len(llm.get_tool_calls_from_response(one)) == 1
    both = llm.chat_with_tools([retriever_tool], QUESTION, allow_parallel_tool_calls=True)
    assert len(llm.get_tool_calls_from_response(both)) == 2


def test_without_a_template_there_are_no_tools(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, llm: LlamaIndexLLM
) -> None:
    assert llm.metadata.is_function_calling_model
    monkeypatch.setattr(rag.index.tokenizer, "chat_template", None)
    assert not llm.metadata.is_function_calling_model
