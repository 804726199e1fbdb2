"""The connector together with other features of vLLM."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.llms.vllm.options import engine_options
from kvrag.llms.vllm.settings import ConnectorSettings, RequestParams
from tests.vllm.conftest import make_prompt, running
from tests.vllm.reference import assert_same, expected, given, reused, sampling

NONE = RequestParams(policy="none")
PLAIN = RequestParams(reuse=False)


def prompt_of(oracle: KVEngine, text: str) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(oracle.prompt_ids(text))}


def test_speculative_decoding(vllm: Any, served: Index, oracle: KVEngine) -> None:
    options = {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    }
    text = make_prompt(3, 1, 7, question="Entry 2: Oleg paid 9 coins. Entry 2: Oleg paid")
    # In a process of its own: vLLM 0.32.0 makes no second engine where numba has been imported.
    with (
        mock.patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="1"),
        running(vllm, served, **options) as llm,
    ):
        for request, policy in ((NONE, "none"), (RequestParams(policy="two_stage"), "two_stage")):
            wanted = expected(oracle, text, policy, num_tokens=24)
            (output,) = llm.generate(
                prompt_of(oracle, text), sampling(request, num_tokens=24), use_tqdm=False
            )
            assert reused(output)["num_loaded"] > 100
            assert_same(given(output), wanted)


def test_several_answers_fuse_once(
    vllm: Any, served: Index, oracle: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    fused: list[int] = []
    of_engine = KVEngine.fuse

    def counting(self: KVEngine, *args: Any, **kwargs: Any) -> Any:
        if self is not oracle:
            fused.append(1)
        return of_engine(self, *args, **kwargs)

    text = make_prompt(2, 6)
    params = SamplingParams(
        n=4,
        temperature=1.0,
        seed=7,
        max_tokens=5,
        extra_args={"kv_transfer_params": NONE.to_params()},
    )
    with running(vllm, served) as llm:
        with monkeypatch.context() as patching:
            patching.setattr(KVEngine, "fuse", counting)
            (output,) = llm.generate(prompt_of(oracle, text), params, use_tqdm=False)
        assert len(output.outputs) == 4
        assert len({tuple(one.token_ids) for one in output.outputs}) > 1
        assert fused == [1]
        # What was written for all of them is right.
        (again,) = llm.generate(prompt_of(oracle, text), sampling(NONE), use_tqdm=False)
        assert_same(given(again), expected(oracle, text, "none"))


def test_another_connector_beside_it(vllm: Any, served: Index, oracle: KVEngine) -> None:
    """Whoever keeps blocks by the engine's names never confuses fused blocks with plain ones."""
    from tests.vllm.peer import NAMES

    ours = engine_options(ConnectorSettings(str(served.path)))["kv_transfer_config"]
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                ours,
                {
                    "kv_connector": "NotingConnector",
                    "kv_connector_module_path": "tests.vllm.peer",
                    "kv_role": "kv_both",
                },
            ]
        },
    }
    text = make_prompt(3, 1, 7)
    with running(vllm, served, kv_transfer_config=both) as llm:
        kept = []
        for request, policy in ((NONE, "none"), (PLAIN, None), (NONE, "none")):
            NAMES.clear()
            (output,) = llm.generate(prompt_of(oracle, text), sampling(request), use_tqdm=False)
            assert_same(given(output), expected(oracle, text, policy))
            (names,) = NAMES.values()
            kept.append(names)
    fused, plain, again = kept
    assert len(fused) >= 2
    assert again == fused
    assert not set(plain) & set(fused)
