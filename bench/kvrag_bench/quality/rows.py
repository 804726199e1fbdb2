"""Many judged answers as one row of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvrag.tune.calibrate import mean_interval
from kvrag_bench.judge.exact_match import exact_match
from kvrag_bench.judge.judgements import Judgement, Reply
from kvrag_bench.judge.questions import JudgedQuestion
from kvrag_bench.quality import metrics

OVERALL = "overall"


@dataclass(frozen=True)
class Estimate:
    """A mean over questions, with its 95 % paired bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class QualityRow:
    """One contestant on the questions of one type.

    Figures of texts are over the questions that it answered in its own words; None where there are
    none.

    Attributes
    ----------
    question_type
        A type of the data set, or ``"overall"``.
    policy, ratio
        Its label, and the share asked for; None for policies that take none.
    codec, context, eviction
        See `kvrag_bench.judge.judgements.Contestant`.
    num_left_out
        Questions of the type whose prompt does not fit the model's context.
    work_share
        Rows computed in all layers, fresh ones and those only looked at included, over those of
        full prefill.
    recomputed_share
        Tokens computed again over those found and not exact.
    cached_share
        Prompt tokens whose stored KV was kept.
    bytes_per_token
        Stored bytes a chunk token.
    kept_share
        Share of the prompts' keys that an eviction kept, mean over questions.
    ttft_seconds, plain_ttft_seconds
        Medians.
    kl, top1_agreement
        KL(reference || policy) in nats, and how often the likeliest token is the reference's,
        over the reference's answer tokens; `first_kl` and `first_top1_agreement` at the first.
    gap_closed
        1 less the ratio of `kl` to that of policy ``none`` over chunks encoded alone, stored by the
        same codec; None where that did not take part.
    agreed_tokens
        Tokens of the reference's answer before the first that is not the likeliest, mean.
    gold
        Mean log-probability a token of the right answer, less full prefill's.
    choice, reference_choice
        Share of questions where the likeliest of their choices, by mean log-probability a token, is
        right; None for questions without choices. `choice_difference` is policy less reference.
    exact_match, f1, substring_match
        SQuAD's measures (normalised), means over questions; `strict_match` compares letters.
    rouge_l
        Of summaries; None where there are none.
    reference_exact_match, reference_f1, reference_rouge_l
        The same of full prefill.
    exact_match_difference
        Policy less reference.
    answered_share
        Questions that full prefill answers: its text contains an accepted answer.
    answered_f1, answered_contains
        F1 and containment on those, and full prefill's F1; None if there are none.
    document_match, reference_document_match
        Exact match with the documents' answer, if the prompt's differs; None if it does not.
    full_cache_difference
        `exact_match` less that of the same policy with the full cache; None where that did not take
        part.
    """

    model: str
    dataset: str
    question_type: str
    policy: str
    ratio: float | None
    codec: str
    context: str
    eviction: str
    num_questions: int
    num_left_out: int
    work_share: float
    recomputed_share: float
    cached_share: float
    bytes_per_token: float
    kept_share: float
    ttft_seconds: float
    plain_ttft_seconds: float
    kl: float
    first_kl: float
    gap_closed: Estimate | None
    top1_agreement: float
    first_top1_agreement: float
    agreed_tokens: float
    gold: Estimate
    choice: float | None
    reference_choice: float | None
    choice_difference: Estimate | None
    exact_match: float | None
    reference_exact_match: float | None
    exact_match_difference: Estimate | None
    strict_match: float | None
    substring_match: float | None
    f1: float | None
    reference_f1: float | None
    rouge_l: float | None
    reference_rouge_l: float | None
    answered_share: float
    answered_f1: float | None
    reference_answered_f1: float | None
    answered_contains: Estimate | None
    document_match: float | None
    reference_document_match: float | None
    full_cache_difference: Estimate | None


@dataclass(frozen=True)
class RowName:
    """Whom and what a row is about: the row's first fields."""

    model: str
    dataset: str
    question_type: str
    policy: str
    ratio: float | None
    codec: str
    context: str
    eviction: str


def make_row(
    name: RowName,
    judgements: Sequence[Judgement],
    *,
    num_left_out: int,
    plain_reuse: Sequence[Judgement] | None = None,
    full_cache: Sequence[Judgement] | None = None,
) -> QualityRow:
    """Return the row of at least one judgement.

    Parameters
    ----------
    plain_reuse
        What ``none`` over chunks encoded alone made of the same questions, if it took part.
    full_cache
        What the same contestant made of the same questions without eviction, if it did.
    """

    def mean(value: Callable[[Judgement], float]) -> float:
        return fmean(map(value, judgements))

    def share(part: Callable[[Judgement], int], whole: Callable[[Judgement], int]) -> float:
        total = sum(map(whole, judgements))
        return sum(map(part, judgements)) / total if total else 0.0

    texts = [one for one in judgements if one.given.text is not None]
    answered = [one for one in judgements if _contains(one.question, one.reference)]
    answered_texts = [one for one in answered if one.given.text is not None]
    choosing = [one for one in judgements if one.question.choices]
    summaries = [one for one in texts if one.question.is_summary]
    aside = [one for one in texts if one.question.document_answers]
    return QualityRow(
        **vars(name),
        num_questions=len(judgements),
        num_left_out=num_left_out,
        work_share=mean(lambda j: j.work_share),
        recomputed_share=share(lambda j: j.num_recomputed, lambda j: j.num_found),
        cached_share=share(lambda j: j.num_cached, lambda j: j.num_prompt),
        bytes_per_token=share(lambda j: j.stored_bytes, lambda j: j.stored_tokens),
        kept_share=mean(lambda j: j.kept_share),
        ttft_seconds=median(j.ttft_seconds for j in judgements),
        plain_ttft_seconds=median(j.plain_ttft_seconds for j in judgements),
        kl=mean(_kl),
        first_kl=mean(lambda j: j.kl[0]),
        gap_closed=None if plain_reuse is None else _gap_closed(judgements, plain_reuse),
        top1_agreement=mean(lambda j: fmean(j.agrees)),
        first_top1_agreement=mean(lambda j: float(j.agrees[0])),
        agreed_tokens=mean(lambda j: (*j.agrees, False).index(False)),
        gold=_estimate([one.given.gold - one.reference.gold for one in judgements]),
        choice=_mean([_chooses(one.question, one.given) for one in choosing]),
        reference_choice=_mean([_chooses(one.question, one.reference) for one in choosing]),
        choice_difference=_difference(_chooses, choosing),
        exact_match=_mean([_exact(one.question, one.given) for one in texts]),
        reference_exact_match=_mean([_exact(one.question, one.reference) for one in texts]),
        exact_match_difference=_difference(_exact, texts),
        strict_match=_mean([_text_score(metrics.strict_match)(j.question, j.given) for j in texts]),
        substring_match=_mean([_contains(one.question, one.given) for one in texts]),
        f1=_mean([_f1(one.question, one.given) for one in texts]),
        reference_f1=_mean([_f1(one.question, one.reference) for one in texts]),
        rouge_l=_mean([_rouge(one.question, one.given) for one in summaries]),
        reference_rouge_l=_mean([_rouge(one.question, one.reference) for one in summaries]),
        answered_share=len(answered) / len(judgements),
        answered_f1=_mean([_f1(one.question, one.given) for one in answered_texts]),
        reference_answered_f1=_mean([_f1(one.question, one.reference) for one in answered]),
        answered_contains=_maybe([_contains(one.question, one.given) for one in answered_texts]),
        document_match=_mean([_document_match(one.question, one.given) for one in aside]),
        reference_document_match=_mean(
            [_document_match(one.question, one.reference) for one in aside]
        ),
        full_cache_difference=None if full_cache is None else _against(judgements, full_cache),
    )


def _kl(judgement: Judgement) -> float:
    return fmean(judgement.kl)


def _gap_closed(judgements: Sequence[Judgement], plain: Sequence[Judgement]) -> Estimate | None:
    parts, wholes = [_kl(one) for one in judgements], [_kl(one) for one in plain]
    # Where plain reuse loses nothing (one chunk, at its place) there is no gap.
    if min(wholes) <= 0:
        return None
    low, high = metrics.ratio_interval(parts, wholes)
    return Estimate(1 - fmean(parts) / fmean(wholes), 1 - high, 1 - low)


_Score = Callable[[JudgedQuestion, Reply], float]


def _difference(score: _Score, judgements: Sequence[Judgement]) -> Estimate | None:
    return _maybe([score(j.question, j.given) - score(j.question, j.reference) for j in judgements])


def _against(judgements: Sequence[Judgement], others: Sequence[Judgement]) -> Estimate | None:
    """Return the difference in exact match to others on the same questions."""
    return _maybe(
        [
            _exact(one.question, one.given) - _exact(other.question, other.given)
            for one, other in zip(judgements, others, strict=True)
            if one.given.text is not None and other.given.text is not None
        ]
    )


def _text_score(score: Callable[[str, Sequence[str]], float]) -> _Score:
    def of_reply(question: JudgedQuestion, reply: Reply) -> float:
        assert reply.text is not None
        return score(reply.text, question.answers)

    return of_reply


_exact = _text_score(exact_match)
_f1 = _text_score(metrics.token_f1)
_contains = _text_score(metrics.substring_match)
_rouge = _text_score(metrics.rouge_l)


def _document_match(question: JudgedQuestion, reply: Reply) -> float:
    assert reply.text is not None
    return exact_match(reply.text, question.document_answers)


def _chooses(question: JudgedQuestion, reply: Reply) -> float:
    """Return 1 if the likeliest of a question's choices is right, otherwise 0."""
    chosen = question.choices[reply.choices.index(max(reply.choices))]
    return exact_match(chosen, question.answers)


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), *mean_interval(values))


def _maybe(values: Sequence[float]) -> Estimate | None:
    return _estimate(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
