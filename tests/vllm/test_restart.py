"""An engine that ends, and another one over the same index: names of artefacts outlive both."""

from __future__ import annotations

from typing import Any

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.llms.vllm.artefacts import ArtefactStore
from kvrag.llms.vllm.settings import RequestParams
from tests.vllm.conftest import make_prompt, running
from tests.vllm.reference import assert_same, expected, given, reused, sampling


def test_what_was_fused_before_a_restart_is_served_behind_it(
    vllm: Any, served: Index, oracle: KVEngine
) -> None:
    prompt = make_prompt(4, 0, 2)
    store = ArtefactStore(served)
    name = store.put(oracle.fuse(prompt, policy="boundary"))
    store.close()
    requests = (RequestParams(artefact=name), RequestParams(policy="none"))
    ids = {"prompt_token_ids": list(oracle.prompt_ids(prompt))}
    for _ in range(2):
        with running(vllm, served) as llm:
            # The worker that goes is one with a prompt under way.
            llm.llm_engine.add_request("left behind", ids, sampling(requests[1]))
            llm.llm_engine.step()
        with running(vllm, served) as llm:
            artefact, policy = (
                llm.generate(ids, sampling(request), use_tqdm=False)[0] for request in requests
            )
            assert reused(artefact)["num_loaded"] == name.num_tokens
            assert_same(given(artefact), expected(oracle, prompt, "boundary"))
            assert_same(given(policy), expected(oracle, prompt, "none"))
