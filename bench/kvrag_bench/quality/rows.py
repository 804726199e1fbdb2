"""Many judged answers as one row of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvrag.eviction import NO_EVICTION
from kvrag.fusion.compression.spec import NO_COMPRESSION
from kvrag.ingest.contexts import NO_CONTEXT
from kvrag.tune.bootstrap import mean_interval

OVERALL = "overall"


@dataclass(frozen=True)
class TextScores:
    """How right one answer's text is."""

    exact_match: float
    strict_match: float
    substring_match: float
    f1: float
    rouge_l: float | None


@dataclass(frozen=True)
class Judgement:
    """One question under one policy and codec, with what full prefill made of it.

    Attributes
    ----------
    question_type
        As the data set has it.
    given, reference
        Scores of the policy's answer and of full prefill's.
    kl, agrees
        At each token of the reference's answer.
    ttft_seconds, plain_ttft_seconds
        From the prompt's text to the first token.
    num_recomputed, num_found
        Reused tokens computed again, of those found in the store and not exact.
    num_cached, num_prompt
        Prompt tokens whose stored KV was kept, of all.
    num_rows, work_share
        Rows computed, summed over layers; and that over those of full prefill.
    stored_bytes, stored_tokens
        Records of the question's chunks.
    document_match, reference_document_match
        Exact match by what the documents answer where the prompt does not; None for questions that
        are answered by their prompt.
    kept_share
        Keys that an eviction left of the prompt's, mean over layers and heads.
    """

    question_type: str
    given: TextScores
    reference: TextScores
    kl: Sequence[float]
    agrees: Sequence[bool]
    ttft_seconds: float
    plain_ttft_seconds: float
    num_recomputed: int
    num_found: int
    num_cached: int
    num_prompt: int
    num_rows: int
    work_share: float
    stored_bytes: int
    stored_tokens: int
    document_match: float | None = None
    reference_document_match: float | None = None
    kept_share: float = 1.0


@dataclass(frozen=True)
class QualityRow:
    """One policy at one ratio over one codec, on the questions of one type.

    Attributes
    ----------
    question_type
        A type of the data set, or ``"overall"``.
    ratio
        Share asked for; None for ``none``.
    exact_match, f1, substring_match
        SQuAD's measures (normalised), means over questions; `strict_match` compares letters.
    rouge_l
        Of summaries; None where there are none.
    reference_exact_match, reference_f1
        The same of full prefill.
    difference_low, difference_high
        95 % paired bootstrap interval of `exact_match_difference`, policy less reference.
    kl, top1_agreement
        KL(reference || policy) in nats, and how often the likeliest token is the reference's,
        over the reference's answer tokens; `first_kl` and `first_top1_agreement` at the first.
    ttft_seconds, plain_ttft_seconds
        Medians.
    recomputed_share
        Tokens computed again over those found and not exact.
    cached_share
        Prompt tokens whose stored KV was kept.
    work_share
        Rows computed in all layers, fresh ones and those only looked at included, over those of
        full prefill.
    bytes_per_token
        Stored bytes a chunk token.
    num_left_out
        Questions of the type whose prompt does not fit the model's context.
    context
        Context that the chunks were encoded after (`kvrag.ingest.contexts`).
    compression
        How they were stored as fewer rows (`kvrag.fusion.compression.spec`).
    document_match, reference_document_match
        Exact match with the documents' answer, if the prompt's differs; None if it does not.
    eviction
        Policy that evicted keys after the prompt, from the answer's second token on
        (`kvrag.eviction.registry`).
    kept_share
        Share of the prompts' keys that it kept, mean over questions.
    full_cache_difference, full_cache_low, full_cache_high
        `exact_match` less that of the same policy with the full cache, and its 95 % paired
        bootstrap interval; None where that did not take part.
    """

    model: str
    dataset: str
    question_type: str
    policy: str
    ratio: float | None
    codec: str
    num_questions: int
    exact_match: float
    f1: float
    kl: float
    top1_agreement: float
    reference_exact_match: float
    ttft_seconds: float
    plain_ttft_seconds: float
    recomputed_share: float
    bytes_per_token: float
    exact_match_difference: float
    difference_low: float
    difference_high: float
    strict_match: float
    substring_match: float
    rouge_l: float | None
    reference_f1: float
    reference_rouge_l: float | None
    first_kl: float
    first_top1_agreement: float
    cached_share: float
    work_share: float
    num_left_out: int
    context: str
    compression: str
    document_match: float | None
    reference_document_match: float | None
    eviction: str
    kept_share: float
    full_cache_difference: float | None
    full_cache_low: float | None
    full_cache_high: float | None


def make_row(
    judgements: Sequence[Judgement],
    *,
    model: str,
    dataset: str,
    question_type: str,
    policy: str,
    ratio: float | None,
    codec: str,
    num_left_out: int,
    context: str = NO_CONTEXT,
    compression: str = NO_COMPRESSION,
    eviction: str = NO_EVICTION,
    full_cache: Sequence[Judgement] | None = None,
) -> QualityRow:
    """Return the row of at least one judgement.

    `full_cache` are those of the same questions without eviction, where there are any.
    """

    def mean(value: Callable[[Judgement], float]) -> float:
        return fmean(value(judgement) for judgement in judgements)

    def share(part: Callable[[Judgement], int], whole: Callable[[Judgement], int]) -> float:
        total = sum(whole(judgement) for judgement in judgements)
        return sum(part(judgement) for judgement in judgements) / total if total else 0.0

    differences = [j.given.exact_match - j.reference.exact_match for j in judgements]
    low, high = mean_interval(differences)
    forgotten = _against(judgements, full_cache)
    return QualityRow(
        model=model,
        dataset=dataset,
        question_type=question_type,
        policy=policy,
        ratio=ratio,
        codec=codec,
        num_questions=len(judgements),
        exact_match=mean(lambda j: j.given.exact_match),
        f1=mean(lambda j: j.given.f1),
        kl=mean(lambda j: fmean(j.kl)),
        top1_agreement=mean(lambda j: fmean(j.agrees)),
        reference_exact_match=mean(lambda j: j.reference.exact_match),
        ttft_seconds=median(j.ttft_seconds for j in judgements),
        plain_ttft_seconds=median(j.plain_ttft_seconds for j in judgements),
        recomputed_share=share(lambda j: j.num_recomputed, lambda j: j.num_found),
        bytes_per_token=share(lambda j: j.stored_bytes, lambda j: j.stored_tokens),
        exact_match_difference=fmean(differences),
        difference_low=low,
        difference_high=high,
        strict_match=mean(lambda j: j.given.strict_match),
        substring_match=mean(lambda j: j.given.substring_match),
        rouge_l=_mean_or_none([j.given.rouge_l for j in judgements]),
        reference_f1=mean(lambda j: j.reference.f1),
        reference_rouge_l=_mean_or_none([j.reference.rouge_l for j in judgements]),
        first_kl=mean(lambda j: j.kl[0]),
        first_top1_agreement=mean(lambda j: float(j.agrees[0])),
        cached_share=share(lambda j: j.num_cached, lambda j: j.num_prompt),
        work_share=mean(lambda j: j.work_share),
        num_left_out=num_left_out,
        context=context,
        compression=compression,
        document_match=_mean_or_none([j.document_match for j in judgements]),
        reference_document_match=_mean_or_none([j.reference_document_match for j in judgements]),
        eviction=eviction,
        kept_share=mean(lambda j: j.kept_share),
        full_cache_difference=forgotten[0],
        full_cache_low=forgotten[1],
        full_cache_high=forgotten[2],
    )


def _against(
    judgements: Sequence[Judgement], others: Sequence[Judgement] | None
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the mean difference in exact match to others on the same questions, and interval."""
    if others is None:
        return None, None, None
    differences = [
        one.given.exact_match - other.given.exact_match
        for one, other in zip(judgements, others, strict=True)
    ]
    return fmean(differences), *mean_interval(differences)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None
