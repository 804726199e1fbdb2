"""Documents in random order: vLLM's prefix caching, which hits little, against fused prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import mean

from kvrag_bench.serving.served import Served, ServingOptions, novel_orders


@dataclass(frozen=True)
class ShuffledRow:
    """One way of answering the workload.

    Attributes
    ----------
    way
        ``prefix caching``, or the policy.
    mean_seconds
        Time to first token.
    hit_rate
        Prompt tokens that were not computed, over all.
    speedup
        Mean time with prefix caching over this one.
    """

    way: str
    mean_seconds: float
    hit_rate: float
    speedup: float


def measure_shuffled(
    served: Served, options: ServingOptions, say: Callable[[str], None]
) -> Iterator[ShuffledRow]:
    """Yield a row per way; each keeps what the engine caches from query to query."""
    texts = served.add(options.num_documents, options.document_tokens, "shuffled")
    orders = islice(
        novel_orders(options.num_documents, options.documents_each, seed=7),
        options.shuffled_queries,
    )
    prompts = [
        served.prompt([texts[document] for document in order], number)
        for number, order in enumerate(orders)
    ]
    with_prefix_caching = 0.0
    for policy in (None, "none", "two_stage:ratio=0.15"):
        way = policy or "prefix caching"
        served.ask(prompts[0], policy)
        served.transport.forget()
        seconds, num_cached, num_tokens = [], 0, 0
        for number, prompt in enumerate(prompts):
            say(f"{way}, query {number + 1} of {len(prompts)}")
            answer = served.ask(prompt, policy, is_fresh=False)
            seconds.append(answer.ttft_seconds)
            num_tokens += answer.usage.prompt_tokens
            num_cached += (
                served.transport.num_cached if policy is None else answer.usage.cached_tokens
            )
        if policy is None:
            with_prefix_caching = mean(seconds)
        yield ShuffledRow(
            way, mean(seconds), num_cached / num_tokens, with_prefix_caching / mean(seconds)
        )
