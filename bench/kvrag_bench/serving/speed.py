"""Time to first token against vLLM's own prefill of the same prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from kvrag.engine.answer import Answer
from kvrag_bench.serving.served import Served, ServingOptions

POLICIES = (
    "none",
    "two_stage:ratio=0.15",
    "deviation:ratio=0.15",
    "boundary:ratio=0.15",
)


@dataclass(frozen=True)
class SpeedRow:
    """One policy on prompts of one length.

    Attributes
    ----------
    plain_seconds, seconds
        Time to first token, from the prompt's text on: computed by vLLM, and fused, medians.
    fuse_seconds
        Part of `seconds` spent on loading and fusing.
    speedup
        Median over the rounds of the ratio of both.
    cpu_speedup
        The same for their processor time, which other programs on the machine do not lengthen; None
        if other processes compute.
    """

    policy: str
    context_tokens: int
    plain_seconds: float
    seconds: float
    fuse_seconds: float
    speedup: float
    cpu_speedup: float | None


def measure_speed(
    served: Served, options: ServingOptions, say: Callable[[str], None]
) -> Iterator[SpeedRow]:
    """Yield a row per length and policy; plain and fused prompts take turns."""
    for context_tokens in options.context_tokens:
        say(f"indexing {context_tokens} tokens")
        texts = served.add(
            options.num_chunks, context_tokens // options.num_chunks, f"speed-{context_tokens}"
        )
        prompt = served.prompt(texts)
        rounds = []
        for number in range(options.repeats + 1):
            say(f"{context_tokens} tokens, round {number}")
            rounds.append(
                (_timed(served, prompt, None), [_timed(served, prompt, one) for one in POLICIES])
            )
        timed = rounds[1:]
        for place, policy in enumerate(POLICIES):
            answers = [fused[place][0] for _, fused in timed]
            yield SpeedRow(
                policy=policy,
                context_tokens=context_tokens,
                plain_seconds=median(plain[0].ttft_seconds for plain, _ in timed),
                seconds=median(answer.ttft_seconds for answer in answers),
                fuse_seconds=median(sum(answer.report.seconds.values()) for answer in answers),
                speedup=median(
                    plain[0].ttft_seconds / fused[place][0].ttft_seconds for plain, fused in timed
                ),
                cpu_speedup=median(plain[1] / fused[place][1] for plain, fused in timed)
                if options.workers == 1
                else None,
            )


def _timed(served: Served, prompt: str, policy: str | None) -> tuple[Answer, float]:
    """Return an answer, and the processor time that this process took for it."""
    served.transport.forget()
    started = time.process_time()
    answer = served.ask(prompt, policy, is_fresh=False)
    return answer, time.process_time() - started
