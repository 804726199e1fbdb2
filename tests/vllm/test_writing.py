"""Rows written a layer a step: what happens between the steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.llms.vllm.settings import RequestParams
from tests.vllm.conftest import make_prompt, running
from tests.vllm.reference import assert_same, expected, given, sampling

NONE = RequestParams(policy="none")
PLAIN = RequestParams(reuse=False)


@pytest.fixture(scope="module")
def llm(vllm: Any, served: Index) -> Iterator[Any]:
    with running(vllm, served, max_num_batched_tokens=256) as engine:
        yield engine


@pytest.fixture(autouse=True)
def a_layer_a_step(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.reset_prefix_cache()
    monkeypatch.setattr("kvrag.llms.vllm.connector._WRITE_SECONDS", 0.0)


@pytest.fixture
def side(llm: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker_side


class _Asked:
    """Requests of one engine, step by step."""

    def __init__(self, llm: Any, oracle: KVEngine) -> None:
        self._engine, self._oracle = llm.llm_engine, oracle
        self.outputs: dict[str, Any] = {}

    def add(self, name: str, prompt: str, request: RequestParams, num_tokens: int = 0) -> None:
        ids = list(self._oracle.prompt_ids(prompt))
        parameters = sampling(request)
        parameters.max_tokens = num_tokens or parameters.max_tokens
        self._engine.add_request(name, {"prompt_token_ids": ids}, parameters)

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self.outputs[output.request_id] = output

    def finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self.step()


@pytest.fixture
def half_written(llm: Any, oracle: KVEngine, side: Any) -> Iterator[_Asked]:
    """A request "half" some of whose layers are written, and a batch that goes on."""
    asked = _Asked(llm, oracle)
    asked.add("batch", make_prompt(9, 8), PLAIN, 200)
    asked.step()
    asked.add("half", make_prompt(3, 1), NONE)
    while not side._writing:
        asked.step()
    yield asked
    asked.finish()


def test_a_layer_is_written_each_step(side: Any, half_written: _Asked) -> None:
    num_steps = 1  # is behind us
    while side._writing:
        half_written.step()
        num_steps += 1
    assert num_steps == len(side._pages.layers)


def test_given_up_in_between(llm: Any, oracle: KVEngine, side: Any, half_written: _Asked) -> None:
    llm.llm_engine.abort_request(["half"])
    half_written.step()
    # Its blocks may be another's from now on.
    assert not side._writing
    half_written.add("next", make_prompt(4, 2), NONE)
    half_written.add("plain", make_prompt(6, 5), PLAIN)
    half_written.finish()
    assert not side._writing
    assert "half" not in half_written.outputs
    for name, prompt, policy in (
        ("next", make_prompt(4, 2), "none"),
        ("plain", make_prompt(6, 5), None),
    ):
        wanted = expected(oracle, prompt, *([policy] if policy else []))
        assert_same(given(half_written.outputs[name]), wanted)
    assert llm.reset_prefix_cache()


def test_given_up_before_its_turn(
    llm: Any, oracle: KVEngine, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[Any] = []
    bring_part = type(side)._bring_part

    def seen(self: Any, load: Any) -> Any:
        brought.append(bring_part(self, load))
        return brought[-1]

    monkeypatch.setattr(type(side), "_bring_part", seen)
    asked = _Asked(llm, oracle)
    asked.add("batch", make_prompt(9, 8), PLAIN, 200)
    asked.step()
    for name, prompt in (("first", make_prompt(3, 1)), ("second", make_prompt(4, 2))):
        asked.add(name, prompt, NONE)
    while len(side._running) < 2:
        asked.step()
    wait([future for _, future in side._running.values()])
    asked.step()  # writes a layer of the first
    llm.llm_engine.abort_request(["second"])
    asked.finish()
    assert not side._running
    assert not side._writing
    assert len(brought) == 2
    assert [one._num_holders for one in brought if one is not side._last[1]] == [0]
    assert side._last[1]._num_holders == 1
    assert "second" not in asked.outputs
    assert llm.reset_prefix_cache()


def test_the_cache_is_forgotten_meanwhile(llm: Any, oracle: KVEngine, half_written: _Asked) -> None:
    assert not llm.reset_prefix_cache()
    half_written.add("same", make_prompt(3, 1), NONE)
    half_written.finish()
    for name in ("half", "same"):
        assert_same(given(half_written.outputs[name]), expected(oracle, make_prompt(3, 1), "none"))
