"""How long a batch waits while another prompt is fused, or computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from kvrag.engine.prompt_reader import PromptReader
from kvrag.llms.vllm.settings import RequestParams
from kvrag.llms.vllm.transports import EngineRequest
from kvrag_bench.serving.served import Served, ServingOptions

_DECODED = 60
_ASK_AT = 15


@dataclass(frozen=True)
class StallRow:
    """One way of bringing a prompt while an answer is being decoded.

    Attributes
    ----------
    way
        ``plain``, ``question`` (a plain prompt of the question alone, which any request has vLLM
        compute), or the policy.
    step_seconds
        Median time between two tokens of the answer while nothing else ran.
    longest_seconds
        The longest time between two tokens while the prompt was brought.
    over_step
        Of both.
    seconds
        Time to first token of the prompt that was brought.
    """

    way: str
    step_seconds: float
    longest_seconds: float
    over_step: float
    seconds: float


def measure_stall(
    served: Served, options: ServingOptions, say: Callable[[str], None]
) -> Iterator[StallRow]:
    """Yield a row per way."""
    num_tokens = options.context_tokens[0]
    texts = served.add(options.num_chunks, num_tokens // options.num_chunks, "stall")
    prompt = served.prompt(texts)
    ways = (
        ("plain", prompt, None),
        ("question", served.prompt([], 2), None),
        ("none", prompt, "none"),
        ("two_stage:ratio=0.15", prompt, "two_stage:ratio=0.15"),
    )
    for way, brought, policy in ways:
        say(f"{way} beside an answer")
        served.ask(brought, policy)
        served.transport.forget()
        yield _stall(served, way, brought, policy)


def _stall(served: Served, way: str, prompt: str, policy: str | None) -> StallRow:
    short = PromptReader(served.index).token_ids(served.prompt([], 1))
    plain = RequestParams(reuse=False).to_params()
    seconds: list[float] = []
    asking = threading.Thread(
        target=lambda: seconds.append(served.ask(prompt, policy, is_fresh=False).ttft_seconds),
        name="kvrag-ask",
    )
    gaps: list[float] = []
    last = time.perf_counter()
    began = ended = 0
    decoded = served.transport.stream(
        EngineRequest(short, plain, max_tokens=100 * _DECODED, ignore_end=True)
    )
    for number, _ in enumerate(decoded):
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if number == _ASK_AT:
            began = number + 1
            asking.start()
        if began and not ended and not asking.is_alive():
            ended = number + 1
        if ended and number > ended + _DECODED:
            break
    decoded.close()
    asking.join()
    quiet = median([*gaps[2:began], *gaps[ended:]])
    longest = max(gaps[began:ended])
    return StallRow(way, quiet, longest, longest / quiet, seconds[0])
