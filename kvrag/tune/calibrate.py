"""Measures what each policy loses and costs with one model, for ``auto`` (`kvrag calibrate`).

Intervals are by bootstrap.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt
import torch

from kvrag.engine.asking import Asking
from kvrag.engine.engine import KVEngine
from kvrag.engine.prices import Prices, is_off
from kvrag.engine.request import Request
from kvrag.engine.text_stream import end_ids
from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.fusion.controller import Calibration, Cost, LoadingController, Measured, takes_ratio
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import PromptRows, check_ratio
from kvrag.fusion.repair import make_repair
from kvrag.fusion.runs import MIN_RUN
from kvrag.ingest.index import Index
from kvrag.loading.cost import StoredRows
from kvrag.loading.pace import fit_prices
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.tokens import encode
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.tune.stores import measure_loading, require_kv

FloatArray = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000


def mean_interval(
    values: Sequence[float], *, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean.

    Parameters
    ----------
    values
        One value for each question. For a paired comparison, pass the differences between two
        answers to the same question, so that the question's difficulty cancels out.
    seed
        The seed; the same seed and values give the same interval.
    confidence
        Share of resampled means inside the interval.
    """
    return interval(resampled_means(values, seed), confidence)


def resampled_means(values: Sequence[float], seed: int) -> FloatArray:
    """Return the means of `NUM_RESAMPLES` draws of the values; the same seed draws the same."""
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    # Resampled in parts: 2,000 times 10,000 questions at once would take 160 MB.
    rows_at_once = max(1, 1_000_000 // len(sample))
    return np.concatenate(
        [
            sample[generator.integers(len(sample), size=(count, len(sample)))].mean(axis=1)
            for count in np.diff([*range(0, NUM_RESAMPLES, rows_at_once), NUM_RESAMPLES])
        ]
    )


def interval(means: FloatArray, confidence: float) -> tuple[float, float]:
    """Return the middle share of resampled means, as its ends."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


POLICIES = ("none", "boundary", "deviation", "query", "query:shift=1", "two_stage")
RATIOS = (0.05, 0.1, 0.15, 0.3)

_MAX_QUERY_WORDS = 24
# What a usual question takes, with the template's words around it.
_QUESTION_TOKENS = 64
# As many are asked however long that takes.
_LEAST_QUESTIONS = 8
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of a calibration.

    Attributes
    ----------
    num_questions
        The most questions.
    seconds
        After this time, no further question is asked, if at least eight were.
    num_chunks
        Number of chunks in a prompt.
    max_tokens
        The largest number of tokens in an answer.
    policies, ratios
        The policies and ratios to measure: each policy at each ratio, if it takes one.
    use_chat_template
        Ask through the model's chat template if it has one.
    """

    num_questions: int = 200
    seconds: float = 300.0
    num_chunks: int = 5
    max_tokens: int = 16
    policies: Sequence[str] = POLICIES
    ratios: Sequence[float] = RATIOS
    use_chat_template: bool = True


@dataclass
class _Tried:
    """One policy at one ratio, and what it has shown in the questions so far."""

    policy: str
    ratio: float | None
    losses: list[float] = field(default_factory=list)
    amounts: list[tuple[float, float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def measured(self) -> Measured:
        low, high = mean_interval(self.losses)
        # Rounding can put a mean of ones slightly above one.
        loss = min(1.0, max(0.0, fmean(self.losses)))
        return Measured(self.policy, self.ratio, loss, low, high)


def calibrate(
    index: Index,
    options: CalibrationOptions | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure the policies over an index, and loading from its store.

    The loss is in agreement: how often the likeliest token after full prefill's answer so far is
    full prefill's own, for questions that quote the index's chunks. This needs no reference
    answers.

    Raises
    ------
    ParameterError
        When the index is empty or stores no KV, a policy or ratio cannot be measured, or no prompt
        fits the model.
    """
    options = options or CalibrationOptions()
    require_kv(index)
    tried = _tried(options)
    questions = _quotations(index, options)
    asking = Asking(k=options.num_chunks, use_chat_template=options.use_chat_template)
    engine = KVEngine(index, links="off", session_bytes=0, never_slower=False)
    started, num_asked, too_long = time.monotonic(), 0, ""
    for number, question in enumerate(questions):
        if num_asked >= _LEAST_QUESTIONS and time.monotonic() - started > options.seconds:
            break
        on_progress(f"question {number + 1:,} of {len(questions):,}")
        request = asking.request(
            index, [{"role": "user", "content": question}], max_tokens=options.max_tokens
        )
        try:
            _ask(engine, request, tried)
        except PromptTooLongError as error:
            too_long = str(error)
            continue
        num_asked += 1
    if not num_asked:
        raise ParameterError(f"none of the prompts fits the model: {too_long}")
    if not is_off():
        on_progress("measuring prices")
        Prices(index.config.model_fingerprint).measure(index.model)
    amounts = [one for contestant in tried for one in contestant.amounts]
    seconds = [one for contestant in tried for one in contestant.seconds]
    return Calibration(
        model_fingerprint=index.model.fingerprint,
        data="the index's own chunks",
        measure="agreement",
        num_questions=num_asked,
        policies=tuple(one.measured() for one in tried),
        cost=Cost(*fit_prices(amounts, seconds)),
        loading=measure_loading(index, options.num_chunks, on_progress),
    )


def usual_choice(
    index: Index, calibration: Calibration, num_chunks: int
) -> list[tuple[Measured, float]]:
    """Return what ``auto`` takes for a prompt of chunks of the index's median length.

    Then, if there is one, the fastest policy that loses less. With each is how many times sooner
    than by full prefill the first token is expected. Empty if the index is.

    Parameters
    ----------
    num_chunks
        Chunks of the prompt; the first is exact.
    """
    lengths = sorted(index.catalog.stored.keys().values())
    if not lengths:
        return []
    length = lengths[len(lengths) // 2]
    starts = [number * length for number in range(1, max(2, num_chunks))]
    spans = tuple(ReusedSpan(str(start), start, 0, length) for start in starts)
    records = [StoredRows(str(start), (), length) for start in (0, *starts)]
    num_tokens = starts[-1] + length + _QUESTION_TOKENS
    prompt = PromptRows(num_tokens, index.model.spec.num_layers, spans)
    whole = calibration.cost.of(num_tokens * prompt.num_layers, 0)

    def speed(one: Measured) -> float:
        policy = one.make().policy
        found = calibration.estimate(policy, prompt, _QUESTION_TOKENS, records)
        return whole / max(found.seconds, 1e-6)  # a price may have come out as nothing

    controller = LoadingController(calibration=calibration)
    repair, _ = controller.choose(prompt, _QUESTION_TOKENS, records)
    chosen = next(one for one in calibration.policies if one.make() == repair)
    better = [one for one in calibration.policies if one.loss < chosen.loss]
    return [(one, speed(one)) for one in [chosen, *sorted(better, key=speed)[-1:]]]


def _tried(options: CalibrationOptions) -> list[_Tried]:
    """Return each policy at each ratio. Raises ParameterError."""
    for name in options.policies:
        if name.partition(":")[0] == LoadingController.name:
            raise ParameterError(
                "policy 'auto' cannot be measured: it chooses among the others; leave it out"
            )
        make_repair(name)
    for ratio in options.ratios:
        check_ratio(ratio)
    if not options.ratios and any(map(takes_ratio, options.policies)):
        raise ParameterError(
            "no ratio was given: give one, or choose policy 'none' or policies that name their "
            "budget ('query:ratio=0.1', 'boundary:tokens=8')"
        )
    return [
        _Tried(policy, ratio)
        for policy in options.policies
        for ratio in (options.ratios if takes_ratio(policy) else [None])
    ]


@torch.no_grad()
def _ask(engine: KVEngine, request: Request, tried: Sequence[_Tried]) -> None:
    """Note what each policy makes of a question. Raises PromptTooLongError."""
    model = engine.index.model
    engine.give_back(engine.fuse(replace(request, policy="none")))  # makes the first place's record
    whole = engine.fuse(replace(request, reuse=False))
    answer = _answer(model, whole, request.max_tokens or 1)
    engine.give_back(whole)
    for one in tried:
        fused = engine.fuse(replace(request, policy=one.policy, ratio=one.ratio))
        report = fused.report
        likeliest = [int(fused.logits.argmax()), *_feed(model, fused, answer[:-1], 0)]
        engine.give_back(fused)
        agrees = [given == wanted for given, wanted in zip(likeliest, answer, strict=True)]
        one.losses.append(1.0 - fmean(agrees))
        num_rows = sum(report.rows_by_layer) + report.rows_asked
        one.amounts.append((1.0, float(num_rows), float(report.num_cached)))
        one.seconds.append(sum(report.seconds.values()) - report.seconds["layout"])


def _answer(model: KVModel, fused: FusedPrompt, most: int) -> list[int]:
    """Return the greedy answer to a prompt, with the end token if there is one."""
    ends = end_ids(model.decoder.generation_config, model.tokenizer)
    most = min(most, model.max_positions - fused.layout.end_position)
    answer = [int(fused.logits.argmax())]
    while answer[-1] not in ends and len(answer) < most:
        answer += _feed(model, fused, answer[-1:], len(answer) - 1)
    return answer


def _feed(
    model: KVModel, fused: FusedPrompt, token_ids: Sequence[int], num_before: int
) -> list[int]:
    """Return the likeliest token after each of some, which follow the prompt and others."""
    if not token_ids:
        return []
    cache = FusedCache(fused.kv, fused.kv.num_tokens + num_before)
    fed = torch.tensor([list(token_ids)], device=model.device)
    with fused.answering(model):
        output = model.hf(input_ids=fed, **{CACHE_ARGUMENT: cache}, use_cache=True)
    likeliest: list[int] = output.logits[0].argmax(-1).tolist()
    return likeliest


def _quotations(index: Index, options: CalibrationOptions) -> list[str]:
    """Return questions that quote chunks from all over the index. Raises ParameterError."""
    texts: list[str] = []
    index.catalog.texts.each_text(lambda _, text: texts.append(text))
    if not texts:
        raise ParameterError(f"{index.path}: the index is empty, there is nothing to ask about")
    step = max(1, len(texts) // options.num_questions)
    chosen = texts[::step][: options.num_questions]
    quoted = filter(None, (_quotation(text, index) for text in chosen))
    questions = [f'What is said about "{quotation}"?' for quotation in quoted]
    if not questions:
        raise ParameterError(
            f"{index.path}: no chunk is longer than a word, so none can be quoted in part; keep "
            "the default policy"
        )
    return questions


def _quotation(text: str, index: Index) -> str:
    """Return words of a text's longest sentence that are not reused in a prompt; may be empty.

    A whole chunk in a question, or a long run of one, would come from the store, which real
    questions never do.
    """
    words = max(_SENTENCE_END.split(text), key=len).split()[:_MAX_QUERY_WORDS]
    while words:
        quotation = " ".join(words)
        (tokens,) = encode(index.tokenizer, [quotation], add_special_tokens=False)
        if len(tokens.token_ids) < MIN_RUN and not index.matcher.find(quotation):
            return quotation
        words.pop()
    return ""
