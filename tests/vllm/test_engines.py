"""Other set-ups of the engine: little memory, borrowed weights, other models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.errors import EngineError
from kvrag.ingest.index import Index
from kvrag.llms.vllm.settings import RequestParams
from tests.support.rag import save_model, text_index
from tests.vllm.conftest import TEXTS, make_prompt, running
from tests.vllm.reference import assert_same, expected, given, reused, sampling


def _prompts(oracle: KVEngine, *prompts: str) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(oracle.prompt_ids(prompt))} for prompt in prompts]


def test_preempted_requests_are_loaded_again(vllm: Any, served: Index, oracle: KVEngine) -> None:
    prompts = [make_prompt(*order) for order in ((0, 1), (2, 3))]
    longest = max(len(oracle.prompt_ids(prompt)) for prompt in prompts)
    # Room for all prompts, and not for what they answer.
    num_blocks = 2 * -(-longest // 32) + 3
    with running(
        vllm,
        served,
        num_gpu_blocks_override=num_blocks,
        max_model_len=longest + 152,
        enable_prefix_caching=False,
        disable_log_stats=False,
    ) as llm:
        num_tokens = 150
        preempted: list[str] = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = noted
        outputs = llm.generate(
            _prompts(oracle, *prompts),
            sampling(RequestParams(policy="none"), num_tokens=num_tokens),
            use_tqdm=False,
        )
        assert preempted
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_same(given(output), expected(oracle, prompt, "none", num_tokens))


def test_fusing_borrows_the_engines_weights(
    vllm: Any, served: Index, oracle: KVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import _custom_ops

    # The CPU build drops the weights it has repacked for oneDNN, and keeps those for torch's own.
    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    with running(vllm, served) as llm:
        theirs = {
            one.untyped_storage().data_ptr()
            for one in llm.apply_model(lambda model: list(model.parameters()))[0]
        }
        connector = _connector()
        fusing = connector._worker_side._engine.index.model.hf
        assert all(one.untyped_storage().data_ptr() in theirs for one in fusing.parameters())
        for policy in ("none", "two_stage"):
            prompt = make_prompt(3, 1, 7)
            (output,) = llm.generate(
                _prompts(oracle, prompt), sampling(RequestParams(policy=policy)), use_tqdm=False
            )
            assert reused(output)["num_loaded"] > 0
            assert_same(given(output), expected(oracle, prompt, policy))
        _assert_refuses_another(llm)


def _assert_refuses_another(llm: Any) -> None:
    """vLLM hands a second engine of one process the first one's connector."""
    connector = _connector()
    scheduler_side = llm.llm_engine.engine_core.engine_core.scheduler.connector
    step = scheduler_side.build_connector_meta(_Nothing())
    step.engine_id = "another"
    connector.bind_connector_metadata(step)
    with pytest.raises(EngineError, match="another engine"):
        connector.start_load_kv(None)
    connector.clear_connector_metadata()


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


class _Nothing:
    total_num_scheduled_tokens = 0


@pytest.mark.parametrize("family", ["qwen3", "mistral-sliding"])
def test_other_families(vllm: Any, tmp_path: Path, family: str) -> None:
    overrides = {} if family == "qwen3" else {"head_dim": 32}
    save_model(tmp_path / "model", family, **overrides)
    with text_index(tmp_path / "index", tmp_path / "model", TEXTS[:4]) as index:
        engine = KVEngine(index, links="off")
        with running(vllm, index) as llm:
            prompt = make_prompt(3, 1)
            for policy in ("none", "deviation"):
                (output,) = llm.generate(
                    _prompts(engine, prompt),
                    sampling(RequestParams(policy=policy)),
                    use_tqdm=False,
                )
                assert reused(output)["num_loaded"] > 0
                assert_same(given(output), expected(engine, prompt, policy))


def test_a_failed_load_leaves_the_rest_of_a_windowed_models_batch_alone(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks behind the window are one shared block, which is nobody's to call damaged."""
    save_model(tmp_path / "model", "mistral-sliding", head_dim=32)
    with text_index(tmp_path / "index", tmp_path / "model", TEXTS[:4]) as index:
        engine = KVEngine(index, links="off")
        prompts = [make_prompt(2, 0), make_prompt(3, 1)]
        wanted = [expected(engine, prompt, num_tokens=40) for prompt in prompts]
        with running(vllm, index) as llm:
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler

            def fail(*args: Any, **kwargs: Any) -> None:
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    if any(one.num_output_tokens > 3 for one in list(scheduler.running)):
                        break  # the other one is being answered
                    time.sleep(0.002)
                raise MemoryError("no room")

            monkeypatch.setattr(KVEngine, "fuse", fail)
            outputs = llm.generate(
                _prompts(engine, *prompts),
                [sampling(RequestParams(reuse=reuse), num_tokens=40) for reuse in (False, True)],
                use_tqdm=False,
            )
            assert "no room" in reused(outputs[1])["computed_because"]
            for output, one in zip(outputs, wanted, strict=True):
                assert_same(given(output), one)
