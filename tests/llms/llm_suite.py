"""A standard suite for `BaseLLM` classes, in the shape of LangChain's chat-model suites.

LangChain ships none. A class is tested by subclassing `LLMStandardTests` and overriding the two
properties at its top.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.language_models import BaseLLM
from langchain_core.load import dumpd, load
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompts import PromptTemplate
from langchain_tests.base import BaseStandardTests


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


class AsyncRecorder(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)


class LLMStandardTests(BaseStandardTests):
    @property
    @abstractmethod
    def llm_class(self) -> type[BaseLLM]: ...

    @property
    @abstractmethod
    def llm_params(self) -> dict[str, Any]: ...

    @property
    def standard_llm_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 12, "timeout": 60, "stop": [], "max_retries": 2}

    @pytest.fixture
    def llm(self) -> BaseLLM:
        return self.llm_class(**{**self.standard_llm_params, **self.llm_params})

    # -- construction ------------------------------------------------------------------------

    def test_init(self) -> None:
        assert self.llm_class(**{**self.standard_llm_params, **self.llm_params}) is not None

    def test_init_time(self, benchmark: Any) -> None:
        benchmark(lambda: [self.llm_class(**self.llm_params) for _ in range(10)])

    def test_standard_params(self, llm: BaseLLM) -> None:
        traced = llm._get_ls_params(stop=["end"])
        assert traced["ls_model_type"] == "llm"
        assert isinstance(traced["ls_provider"], str)
        assert isinstance(traced["ls_model_name"], str)
        assert traced["ls_temperature"] == 0
        assert traced["ls_max_tokens"] == self.standard_llm_params["max_tokens"]
        assert traced["ls_stop"] == ["end"]
        assert llm._get_ls_params(model="other")["ls_model_name"] == "other"

    @pytest.mark.filterwarnings("ignore:The function `load` is in beta")
    def test_serdes(self, llm: BaseLLM) -> None:
        saved = dumpd(llm)
        restored = load(saved, valid_namespaces=["kvrag"], allowed_objects=[self.llm_class])
        assert dumpd(restored) == saved
        assert restored.asdict() == llm.asdict()

    def test_unknown_constructor_argument(self) -> None:
        with pytest.raises(ValueError, match="temprature"):
            self.llm_class(**self.llm_params, temprature=1.0)

    # -- answers -----------------------------------------------------------------------------

    def test_invoke(self, llm: BaseLLM) -> None:
        answer = llm.invoke("Hello")
        assert isinstance(answer, str)
        assert answer

    def test_prompt_is_not_echoed(self, llm: BaseLLM) -> None:
        assert "harbour ledger" not in llm.invoke("The harbour ledger of Varn")

    async def test_ainvoke(self, llm: BaseLLM) -> None:
        assert await llm.ainvoke("Hello") == llm.invoke("Hello")

    def test_batch(self, llm: BaseLLM) -> None:
        answers = llm.batch(["Hello", "Hey"])
        assert answers == [llm.invoke("Hello"), llm.invoke("Hey")]

    async def test_abatch(self, llm: BaseLLM) -> None:
        assert await llm.abatch(["Hello", "Hey"]) == llm.batch(["Hello", "Hey"])

    def test_generate(self, llm: BaseLLM) -> None:
        result = llm.generate(["Hello", "Hey"])
        assert [one[0].text for one in result.generations] == llm.batch(["Hello", "Hey"])
        assert result.llm_output is not None
        usage = result.llm_output["token_usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
        assert result.llm_output["model_name"]

    async def test_agenerate(self, llm: BaseLLM) -> None:
        result = await llm.agenerate(["Hello"])
        assert result.generations[0][0].text == llm.invoke("Hello")

    def test_chain(self, llm: BaseLLM) -> None:
        chain = PromptTemplate.from_template("Say {word}") | llm
        assert chain.invoke({"word": "fox"}) == llm.invoke("Say fox")

    def test_same_question_same_answer(self, llm: BaseLLM) -> None:
        assert llm.invoke("Hello") == llm.invoke("Hello")

    # -- streaming ---------------------------------------------------------------------------

    def test_stream(self, llm: BaseLLM) -> None:
        recorder = Recorder()
        pieces = list(llm.stream("Hello", config={"callbacks": [recorder]}))
        assert len([piece for piece in pieces if piece]) > 1
        assert "".join(pieces) == llm.invoke("Hello")
        assert "".join(recorder.tokens) == "".join(pieces)
        (result,) = recorder.results
        info = result.generations[0][0].generation_info
        assert info is not None
        assert info["finish_reason"] in ("stop", "length")

    async def test_astream(self, llm: BaseLLM) -> None:
        recorder = AsyncRecorder()
        pieces = [piece async for piece in llm.astream("Hello", config={"callbacks": [recorder]})]
        assert "".join(pieces) == llm.invoke("Hello")
        assert "".join(recorder.tokens) == "".join(pieces)

    async def test_astream_events(self, llm: BaseLLM) -> None:
        events = [event async for event in llm.astream_events("Hello", version="v2")]
        streamed = [e["data"]["chunk"] for e in events if e["event"] == "on_llm_stream"]
        assert "".join(streamed) == llm.invoke("Hello")

    def test_abandoned_stream(self, llm: BaseLLM) -> None:
        stream = llm.stream("Hello")
        next(stream)
        stream.close()
        assert llm.invoke("Hello")

    def test_interleaved_streams(self, llm: BaseLLM) -> None:
        first, second = llm.stream("Hello"), llm.stream("Hey")
        pieces: tuple[list[str], list[str]] = ([], [])
        for one, other in zip(first, second, strict=False):
            pieces[0].append(one)
            pieces[1].append(other)
        pieces[0].extend(first)
        pieces[1].extend(second)
        assert llm.invoke("Hello").startswith("".join(pieces[0][:2]))
        assert llm.invoke("Hey").startswith("".join(pieces[1][:2]))

    async def test_event_loop_goes_on(self, llm: BaseLLM) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await llm.ainvoke("Hello", max_tokens=40)
        ticking.cancel()
        assert ticks > 3

    # -- call parameters ---------------------------------------------------------------------

    def test_stop_in_call_and_constructor(self, llm: BaseLLM) -> None:
        whole = llm.invoke("Hello")
        stop = whole[4:6]
        cut = whole[: whole.index(stop)]
        assert llm.invoke("Hello", stop=[stop]) == cut
        assert "".join(llm.stream("Hello", stop=[stop])) == cut
        stopped = self.llm_class(**{**self.standard_llm_params, **self.llm_params, "stop": [stop]})
        assert stopped.invoke("Hello") == cut
        assert stopped.invoke("Hello", stop=[]) == whole

    def test_call_replaces_constructor(self, llm: BaseLLM) -> None:
        short = llm.generate(["Hello"], max_tokens=2)
        assert short.llm_output is not None
        assert short.llm_output["token_usage"]["completion_tokens"] == 2
        assert llm.bind(max_tokens=2).invoke("Hello") == short.generations[0][0].text

    def test_unknown_call_parameter(self, llm: BaseLLM) -> None:
        recorder = Recorder()
        for call in (llm.invoke, lambda *a, **k: list(llm.stream(*a, **k))):
            with pytest.raises(ValueError, match="max_new_tokens"):
                call("Hello", config={"callbacks": [recorder]}, max_new_tokens=3)
        assert len(recorder.errors) == 2

    def test_seed(self, llm: BaseLLM) -> None:
        def sample(seed: int) -> str:
            return llm.invoke("Hello", temperature=1.5, seed=seed)

        assert sample(1) == sample(1)
        assert len({sample(seed) for seed in (2, 3)}) > 1
