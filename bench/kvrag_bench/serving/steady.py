"""Many queries, each with documents in a new order: hits, speed and memory stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import median

from kvrag_bench.memory import resident_bytes
from kvrag_bench.serving.served import Served, ServingOptions, novel_orders

_SAMPLE = 100


@dataclass(frozen=True)
class SteadyRow:
    """A long run.

    Attributes
    ----------
    num_queries
        Queries.
    hit_rate
        Share of the prompts' document tokens, after the first pass over the documents, that came
        from the store.
    first_seconds, last_seconds
        Median time to first token of the first 100 queries after that pass, and of the last 100.
    drift
        How much longer the last 100 took than the first 100, as a share. Each query's time is
        divided by that of a short prompt that vLLM computed right after it: machines drift as well.
    resident_bytes, growth
        Resident memory at the end, and its growth as a share since the first 200 queries.
    """

    num_queries: int
    hit_rate: float
    first_seconds: float
    last_seconds: float
    drift: float
    resident_bytes: int
    growth: float


def measure_steady(
    served: Served, options: ServingOptions, say: Callable[[str], None]
) -> SteadyRow:
    """Return the figures of the run; nothing the engine caches is forgotten on the way."""
    texts = served.add(options.num_documents, options.document_tokens, "steady")
    orders = islice(
        novel_orders(options.num_documents, options.documents_each, seed=11),
        options.steady_queries,
    )
    # The caches fill first, the engine's own among them: what they take is given, not growth.
    first = options.num_documents
    seconds: list[float] = []
    relative: list[float] = []
    num_hits = num_wanted = 0
    warm_bytes = 0
    for number, order in enumerate(orders):
        say(f"query {number + 1} of {options.steady_queries}")
        prompt = served.prompt([texts[document] for document in order], number)
        answer = served.ask(prompt, "none", is_fresh=False)
        seconds.append(answer.ttft_seconds)
        beside = served.ask(served.prompt([], 10_000 + number), None, is_fresh=False)
        relative.append(answer.ttft_seconds / beside.ttft_seconds)
        if number >= first:
            num_hits += min(
                answer.usage.cached_tokens, options.documents_each * options.document_tokens
            )
            num_wanted += options.documents_each * options.document_tokens
        if number == 2 * _SAMPLE:
            warm_bytes = resident_bytes()
    last_bytes = resident_bytes()
    early, late = slice(first, first + _SAMPLE), slice(-_SAMPLE, None)
    return SteadyRow(
        num_queries=options.steady_queries,
        hit_rate=num_hits / num_wanted,
        first_seconds=median(seconds[early]),
        last_seconds=median(seconds[late]),
        drift=median(relative[late]) / median(relative[early]) - 1.0,
        resident_bytes=last_bytes,
        growth=last_bytes / warm_bytes - 1.0,
    )
