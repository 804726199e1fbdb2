"""Compares contexts (`kvrag.ingest.contexts`) on an index's own questions, by what they lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvrag.errors import ParameterError
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.ingest.checks import check_unencrypted
from kvrag.ingest.contexts import CORPUS, Context, check_filler, parse_context
from kvrag.ingest.corpus_filler import MOST_DOCUMENTS, join_passages
from kvrag.ingest.index import Index
from kvrag.tune.bootstrap import ratio_interval
from kvrag.tune.calibrate import CalibrationOptions, ask_about
from kvrag.tune.judgements import Judgement
from kvrag.tune.judging import judge_policies
from kvrag.tune.questions import JudgedQuestion

_PLAIN_REUSE = "none"


@dataclass(frozen=True)
class ContextLoss:
    """How far answers over chunks of one context are from full prefill's.

    Attributes
    ----------
    context
        The context.
    reused
        Mean KL(full prefill || reuse) along full prefill's answer with nothing recomputed, in nats
        a token.
    repaired
        The same with the default policy.
    share_low, share_high
        95 % interval of `repaired` over that of the index's own context, paired over questions: a
        context is better if `share_high` is below 1.
    """

    context: str
    reused: float
    repaired: float
    share_low: float
    share_high: float


def compare_contexts(
    index: Index,
    names: Sequence[str],
    options: CalibrationOptions,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[ContextLoss]:
    """Judge chunks encoded after each context, in prompts of the index's chunks.

    The index stays as it is: chunks are encoded in memory. Its own context is always judged, and
    comes first.

    Parameters
    ----------
    index
        The index.
    names
        The contexts to compare with its own.
    options
        The questions.

    Raises
    ------
    ParameterError
        If a context is of the document (questions do not say what precedes their chunks there),
        does not fit the model, or is ``corpus`` over an encrypted index.
    """
    config = index.config
    contexts = list(dict.fromkeys([config.chunk_context, *map(parse_context, names)]))
    for one in contexts:
        _check(index, one)
    questions = ask_about(index, options)
    judged = judge_policies(
        index.model,
        questions,
        [_PLAIN_REUSE, TwoStagePolicy.name],
        [TwoStagePolicy.ratio],
        max_tokens=options.max_tokens,
        use_chat_template=options.use_chat_template,
        say=on_progress,
        contexts=list(map(str, contexts)),
        corpus_filler=config.corpus_filler or _passages(index, questions, contexts),
        seconds=options.seconds,
    )
    by_context: dict[str, dict[str, list[float]]] = {}
    for contestant, judgements in judged.items():
        by_context.setdefault(contestant.context, {})[contestant.policy] = _kl(judgements)
    own = by_context[str(config.chunk_context)][TwoStagePolicy.name]
    found = []
    for context, losses in by_context.items():
        repaired = losses[TwoStagePolicy.name]
        low, high = ratio_interval(repaired, own) if any(own) else (1.0, 1.0)
        found.append(ContextLoss(context, fmean(losses[_PLAIN_REUSE]), fmean(repaired), low, high))
    return found


def check_contexts(index: Index, names: Sequence[str]) -> None:
    """Raise ParameterError if a context cannot be compared (`compare_contexts`)."""
    for name in names:
        _check(index, parse_context(name))


def _check(index: Index, context: Context) -> None:
    if context.is_of_document:
        raise ParameterError(
            f"context {context} cannot be calibrated: questions do not say what precedes their "
            "chunks in their documents; compare it with 'kvrag bench quality --context'"
        )
    config = index.config
    check_unencrypted(replace(config, context=context.name, context_tokens=context.num_tokens))
    room = config.max_positions - len(config.prefix_ids)
    check_filler(context, index.tokenizer, room, config.chunk_tokens)


def _passages(
    index: Index, questions: Sequence[JudgedQuestion], contexts: Sequence[Context]
) -> str:
    """Return passages of chunks that no question has; "" if none is wanted."""
    wanted = [one.num_tokens for one in contexts if one.name == CORPUS]
    if not wanted:
        return ""
    asked = {text for question in questions for text in question.texts}
    texts: dict[str, None] = {}
    index.catalog.each_text(lambda _, text: texts.setdefault(text))
    others = [text for text in texts if text not in asked]
    if not others:
        raise ParameterError(
            "context corpus: every chunk of the index is in a question, so none is left to be "
            "encoded after; ask fewer with --questions"
        )
    step = max(1, len(others) // MOST_DOCUMENTS)
    return join_passages(others[::step][:MOST_DOCUMENTS], max(wanted))


def _kl(judgements: Sequence[Judgement]) -> list[float]:
    return [fmean(one.kl) for one in judgements]
