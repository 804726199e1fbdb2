"""vLLM, unpatched, over fused prompts: Transformers' answers, and nothing else changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.errors import StoreError
from kvrag.fusion.policies.registry import POLICIES
from kvrag.ingest.index import Index
from kvrag.llms.vllm.settings import ConnectorSettings, RequestParams
from tests.support.rag import text_index
from tests.vllm.conftest import TEXTS, make_prompt, running
from tests.vllm.reference import (
    ask,
    assert_same,
    expected,
    given,
    reused,
    sampling,
)

PLAIN = RequestParams(reuse=False)
MEASURED = POLICIES


@pytest.fixture(scope="module")
def llm(vllm: Any, served: Index) -> Iterator[Any]:
    """One engine: prefix caching on, and prefill in pieces of 256 tokens."""
    with running(vllm, served, max_num_batched_tokens=256) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty_cache(request: pytest.FixtureRequest) -> None:
    if "llm" in request.fixturenames:
        assert request.getfixturevalue("llm").reset_prefix_cache()


@pytest.mark.parametrize("policy", MEASURED)
def test_answers_are_those_of_transformers(llm: Any, oracle: KVEngine, policy: str) -> None:
    prompt = make_prompt(3, 1, 7)
    output = ask(llm, oracle, prompt, RequestParams(policy=policy))
    assert reused(output)["num_loaded"] > sum(len(text) for text in TEXTS[:1]) // 8
    assert_same(given(output), expected(oracle, prompt, policy))
    # It is not full prefill that was compared.
    plain = expected(oracle, prompt)
    assert (given(output).logprobs - plain.logprobs).abs().max() > 1e-3


def test_an_exact_prefix_is_plain_prefill(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(5)
    output = ask(llm, oracle, prompt)
    assert reused(output)["report"]["num_exact"] > 0
    assert reused(output)["report"]["num_reused"] == 0
    assert_same(given(output), expected(oracle, prompt))


@pytest.mark.parametrize("write_seconds", [None, 0.0])
def test_eight_requests_at_once_fused_and_plain(
    llm: Any, oracle: KVEngine, monkeypatch: pytest.MonkeyPatch, write_seconds: float | None
) -> None:
    from kvrag.llms.vllm import connector

    left: list[int] = []
    finish = connector.WorkerSide.finish

    def finish_and_look(self: connector.WorkerSide, abandoned: Any) -> Any:
        found = finish(self, abandoned)
        left.append(len(self._writing))
        return found

    monkeypatch.setattr(connector.WorkerSide, "finish", finish_and_look)
    if write_seconds is not None:
        monkeypatch.setattr(connector, "_WRITE_SECONDS", write_seconds)
    asked = [
        (make_prompt(0, 1), RequestParams(policy="none")),
        (make_prompt(2), PLAIN),
        (make_prompt(3, 4, 5), RequestParams(policy="boundary")),
        (make_prompt(9, 8, 7, 6), PLAIN),
        (make_prompt(4, 2), RequestParams(policy="two_stage")),
        (make_prompt(question="Ines keeps the old bridge."), RequestParams(policy="none")),
        (make_prompt(6, 0, 9), RequestParams(policy="deviation", ratio=0.3)),
        (make_prompt(1, 7), RequestParams(policy="none")),
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": list(oracle.prompt_ids(prompt))} for prompt, _ in asked],
        [sampling(request) for _, request in asked],
        use_tqdm=False,
    )
    for (prompt, request), output in zip(asked, outputs, strict=True):
        if request is PLAIN or "\n\n" not in prompt:
            wanted = expected(oracle, prompt)
        elif request.ratio is not None:
            wanted = expected(oracle, prompt, f"{request.policy}:ratio={request.ratio}")
        else:
            wanted = expected(oracle, prompt, request.policy)
        assert_same(given(output), wanted)
    # Without time for more, a layer is written behind each step of the batch.
    assert write_seconds is None or sum(left) > 1


def test_a_prompt_that_says_nothing_of_kvrag_is_fused(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(6, 2)
    output = ask(llm, oracle, prompt)
    assert reused(output)["num_loaded"] > 0
    assert_same(given(output), expected(oracle, prompt, "two_stage"))


def test_a_prompt_without_chunks_is_the_engines_own(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(question="The quick brown fox jumps over the lazy dog each morning.")
    output = ask(llm, oracle, prompt)
    assert output.kv_transfer_params is None
    assert_same(given(output), expected(oracle, prompt))


# -- trap 1: the engine's own cache --------------------------------------------------------------


def test_a_plain_request_never_gets_fused_blocks(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(3, 1)
    fresh = given(ask(llm, oracle, prompt, PLAIN))
    assert llm.reset_prefix_cache()
    ask(llm, oracle, prompt, RequestParams(policy="none"))
    after = given(ask(llm, oracle, prompt, PLAIN))
    assert after.tokens == fresh.tokens
    assert torch.equal(after.logprobs, fresh.logprobs)


def test_policies_do_not_share_blocks(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(3, 1)
    for policy in ("none", "boundary", "none"):
        output = ask(llm, oracle, prompt, RequestParams(policy=policy))
        assert_same(given(output), expected(oracle, prompt, policy))


# -- trap 2: local hits --------------------------------------------------------------------------


def test_the_same_prompt_again_is_served_from_the_engines_cache(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(3, 1, 7)
    request = RequestParams(policy="none")
    first, again = (ask(llm, oracle, prompt, request) for _ in range(2))
    assert reused(again)["num_loaded"] < 32 < reused(first)["num_loaded"]
    assert_same(given(again), given(first))


# -- trap 3: requests that read no cache ---------------------------------------------------------


def test_prompt_logprobs_are_computed(llm: Any, oracle: KVEngine) -> None:
    prompt = make_prompt(3, 1)
    ids = list(oracle.prompt_ids(prompt))
    output = llm.generate({"prompt_token_ids": ids}, sampling(prompt_logprobs=1), use_tqdm=False)[0]
    assert len(output.prompt_logprobs) == len(ids)
    assert_same(given(output), expected(oracle, prompt))
    # Nor did it leave anything under a salt, or fused.
    after = ask(llm, oracle, prompt, PLAIN)
    assert_same(given(after), expected(oracle, prompt))


# -- traps 4, 6 and 7, and faults ----------------------------------------------------------------


def _assert_fused(llm: Any, oracle: KVEngine, prompt: str) -> None:
    output = ask(llm, oracle, prompt, RequestParams(policy="none"))
    assert_same(given(output), expected(oracle, prompt, "none"))


def _assert_computed(llm: Any, oracle: KVEngine, request: RequestParams, why: str) -> None:
    prompt = make_prompt(3, 1)
    output = ask(llm, oracle, prompt, request)
    assert reused(output)["num_loaded"] == 0
    assert why in reused(output)["computed_because"]
    assert_same(given(output), expected(oracle, prompt))


def _fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("no room")


def _fail_to_fuse(patching: pytest.MonkeyPatch) -> None:
    patching.setattr(KVEngine, "fuse", _fail)


def _fail_to_start(patching: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    patching.setattr(get_kv_transfer_group()._worker_side._threads, "submit", _fail)


def _fail_to_write(patching: pytest.MonkeyPatch) -> None:
    from kvrag.llms.vllm.pages import Pages

    write = Pages.write

    def write_one_layer(self: Pages, *args: Any) -> Iterator[None]:
        yield next(iter(write(self, *args)))
        _fail()

    patching.setattr(Pages, "write", write_one_layer)


@pytest.mark.parametrize("harm", [_fail_to_fuse, _fail_to_start, _fail_to_write])
def test_what_fails_is_computed(
    llm: Any, oracle: KVEngine, monkeypatch: pytest.MonkeyPatch, harm: Any
) -> None:
    with monkeypatch.context() as patching:
        harm(patching)
        _assert_computed(llm, oracle, RequestParams(policy="none"), "no room")
    _assert_fused(llm, oracle, make_prompt(3, 1))


def test_a_store_that_goes_down_in_mid_load_costs_prefill_only(
    llm: Any, oracle: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens: list[str] = []
    of_index = Index.open_kv

    def open_kv(self: Index, chunk_id: str, context_ids: Any = None) -> Any:
        opens.append(chunk_id)
        if len(opens) > 1:
            raise StoreError("the store is gone")
        return of_index(self, chunk_id, context_ids)

    monkeypatch.setattr(Index, "open_kv", open_kv)
    prompt = make_prompt(4, 5, 6)
    output = ask(llm, oracle, prompt, RequestParams(policy="none"))
    report = reused(output)["report"]
    assert report["misses"] == {"store unreadable": 2}
    assert report["num_chunks"] == 1
    # The chunk that is left stands where it was encoded: nothing is approximate any more.
    assert_same(given(output), expected(oracle, prompt))
    # What was computed for want of a chunk is not what the next one is given for fused.
    monkeypatch.undo()
    _assert_fused(llm, oracle, prompt)


def test_a_request_that_is_given_up_while_it_is_fused(
    llm: Any, oracle: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    begun = threading.Event()
    of_engine = KVEngine.fuse

    def slow(self: KVEngine, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return of_engine(self, *args, **kwargs)

    engine = llm.llm_engine
    prompt = make_prompt(3, 1)
    ids = list(oracle.prompt_ids(prompt))
    with monkeypatch.context() as patching:
        patching.setattr(KVEngine, "fuse", slow)
        request = sampling(RequestParams(policy="none"))
        engine.add_request("given-up", {"prompt_token_ids": ids}, request)
        while not begun.is_set():
            engine.step()
        engine.abort_request(["given-up"])
        # Others go on meanwhile.
        plain = given(ask(llm, oracle, prompt, PLAIN))
        assert_same(plain, expected(oracle, prompt))
        go_on.set()
    _assert_fused(llm, oracle, prompt)


@pytest.mark.usefixtures("vllm")
def test_the_worker_makes_the_record_of_the_first_chunk(tmp_path: Path) -> None:
    from kvrag.llms.vllm.connector import WorkerSide
    from kvrag.llms.vllm.plan import Load, Planner

    settings = ConnectorSettings(str(tmp_path / "index"), policy="none")
    with text_index(tmp_path / "index", "llama", TEXTS, context="filler:40") as index:
        worker = WorkerSide(settings, index.model)
        plan = Planner(index, settings).plan(KVEngine(index).prompt_ids(make_prompt(3, 1)), None)
        reports = []
        for salt in ("first", "second"):  # each is fused
            load = Load("one", replace(plan, salt=salt), (), 0, plan.num_tokens)
            brought = worker._bring(load)
            reports.append(brought.report)
            # These are the rows that the salt names: the prompt missed no more than was planned.
            assert worker._last == (salt, brought)
            worker._index.on_demand.flush()
            brought.release()
        worker.close()
    made, loaded = reports
    assert (made.num_made, made.num_exact) == (loaded.num_exact, loaded.num_made)
    assert loaded.num_exact > 0
