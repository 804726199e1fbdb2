"""vLLM on several workers: each fuses and loads its heads or layers; answers stay the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.llms.vllm.settings import RequestParams
from kvrag_testing.store_contract import stored
from tests.support.rag import save_model, text_index
from tests.vllm.conftest import TEXTS, make_prompt, running
from tests.vllm.reference import ask, assert_same, expected, given, reused

POLICIES = ("none", "boundary", "two_stage", "deviation", "gradual")


@pytest.fixture(scope="module")
def by_heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """An index whose records store each head apart."""
    folder = tmp_path_factory.mktemp("by-heads")
    save_model(folder / "model", head_dim=32)
    with text_index(folder / "index", folder / "model", TEXTS, codec="raw-heads") as index:
        yield index


@pytest.fixture(scope="module")
def oracle(by_heads: Index) -> KVEngine:
    return KVEngine(by_heads, links="off", session_bytes=0)


@pytest.fixture(scope="module", autouse=True)
def unbound() -> Iterator[None]:
    """By itself, vLLM would give each worker a memory node of its own."""
    with mock.patch.dict(os.environ, VLLM_CPU_OMP_THREADS_BIND="nobind"):
        yield


HEADS: dict[str, Any] = {"tensor_parallel_size": 2}
# vLLM's CPU build makes the room for what stages exchange when it warms a compiled model up.
LAYERS: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


@pytest.fixture(scope="module", params=[HEADS, LAYERS], ids=["heads", "layers"])
def llm(vllm: Any, by_heads: Index, request: pytest.FixtureRequest) -> Iterator[Any]:
    with mock.patch.dict(os.environ):
        if request.param is LAYERS:
            os.environ["VLLM_CPU_CI_ENV"] = "0"
        with running(vllm, by_heads, max_num_batched_tokens=256, **request.param) as engine:
            engine.is_split_by_heads = request.param is HEADS
            yield engine


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_one_process(llm: Any, oracle: KVEngine, policy: str) -> None:
    prompt = make_prompt(3, 1, 7)
    output = ask(llm, oracle, prompt, RequestParams(policy=policy))
    assert reused(output)["num_loaded"] > 100
    assert_same(given(output), expected(oracle, prompt, policy))
    plain = ask(llm, oracle, prompt, RequestParams(reuse=False))
    assert_same(given(plain), expected(oracle, prompt))


def test_each_worker_reads_its_part(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(2, 8)
    said = reused(ask(llm, oracle, prompt, RequestParams(policy="none")))
    whole = oracle.fuse(prompt, policy="none").report.bytes_loaded
    mine, others = said["bytes_by_worker"]
    assert said["report"]["bytes_loaded"] == mine + others
    if llm.is_split_by_heads:
        # Half of the KV each, and each the headers.
        assert mine == others
        assert whole / 2 < mine < 0.6 * whole
    else:
        assert whole / 2 < mine < 0.6 * whole
        assert others == whole


def test_a_lost_record_is_computed_by_all(llm: Any, oracle: KVEngine, by_heads: Index) -> None:
    prompt = make_prompt(8, 9)
    (lost,) = by_heads.get_chunks(by_heads.catalog.chunk_ids_of("text-9"))
    key = by_heads.key_of(lost)
    content = stored(by_heads.store, key)
    damaged = bytearray(content)
    damaged[-1] ^= 1  # the last head's, in the last layer: one worker sees it
    by_heads.store.replace(key, bytes(damaged))
    try:
        output = ask(llm, oracle, prompt, RequestParams(policy="none"))
    finally:
        by_heads.store.replace(key, content)
    # The first text stands where it was encoded, so nothing is approximate any more.
    assert_same(given(output), expected(oracle, prompt))
    if llm.is_split_by_heads:
        assert reused(output)["report"]["misses"] == {"record damaged": 1}
    else:
        # The stage before does not read that layer: what one of them lacks, the engine computes.
        assert "do not all have" in reused(output)["computed_because"]
