"""What vLLM must answer: Transformers going on from the same fused cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrag.engine.engine import KVEngine
from kvrag.llms.vllm.settings import RequestParams
from tests.support.models import VOCAB_SIZE

TOLERANCE = 1e-4
NUM_TOKENS = 6


@dataclass(frozen=True)
class Given:
    """An answer: its tokens, and the log-probabilities ``[n, vocabulary]`` they were chosen by."""

    tokens: list[int]
    logprobs: torch.Tensor


def sampling(
    request: RequestParams | None = None, num_tokens: int = NUM_TOKENS, **more: Any
) -> Any:
    """Return vLLM's parameters for a greedy answer of so many tokens."""
    from vllm import SamplingParams

    extra = {} if request is None else {"extra_args": {"kv_transfer_params": request.to_params()}}
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=VOCAB_SIZE,
        **extra,
        **more,
    )


def ask(llm: Any, oracle: KVEngine, prompt: str, request: RequestParams | None = None) -> Any:
    """Return vLLM's output for a prompt."""
    ids = list(oracle.prompt_ids(prompt))
    return llm.generate({"prompt_token_ids": ids}, sampling(request), use_tqdm=False)[0]


def given(output: Any) -> Given:
    """Return what vLLM answered."""
    completion = output.outputs[0]
    rows = [[row[token].logprob for token in range(VOCAB_SIZE)] for row in completion.logprobs]
    return Given(list(completion.token_ids), torch.tensor(rows))


def reused(output: Any) -> dict[str, Any]:
    """Return what kvrag says of a request."""
    said: dict[str, Any] = output.kv_transfer_params["kvrag"]
    return said


def expected(
    engine: KVEngine, prompt: str, policy: str | None = None, num_tokens: int = NUM_TOKENS
) -> Given:
    """Return what Transformers answers: from the fused prompt, or plainly without a policy."""
    hf: Any = engine.index.model.hf
    if policy is None:
        arguments = {"input_ids": torch.tensor([engine.prompt_ids(prompt)])}
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    else:
        fused = engine.fuse(prompt, policy=policy, max_tokens=num_tokens)
        arguments = fused.to_generate()
    with torch.no_grad():
        output = hf.generate(
            **arguments,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens = output.sequences[0, -num_tokens:].tolist()
    return Given(tokens, torch.log_softmax(torch.stack(output.scores)[:, 0], -1))


def assert_same(found: Given, wanted: Given) -> None:
    """Assert that two answers are the same, up to rounding."""
    assert found.tokens == wanted.tokens
    assert (found.logprobs - wanted.logprobs).abs().max().item() <= TOLERANCE
