"""`kvrag bench ttft`: time to first token against plain Transformers, in one run.

The whole path is timed, from the prompt's text to the first token's id, over an index on disk;
plain Transformers' from the prompt's ids, and from its text, too.
Figures of different runs are not comparable: machines differ and drift; the ratios are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from kvrag.codec.names import RAW
from kvrag.engine.answer import Answer
from kvrag.engine.engine import KVEngine
from kvrag.engine.prices import SWITCH, Prices
from kvrag.errors import ParameterError
from kvrag.fusion.controller import make_choice, takes_ratio
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.ingest.contexts import parse_context
from kvrag.models.kv_model import KVModel
from kvrag_bench.floor import FloorMeter
from kvrag_bench.memory import peak_bytes
from kvrag_bench.setting import require_room, room_in, temporary_index
from kvrag_bench.shapes import chosen_model, random_text
from kvrag_bench.work import operations_needed, operations_spent


@dataclass(frozen=True)
class TTFTOptions:
    """What to measure.

    Attributes
    ----------
    model
        A model folder or name; None takes random weights of `shape`.
    shape
        A name in `kvrag_bench.shapes.SHAPES`.
    num_chunks
        Chunks in the prompt.
    chunk_tokens
        Tokens a chunk; one prompt for each value.
    question_tokens
        Tokens of the question, which are always computed.
    policies
        Policies to time.
    ratio
        Share that policies with a ratio recompute.
    repeats
        Timed runs of everything in turn, of which the median is reported; one more runs first and
        does not count.
    contexts
        What chunks are encoded after (`kvrag.ingest.contexts`), a row for each; None takes the
        default of new indexes.
    compute
        What kvrag's linear layers compute in (`KVModel.load`). Full prefill stays in the type of
        the weights.
    device
        Where the model runs, such as ``"cuda"``; None means the CPU.
    never_slower
        Measure prices first, and let the engine compute prompts as a whole by them.
    codec
        What the chunks are stored with.
    memory
        Where earlier runs leave the chunks' KV on a card: one of `kvrag_bench.setting.MEMORIES`.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_chunks: int = 10
    chunk_tokens: Sequence[int] = (100, 250, 500)
    question_tokens: int = 30
    policies: Sequence[str] = ("none", DEFAULT_POLICY)
    ratio: float = 0.15
    repeats: int = 3
    contexts: Sequence[str | None] = (None,)
    compute: str | None = None
    device: str | None = None
    never_slower: bool = False
    codec: str = RAW
    memory: str = "none"

    def __post_init__(self) -> None:
        counts = (self.num_chunks, self.question_tokens, self.repeats, *self.chunk_tokens)
        if not self.chunk_tokens or not self.policies or not self.contexts or min(counts) < 1:
            raise ParameterError(
                "bench ttft: chunks, tokens and repeats must be 1 or more, and at least one chunk "
                "length, one policy and one context must be given"
            )
        room_in(self.memory)
        for policy in self.policies:
            make_choice(policy)
        for context in self.contexts:
            if context is not None:
                parse_context(context)


@dataclass(frozen=True)
class TTFTRow:
    """One policy on one prompt, over chunks encoded after one context.

    Attributes
    ----------
    plain_ttft_seconds, ttft_seconds
        Medians of plain Transformers, from the prompt's ids on, and of kvrag, from its text on.
    plain_text_seconds
        Plain Transformers from the prompt's text on: from its ids, and what tokenising takes.
    speedup, prefill_speedup
        Plain Transformers' seconds over those of kvrag, with and without reuse, in the same round;
        the medians. So they are not the ratios of the medians above.
    prefill_rate
        The floor (`FloorMeter`) of that prefill without reuse over its time: 1 if all of it ran at
        the rate of the model's own matrices.
    outpriced_tokens
        Stored tokens that were computed, since full prefill was expected to be faster.
    compute
        What kvrag's linear layers compute in.
    floor_seconds, floor_ratio
        The least it could take here (`FloorMeter`), and `ttft_seconds` over it.
    peak_bytes
        Rise of resident memory during one query, with the model already loaded.
    kv_bytes
        Bytes of the prompt's fused KV, to hold `peak_bytes` against.
    select_share
        Share of `ttft_seconds` spent on choosing: observing the question, and comparing.
    work_ratio
        Multiplications carried out over those that fresh and chosen tokens need
        (`kvrag_bench.work`).
    """

    model: str
    context: str
    policy: str
    ratio: float | None
    num_chunks: int
    chunk_tokens: int
    context_tokens: int
    plain_ttft_seconds: float
    plain_text_seconds: float
    ttft_seconds: float
    speedup: float
    floor_seconds: float
    floor_ratio: float
    peak_bytes: int
    kv_bytes: int
    select_share: float
    work_ratio: float
    prefill_speedup: float
    prefill_rate: float
    outpriced_tokens: int
    compute: str


def run_ttft_bench(
    options: TTFTOptions, on_progress: Callable[[str], None] | None = None
) -> Iterator[TTFTRow]:
    """Yield one row per chunk length, policy and context: all of a length after its last run.

    After an interrupt, those follow that finished runs tell.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        Before anything is timed.
    """
    say = on_progress or (lambda _: None)
    say("loading the model")
    model = chosen_model(options.model, options.shape, options.device)
    model = KVModel.load(model, compute=options.compute)
    longest = options.num_chunks * (max(options.chunk_tokens) + 2) + options.question_tokens + 2
    require_room(model, longest, "fewer or shorter chunks")
    meter = FloorMeter(model)
    if options.never_slower:
        say("measuring prices")
        os.environ.pop(SWITCH, None)
        Prices(model.fingerprint).measure(model)
    for chunk_tokens in options.chunk_tokens:
        yield from _rows(model, options, chunk_tokens, meter, say)


def _rows(
    model: KVModel,
    options: TTFTOptions,
    chunk_tokens: int,
    meter: FloorMeter,
    say: Callable[[str], None],
) -> Iterator[TTFTRow]:
    say(f"indexing {options.num_chunks} chunks of {chunk_tokens} tokens")
    texts = [
        random_text(model, chunk_tokens, seed=chunk_tokens * 1000 + i)
        for i in range(options.num_chunks)
    ]
    with ExitStack() as stack:
        indexes = [
            stack.enter_context(
                temporary_index(model, texts, chunk_tokens, context=context, codec=options.codec)
            )
            for context in options.contexts
        ]
        question = random_text(model, options.question_tokens, seed=chunk_tokens)
        prompt = "\n\n".join([*texts, question])
        engines = [
            KVEngine(
                index,
                session_bytes=0,
                never_slower=options.never_slower,
                **room_in(options.memory),
            )
            for index in indexes
        ]
        asked = [_Asked(e, prompt, p, options) for p in options.policies for e in engines]
        rounds: list[_Round] = []
        for i in range(options.repeats + 1):
            say(f"{chunk_tokens * len(texts)} tokens, run {i + 1} of {options.repeats + 1}")
            try:
                rounds.append(_Round.of(engines[0], prompt, asked))
                # What the first round lacked is captured before the others, not beside them.
                model.capture_rows()
            except KeyboardInterrupt:
                if len(rounds) < 2:
                    raise
                break
        own = meter.measure(rounds[-1].own.report)
        for place, one in enumerate(asked):
            say(f"memory and operations of {one.policy}")
            yield _row(one, rounds[1:], place, own.seconds, chunk_tokens, meter)
        if len(rounds) <= options.repeats:
            raise KeyboardInterrupt


class _Asked(NamedTuple):
    """A prompt under one policy, over chunks encoded after one context."""

    engine: KVEngine
    prompt: str
    policy: str
    options: TTFTOptions

    @property
    def ratio(self) -> float | None:
        return self.options.ratio if takes_ratio(self.policy) else None

    def answer(self) -> Answer:
        return self.engine.generate(self.prompt, policy=self.policy, ratio=self.ratio, max_tokens=1)

    def fuse(self) -> FusedPrompt:
        return self.engine.fuse(self.prompt, policy=self.policy, ratio=self.ratio)


class _Round(NamedTuple):
    """Everything once, in turn: a busy minute of the machine slows all of it.

    Plain Transformers' seconds, those of tokenising, kvrag's answer without reuse, and one for each
    policy and context.
    """

    plain: float
    tokenising: float
    own: Answer
    answers: Sequence[Answer]

    @classmethod
    def of(cls, engine: KVEngine, prompt: str, asked: Sequence[_Asked]) -> _Round:
        return cls(
            engine.plain_ttft_seconds(prompt),
            _tokenising_seconds(engine, prompt),
            engine.generate(prompt, reuse=False, max_tokens=1),
            [one.answer() for one in asked],
        )


def _row(
    asked: _Asked,
    rounds: Sequence[_Round],
    place: int,
    own_floor: float,
    chunk_tokens: int,
    meter: FloorMeter,
) -> TTFTRow:
    index, options = asked.engine.index, asked.options
    answers = [one.answers[place] for one in rounds]
    # Another engine for memory than for time: an engine keeps the buffer of its last prompt.
    peak = peak_bytes(asked._replace(engine=KVEngine(index, session_bytes=0)).answer)
    fused: list[FusedPrompt] = []
    spent = operations_spent(lambda: fused.append(asked.fuse()))
    report = answers[-1].report
    ttft = median(given.ttft_seconds for given in answers)
    floor = meter.measure(report).seconds
    return TTFTRow(
        model=index.model.name,
        context=str(index.config.chunk_context),
        policy=asked.policy,
        ratio=asked.ratio,
        num_chunks=options.num_chunks,
        chunk_tokens=chunk_tokens,
        context_tokens=report.num_tokens - options.question_tokens,
        plain_ttft_seconds=median(one.plain for one in rounds),
        plain_text_seconds=median(one.plain + one.tokenising for one in rounds),
        ttft_seconds=ttft,
        speedup=median(one.plain / one.answers[place].ttft_seconds for one in rounds),
        floor_seconds=floor,
        floor_ratio=ttft / floor,
        peak_bytes=peak,
        kv_bytes=report.num_tokens * index.model.spec.bytes_per_token,
        select_share=median(_select_seconds(given) / given.ttft_seconds for given in answers),
        work_ratio=spent / operations_needed(index.model, fused[0]),
        prefill_speedup=median(one.plain / one.own.ttft_seconds for one in rounds),
        prefill_rate=own_floor / median(one.own.ttft_seconds for one in rounds),
        outpriced_tokens=report.num_outpriced,
        compute=report.compute,
    )


def _tokenising_seconds(engine: KVEngine, prompt: str) -> float:
    """Return the seconds from a prompt's text to its ids, where the model is."""
    started = time.perf_counter()
    torch.tensor([engine.prompt_ids(prompt)], device=engine.index.model.device)
    return time.perf_counter() - started


def _select_seconds(given: Answer) -> float:
    seconds = given.report.seconds
    return seconds.get("ask", 0.0) + seconds["select"]
