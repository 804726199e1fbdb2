"""All ways to ask a `BaseLLM` agree; LangChain ships a suite for chat models only."""

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, load
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompts import PromptTemplate

from kvrag.llms.langchain import KVRagLLM
from tests.support.rag import Rag

PARAMETERS = {"temperature": 0, "max_tokens": 12, "timeout": 60, "stop": [], "max_retries": 2}


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.results: list[LLMResult] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        assert isinstance(kwargs["chunk"], GenerationChunk)
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


@pytest.fixture
def llm(rag: Rag) -> KVRagLLM:
    return KVRagLLM(index=str(rag.path), **PARAMETERS)


async def test_all_calls_agree(llm: KVRagLLM) -> None:
    whole = [llm.invoke("Hello"), llm.invoke("Hey")]
    assert all(whole)
    assert [await llm.ainvoke("Hello"), await llm.ainvoke("Hey")] == whole
    assert llm.batch(["Hello", "Hey"]) == await llm.abatch(["Hello", "Hey"]) == whole
    for result in (llm.generate(["Hello", "Hey"]), await llm.agenerate(["Hello", "Hey"])):
        assert [one[0].text for one in result.generations] == whole
        usage = result.llm_output["token_usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
        assert result.llm_output["model_name"]
    events = [event async for event in llm.astream_events("Hello", version="v2")]
    streamed = [one["data"]["chunk"] for one in events if one["event"] == "on_llm_stream"]
    assert "".join(streamed) == whole[0]
    chain = PromptTemplate.from_template("Say {word}") | llm
    assert chain.invoke({"word": "fox"}) == llm.invoke("Say fox")
    assert "harbour ledger" not in llm.invoke("The harbour ledger of Varn")


async def test_streams(llm: KVRagLLM) -> None:
    whole, recorders = llm.invoke("Hello"), (Recorder(), Recorder())
    pieces = list(llm.stream("Hello", config={"callbacks": [recorders[0]]}))
    assert len([piece for piece in pieces if piece]) > 1
    config: Any = {"callbacks": [recorders[1]]}
    later = [piece async for piece in llm.astream("Hello", config=config)]
    for found, recorder in zip((pieces, later), recorders, strict=True):
        assert "".join(found) == "".join(recorder.tokens) == whole
        info = recorder.results[0].generations[0][0].generation_info
        assert info["finish_reason"] in ("stop", "length")
    left = llm.stream("Hello")
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert llm.invoke("Hello") == whole


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_tracing_and_serialising(llm: KVRagLLM) -> None:
    traced = llm._get_ls_params(stop=["end"])
    assert (traced["ls_model_type"], traced["ls_provider"]) == ("llm", "kvrag")
    assert (traced["ls_temperature"], traced["ls_max_tokens"]) == (0, PARAMETERS["max_tokens"])
    assert (traced["ls_model_name"], traced["ls_stop"]) == ("model", ["end"])
    assert llm._get_ls_params(model="other")["ls_model_name"] == "other"
    saved = dumpd(llm)
    restored = load(saved, valid_namespaces=["kvrag"], allowed_objects=[KVRagLLM])
    assert dumpd(restored) == saved
    assert restored.asdict() == llm.asdict()


def test_calls_replace_what_was_constructed(rag: Rag, llm: KVRagLLM) -> None:
    whole = llm.invoke("Hello")
    stop = whole[4:6]
    cut = whole[: whole.index(stop)]
    assert llm.invoke("Hello", stop=[stop]) == cut
    assert "".join(llm.stream("Hello", stop=[stop])) == cut
    stopped = KVRagLLM(index=str(rag.path), **{**PARAMETERS, "stop": [stop]})
    assert (stopped.invoke("Hello"), stopped.invoke("Hello", stop=[])) == (cut, whole)
    short = llm.generate(["Hello"], max_tokens=2)
    assert short.llm_output["token_usage"]["completion_tokens"] == 2
    assert llm.bind(max_tokens=2).invoke("Hello") == short.generations[0][0].text
    late = llm.generate(["Hello"], timeout=1e-6, max_tokens=200).generations[0][0]
    assert (late.generation_info or {})["finish_reason"] == "timeout"
    drawn = [llm.invoke("Hello", temperature=1.5, seed=seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
