"""LangChain and LlamaIndex over a vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.errors import EngineError
from kvrag.ingest.index import Index
from kvrag.llms.vllm import engine as engines
from kvrag.llms.vllm.langchain import KVRagVLLM
from kvrag.llms.vllm.llamaindex import KVRagVLLM as LlamaIndexVLLM
from tests.llms.conftest import own_event_loop
from tests.vllm.conftest import make_prompt

__all__ = ["own_event_loop"]

ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,
    "enforce_eager": True,
}
MAX_TOKENS = 8


def whole_characters(text: str) -> str:
    """Return a text as vLLM ends it: without the half character that a last token may leave."""
    return text.rstrip("\ufffd")


@pytest.fixture(scope="module")
def given(vllm: Any, served: Index) -> Iterator[dict[str, Any]]:
    """What all objects are made with; they share one engine."""
    yield {"index": served, "engine_args": ENGINE, "max_tokens": MAX_TOKENS, "policy": "none"}
    from vllm.distributed import cleanup_dist_env_and_memory

    for one in engines._started.values():
        one._engine.engine_core.shutdown()
    engines._started.clear()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def llm(given: dict[str, Any]) -> KVRagVLLM:
    return KVRagVLLM(**given)


def test_an_answer_and_its_report(llm: KVRagVLLM, oracle: KVEngine) -> None:
    prompt = make_prompt(3, 1)
    wanted = oracle.generate(prompt, policy="none", max_tokens=MAX_TOKENS)
    generation = llm.generate([prompt]).generations[0][0]
    assert generation.text == whole_characters(wanted.text)
    info = generation.generation_info
    assert info["finish_reason"] == wanted.finish_reason
    assert [source["source"] for source in info["sources"]] == ["text-3", "text-1"]
    report = wanted.report.to_dict()
    for name in ("num_tokens", "num_exact", "num_reused", "num_recomputed", "num_fresh"):
        assert info["report"][name] == report[name], name


def test_a_stream_is_the_answer_in_pieces(llm: KVRagVLLM, oracle: KVEngine) -> None:
    prompt = make_prompt(2, 0)
    chunks = list(llm._stream(prompt))
    wanted = oracle.generate(prompt, policy="none", max_tokens=MAX_TOKENS)
    assert "".join(chunk.text for chunk in chunks) == whole_characters(wanted.text)
    assert len(chunks) > 2
    assert chunks[-1].generation_info["report"]["num_chunks"] == 2


def test_a_stream_that_nobody_reads_on_is_given_up(llm: KVRagVLLM) -> None:
    for _ in llm.stream(make_prompt(2, 0), max_tokens=200):
        break
    assert llm.engine().transport._engine.get_num_unfinished_requests() == 0


def test_llamaindex(given: dict[str, Any], oracle: KVEngine, own_event_loop: None) -> None:
    llm = LlamaIndexVLLM(**given)
    prompt = make_prompt(8, 6)  # of no other test here: vLLM's own prefix cache holds nothing of it
    wanted = oracle.generate(prompt, policy="none", max_tokens=MAX_TOKENS)
    response = llm.complete(prompt)
    assert response.text == whole_characters(wanted.text)
    assert response.raw["usage"]["cached_tokens"] == wanted.usage.cached_tokens
    assert [piece.text for piece in llm.stream_complete(prompt)][-1] == whole_characters(
        wanted.text
    )
    assert llm.metadata.context_window == oracle.index.config.max_positions


def test_what_the_engine_refuses_is_one_error(llm: KVRagVLLM) -> None:
    with pytest.raises(EngineError, match="vLLM refuses"):
        llm.engine().generate("words " * 300, max_tokens=2)
    assert llm.invoke(make_prompt(3), max_tokens=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "magic"},
        {"policy": "none:shift=2"},
        {"links": "links.safetensors"},
        {"schemas": ["schema.xml"]},
        {"device": "cuda"},
        {"base_url": "http://127.0.0.1:1/v1", "engine_args": {"seed": 1}},
    ],
)
def test_what_vllm_cannot_do_is_refused_at_once(wrong: dict[str, Any], served: Index) -> None:
    with pytest.raises(ValueError, match=r"policy|vLLM|engine_args"):
        KVRagVLLM(index=served, **wrong)


def test_nothing_is_started_before_the_first_prompt(served: Index) -> None:
    llm = KVRagVLLM(index=served, base_url="http://127.0.0.1:1/v1")
    assert "KVRagVLLM" in repr(llm)
    assert llm.identity()["policy"] == "two_stage"
    with pytest.raises(EngineError, match="kvrag serve"):
        llm.invoke(make_prompt(1))
