"""Compares contexts (`kvrag.ingest.contexts`) on an index's own questions, by what they lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvrag.errors import ParameterError
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.ingest.checks import check_unencrypted
from kvrag.ingest.contexts import (
    CHARACTERS_A_TOKEN,
    CORPUS,
    MOST_DOCUMENTS,
    Context,
    check_filler,
    join_passages,
    parse_context,
)
from kvrag.ingest.index import Index
from kvrag.tune.bootstrap import ratio_interval
from kvrag.tune.calibrate import CalibrationOptions, ask_about
from kvrag.tune.judgements import Judgement
from kvrag.tune.judging import judge_policies
from kvrag.tune.questions import JudgedQuestion

_PLAIN_REUSE = "none"
# Fewer questions than these say little; rather than ask fewer, take a shorter text.
_FEW = 8


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
        The questions; in a small index, context ``corpus`` leaves out some of them, so that chunks
        remain for its text.

    Raises
    ------
    ParameterError
        If a context, or the index's own, is of the document (questions do not say what precedes
        their chunks there), does not fit the model, is ``corpus`` over an encrypted index, or is a
        longer ``corpus`` than the index's own.
    """
    config = index.config
    contexts, questions, passages = _prepare(index, names, options)
    judged = judge_policies(
        index.model,
        questions,
        [_PLAIN_REUSE, TwoStagePolicy.name],
        [TwoStagePolicy.ratio],
        max_tokens=options.max_tokens,
        use_chat_template=options.use_chat_template,
        say=on_progress,
        contexts=list(map(str, contexts)),
        corpus_filler=passages,
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


def check_contexts(index: Index, names: Sequence[str], options: CalibrationOptions) -> None:
    """Raise ParameterError if contexts cannot be compared (`compare_contexts`)."""
    if names:
        _prepare(index, names, options)


def _prepare(
    index: Index, names: Sequence[str], options: CalibrationOptions
) -> tuple[list[Context], list[JudgedQuestion], str]:
    """Return the contexts, the index's own first, the questions, and the text of ``corpus``."""
    config = index.config
    contexts = list(dict.fromkeys([config.chunk_context, *map(parse_context, names)]))
    for one in contexts:
        _check(index, one)
    wanted = max((one.num_tokens for one in contexts if one.name == CORPUS), default=0)
    if config.corpus_filler and wanted > config.context_tokens:
        raise ParameterError(
            f"context {CORPUS}:{wanted} is longer than the index's own, {config.chunk_context}, "
            "whose text it would take; compare it on an index with another context"
        )
    questions = ask_about(index, options)
    if not wanted or config.corpus_filler:
        return contexts, questions, config.corpus_filler
    return contexts, *_set_aside(index, questions, wanted)


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


def _set_aside(
    index: Index, questions: list[JudgedQuestion], num_tokens: int
) -> tuple[list[JudgedQuestion], str]:
    """Return passages of chunks that no question has, and as many questions as leave enough."""
    texts: dict[str, None] = {}
    index.catalog.each_text(lambda _, text: texts.setdefault(text))
    while True:
        asked = {text for question in questions for text in question.texts}
        others = [text for text in texts if text not in asked]
        is_enough = sum(map(len, others)) >= num_tokens * CHARACTERS_A_TOKEN
        if is_enough or len(questions) == 1 or (others and len(questions) <= _FEW):
            break
        questions = questions[::2]
    if not others:
        raise ParameterError(
            f"context corpus: a question holds all {len(texts)} chunks of the index, so none is "
            "left to be encoded after; ask about fewer with --set chunks=1, or index more documents"
        )
    step = max(1, len(others) // MOST_DOCUMENTS)
    return questions, join_passages(others[::step][:MOST_DOCUMENTS], num_tokens)


def _kl(judgements: Sequence[Judgement]) -> list[float]:
    return [fmean(one.kl) for one in judgements]
