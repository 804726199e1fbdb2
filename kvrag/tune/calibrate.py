"""Measures what each policy loses and costs with one model, for ``auto`` (`kvrag calibrate`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvrag.errors import ParameterError
from kvrag.fusion.calibration import Calibration, Cost, Measured
from kvrag.fusion.controller import Expected, LoadingController
from kvrag.fusion.fingerprints import MIN_RUN
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import PromptRows
from kvrag.fusion.repair import Repair
from kvrag.ingest.contexts import NO_CONTEXT
from kvrag.ingest.index import Index
from kvrag.loading.cost import StoredRows
from kvrag.loading.prices import fit_prices
from kvrag.models.tokens import encode
from kvrag.tune.bootstrap import mean_interval
from kvrag.tune.datasets import read_questions
from kvrag.tune.exact_match import exact_match
from kvrag.tune.judgements import Contestant, Judgement
from kvrag.tune.judging import judge_policies
from kvrag.tune.loading import measure_loading
from kvrag.tune.questions import JudgedQuestion

POLICIES = ("none", "boundary", "deviation", "query", "query:shift=1", "two_stage")
RATIOS = (0.05, 0.1, 0.15, 0.3)

_MAX_QUERY_WORDS = 24
# What a usual question takes, with the template's words around it.
_QUESTION_TOKENS = 64
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of a calibration.

    Attributes
    ----------
    data
        A data set (`read_questions`), or None for questions made from the index's own chunks.
    num_questions
        The most questions.
    seconds
        After this time, no further question is asked, if at least eight were.
    num_chunks
        Number of chunks in a prompt made from the index.
    max_tokens
        The largest number of tokens in an answer.
    policies, ratios
        The policies and ratios to measure: each policy at each ratio (`judge_policies`).
    use_chat_template
        Ask through the model's chat template if it has one.
    """

    data: str | None = None
    num_questions: int = 200
    seconds: float = 300.0
    num_chunks: int = 5
    max_tokens: int = 16
    policies: Sequence[str] = POLICIES
    ratios: Sequence[float] = RATIOS
    use_chat_template: bool = True


def calibrate(
    index: Index,
    options: CalibrationOptions | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure the policies with an index's model, and loading from its store.

    With a data set, the loss is in exact match. Without one it is in agreement: how often the
    likeliest token after full prefill's answer so far is full prefill's own, for questions that
    quote the index's chunks. This needs no reference answers.

    Raises
    ------
    ParameterError
        When the index is empty, or nothing can be measured.
    """
    options = options or CalibrationOptions()
    if "oracle" in options.policies:
        raise ParameterError(
            "calibrate: 'oracle' compares a prompt with its full prefill, which no answer can "
            "wait for; leave it to 'kvrag bench quality'"
        )
    questions = ask_about(index, options)
    context = index.config.chunk_context
    judged = judge_policies(
        index.model,
        questions,
        options.policies,
        options.ratios,
        max_tokens=options.max_tokens,
        use_chat_template=options.use_chat_template,
        say=on_progress,
        # Questions do not say what precedes their chunks in their documents.
        contexts=[NO_CONTEXT if context.is_of_document else str(context)],
        corpus_filler=index.config.corpus_filler,
        seconds=options.seconds,
    )
    has_answers = options.data is not None
    reference = [_score(one)[0] for one in next(iter(judged.values()))]
    if has_answers and not any(reference):
        raise ParameterError(
            f"data {options.data}: full prefill answers none of {len(reference)} questions right, "
            "so nothing can be lost; calibrate without --data, or with questions it can answer"
        )
    full = fmean(reference) if has_answers else 1.0
    measured = []
    for contestant, judgements in judged.items():
        losses = [
            (_answer_loss(one) if has_answers else _token_loss(one)) / full for one in judgements
        ]
        low, high = mean_interval(losses)
        # Rounding can put a mean of ones slightly above one.
        loss = min(1.0, max(0.0, fmean(losses)))
        measured.append(Measured(contestant.policy, contestant.ratio, loss, low, high))
    return Calibration(
        model_fingerprint=index.model.fingerprint,
        data=Path(options.data).name if options.data else "the index's own chunks",
        measure="exact match" if has_answers else "agreement",
        num_questions=len(reference),
        policies=tuple(measured),
        cost=_fit_cost(judged),
        loading=measure_loading(index, options.num_chunks, on_progress),
    )


def usual_choice(
    index: Index, calibration: Calibration, num_chunks: int
) -> tuple[Repair, Expected] | None:
    """Return what ``auto`` takes for a prompt of chunks of the index's median length.

    None if the index is empty.

    Parameters
    ----------
    num_chunks
        Chunks of the prompt; the first is exact.
    """
    lengths = sorted(map(index.num_rows, index.catalog.keys().values()))
    if not lengths:
        return None
    length = lengths[len(lengths) // 2]
    starts = [number * length for number in range(1, max(2, num_chunks))]
    spans = tuple(ReusedSpan(str(start), start, 0, length) for start in starts)
    records = [StoredRows(str(start), (), length) for start in (0, *starts)]
    num_tokens = starts[-1] + length + _QUESTION_TOKENS
    prompt = PromptRows(num_tokens, index.model.spec.num_layers, spans)
    return LoadingController(calibration=calibration).choose(prompt, _QUESTION_TOKENS, records)


def ask_about(index: Index, options: CalibrationOptions) -> list[JudgedQuestion]:
    """Return the questions of a calibration: those of its data, or ones that quote the index.

    Raises
    ------
    ParameterError
        When the index is empty, or none of its chunks can be quoted.
    """
    if options.data is None:
        return _own_questions(index, options)
    return read_questions(options.data, options.num_questions)


def _answer_loss(judgement: Judgement) -> float:
    reference, given = _score(judgement)
    return reference - given


def _score(judgement: Judgement) -> tuple[float, float]:
    """Return the exact match of full prefill's answer, and of the policy's."""
    reference, given = judgement.reference.text, judgement.given.text
    assert reference is not None
    assert given is not None
    answers = judgement.question.answers
    return exact_match(reference, answers), exact_match(given, answers)


def _token_loss(judgement: Judgement) -> float:
    return 1.0 - fmean(judgement.agrees)


def _own_questions(index: Index, options: CalibrationOptions) -> list[JudgedQuestion]:
    """Return questions that quote chunks, each with the index's search results for the quote."""
    texts: dict[str, str] = {}
    index.catalog.each_text(texts.__setitem__)
    if not texts:
        raise ParameterError(f"{index.path}: the index is empty, there is nothing to ask about")
    step = max(1, len(texts) // options.num_questions)
    questions = []
    for chunk_id, text in list(texts.items())[::step][: options.num_questions]:
        quotation = _quotation(text, index)
        if not quotation:
            continue
        hits = index.search(quotation, options.num_chunks)
        found = sorted((hit.chunk for hit in hits), key=lambda c: (c.source, c.ordinal))
        questions.append(
            JudgedQuestion(
                place=f"chunk {chunk_id}",
                type="",
                question=f'What is said about "{quotation}"?',
                answers=(quotation,),
                texts=tuple(dict.fromkeys(c.text for c in found)),
            )
        )
    if not questions:
        raise ParameterError(
            f"{index.path}: no chunk is longer than a word, so none can be quoted in part; "
            "calibrate with --data"
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


def _fit_cost(
    judged: Mapping[Contestant, Sequence[Judgement]],
) -> Cost:
    """Fit seconds to rows and cached tokens by least squares, without negative costs."""
    all_of_them = [one for judgements in judged.values() for one in judgements]
    amounts = [(1.0, one.num_rows, one.num_cached) for one in all_of_them]
    return Cost(*fit_prices(amounts, [one.ttft_seconds for one in all_of_them]))
