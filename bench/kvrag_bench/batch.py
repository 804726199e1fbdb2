"""`kvrag bench batch`: prompts answered together, against the same prompts one after the other.

Both ways answer the same prompts over one index, in turn, in one run. The way in which requests
arrive is the hardest for inter-token gaps: all at once, so each prompt is fused while those before
it are being answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.errors import ParameterError
from kvrag_bench.setting import chosen_clock, require_one_thread, require_room, temporary_index
from kvrag_bench.shapes import chosen_model, random_text

_CHUNK_TOKENS = 200
_QUESTION_TOKENS = 30


@dataclass(frozen=True)
class BatchOptions:
    """What to measure.

    Attributes
    ----------
    model
        A model folder or name; None takes random weights of `shape`.
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    policies
        Policies, each measured separately.
    device
        Where the model runs, such as ``"cuda"``; None means the CPU.
    num_prompts
        How many prompts are answered together, each measured separately.
    num_chunks
        Chunks of 200 tokens in each prompt, from twice as many in all, in another order each.
    num_tokens
        Tokens of each answer.
    repeats
        Runs of each way, of which the median is reported; one more runs first and does not count.
    processor_time
        Whether to count the process's processor time instead of the clock's, with one thread: on a
        machine that others use too.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    device: str | None = None
    policies: tuple[str, ...] = ("none", "two_stage")
    num_prompts: Sequence[int] = (8,)
    num_chunks: int = 10
    num_tokens: int = 64
    repeats: int = 3
    processor_time: bool = False

    def __post_init__(self) -> None:
        if min(*self.num_prompts, self.num_chunks, self.num_tokens, self.repeats) < 1:
            raise ParameterError(
                "bench batch: prompts, chunks, tokens and repeats must be 1 or more"
            )
        if self.processor_time:
            require_one_thread("batch")


@dataclass(frozen=True)
class BatchRow:
    """One policy, with one number of prompts.

    Attributes
    ----------
    num_tokens
        Tokens of an answer, on average: the model may end one early.
    alone_seconds, together_seconds
        Medians: all prompts one after the other, and together.
    speedup
        Their ratio.
    cost
        Time of all prompts together, in times of one of them alone.
    median_gap, longest_gap
        Seconds between two tokens of an answer while others join: the median over all answers, and
        the longest in the median run; None if answers have fewer than three tokens.
    gap_ratio
        Their ratio.
    same
        Share of answers that are the same in both ways, as text.
    """

    model: str
    policy: str
    num_prompts: int
    num_prompt_tokens: int
    num_tokens: int
    num_threads: int
    alone_seconds: float
    together_seconds: float
    speedup: float
    cost: float
    median_gap: float | None
    longest_gap: float | None
    gap_ratio: float | None
    same: float


def run_batch_bench(options: BatchOptions) -> Iterator[BatchRow]:
    """Yield a row for each policy and number of prompts.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        Before anything is timed.
    """
    model = chosen_model(options.model, options.shape, options.device)
    needed = options.num_chunks * (_CHUNK_TOKENS + 2) + _QUESTION_TOKENS + options.num_tokens + 2
    require_room(model, needed, "fewer chunks")
    num_texts = 2 * options.num_chunks
    texts = [random_text(model, _CHUNK_TOKENS, seed=i) for i in range(num_texts)]
    prompts, most = [], max(options.num_prompts)
    for number in range(most):
        order = torch.randperm(num_texts, generator=torch.Generator().manual_seed(number))
        question = random_text(model, _QUESTION_TOKENS, seed=num_texts + number)
        prompts.append("\n\n".join([*(texts[i] for i in order[: options.num_chunks]), question]))
    with temporary_index(model, texts, _CHUNK_TOKENS) as index:
        engine = KVEngine(
            index,
            max_batch=most,
            max_tokens=options.num_tokens,
            load_threads=0 if options.processor_time else None,
            session_bytes=0,
        )
        for policy in options.policies:
            for number in options.num_prompts:
                yield _measure(engine, prompts[:number], policy, options)


def _measure(
    engine: KVEngine, prompts: Sequence[str], policy: str, options: BatchOptions
) -> BatchRow:
    requests = [Request(prompt, policy=policy) for prompt in prompts]
    clock = chosen_clock(options.processor_time)
    alone, together, ratios, medians = [], [], [], []
    answers: list[list[str]] = [[], []]
    for _ in range(options.repeats + 1):
        started = clock()
        answers[0] = [engine.generate(request).text for request in requests]
        alone.append(clock() - started)
        started = clock()
        batch = engine.generate_batch(requests)
        together.append(clock() - started)
        answers[1] = [answer.text for answer in batch]
        if gaps := _gaps(engine, requests, clock) if options.num_tokens > 2 else []:
            medians.append(median(gaps))
            ratios.append(max(gaps) / medians[-1])
        # What the first run lacked is captured before the others, not beside them.
        engine.index.model.capture_rows()
    usual, longest = (median(runs[1:]) if runs else None for runs in (medians, ratios))
    seconds = [median(runs[1:]) for runs in (alone, together)]
    same = sum(a == b for a, b in zip(*answers, strict=True)) / len(requests)
    return BatchRow(
        model=engine.index.model.name,
        policy=policy,
        num_prompts=len(requests),
        num_prompt_tokens=len(engine.prompt_ids(prompts[0])),
        num_tokens=sum(answer.usage.completion_tokens for answer in batch) // len(batch),
        num_threads=torch.get_num_threads(),
        alone_seconds=seconds[0],
        together_seconds=seconds[1],
        speedup=seconds[0] / seconds[1],
        cost=seconds[1] / (seconds[0] / len(requests)),
        median_gap=usual,
        longest_gap=usual and longest and usual * longest,
        gap_ratio=longest,
        same=same,
    )


def _gaps(engine: KVEngine, requests: Sequence[Request], clock: Callable[[], float]) -> list[float]:
    """Return the seconds between pieces of all answers, each read by another thread."""
    times: list[list[float]] = [[] for _ in requests]

    def read(number: int) -> None:
        for _ in engine.stream(requests[number]):
            times[number].append(clock())

    threads = [threading.Thread(target=read, args=[number]) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The last piece follows at once.
    return [after - before for one in times for before, after in pairwise(one[:-1])]
