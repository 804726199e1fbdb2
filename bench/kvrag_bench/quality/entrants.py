"""What `kvrag bench quality` judges: its options, who takes part, and the questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrag.codec.config import choose_codec
from kvrag.errors import ParameterError
from kvrag.eviction import NO_EVICTION
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.controller import takes_ratio
from kvrag.fusion.links import LinkTokens
from kvrag.ingest.contexts import NO_CONTEXT, SIMILAR, parse_context
from kvrag.ingest.profiles import check_use
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.judgements import Contestant
from kvrag_bench.judge.judging import check_policies
from kvrag_bench.judge.questions import JudgedQuestion
from kvrag_bench.quality.datasets import GENERATED, MUSIQUE, load_questions, load_suite
from kvrag_bench.quality.oracle import ORACLE
from kvrag_bench.quality.retrieved import RETRIEVED, Found, retrieve
from kvrag_corpus.real import SETS

LINKED = " + links"
"""Suffix of a policy's label when link tokens follow the chunks."""

WRITTEN = " + writer"
"""Suffix of a policy's label when a writer acts while chunks are encoded."""

REAL = "real"
"""The whole real suite."""

NO_DOCUMENT = "no document"
NOISE_FLOOR = "bfloat16"
"""Controls that reuse nothing."""


@dataclass(frozen=True)
class QualityOptions:
    """What to judge.

    Attributes
    ----------
    model
        A model folder or name, or a loaded `KVModel`.
    data
        ``"generated"`` or the path of a data set (`load_questions`).
    suite
        Sets of the real suite (`suite_sets`); `data` is then a file in MuSiQue layout that becomes
        one of them, or ``"generated"`` for none. ``retrieved`` alone searches a corpus
        (`kvrag_bench.quality.retrieved`). Contestants then write whole
        answers only to questions that full prefill answers, which is where they are compared.
    policies, ratios
        Each policy is judged at each ratio, except that ``none`` and policies that state their own
        budget (``query:ratio=0.1``, ``boundary:tokens=8``) are judged once.
    codecs
        Codecs that store the chunks.
    contexts
        Contexts that chunks are encoded after (`kvrag.ingest.contexts`). With text of documents
        among them, generated carried-over questions are asked once more without the predecessor, as
        a separate type that is left out of the overall figures.
    num_questions
        Number of questions, from the first; None takes all (1,000 generated ones). For a
        suite, number of questions in each set; None takes 50.
    max_tokens
        Most tokens in an answer.
    use_chat_template
        Ask through the model's chat template if it has one.
    seed, num_documents
        Of generated questions.
    device
        Where the model runs; None means the CPU.
    compute
        What linear layers compute in, on the CPU (`KVModel.load`). Full prefill, which everything
        is compared with, stays in the type of the weights.
    evictions
        Each is judged with what every one of them leaves while answers are written
        (`kvrag.eviction.registry`); ``none`` keeps the full cache.
    links
        Link tokens: a file, or ``"off"``; None takes those in the model's folder. If there are any,
        each policy except ``oracle`` is judged without and with them.
    writer
        The file of a writer, or None. With one, each policy is judged without and with it over
        every context that takes one.
    controls
        Also judge the question alone, without its documents, and on the first question of each
        type ``boundary`` at ratio 1.0, which must equal full prefill.
    noise_floor
        Also judge full prefill in bfloat16, where the model is of another type.
    out
        A file of judgements (`kvrag_bench.quality.results`): what it has is not judged again.
    tops, chunk_tokens
        Of suite ``retrieved``: numbers of chunks for each question, and their longest.
    """

    model: str | KVModel = "kvrag-tiny"
    data: str = GENERATED
    suite: Sequence[str] = ()
    policies: Sequence[str] = ("none", "random", "boundary", "deviation", "query", "two_stage")
    ratios: Sequence[float] = (0.05, 0.15, 0.3)
    codecs: Sequence[str] = ("raw",)
    contexts: Sequence[str] = (NO_CONTEXT,)
    evictions: Sequence[str] = (NO_EVICTION,)
    num_questions: int | None = None
    max_tokens: int = 16
    use_chat_template: bool = True
    seed: int = 2024
    num_documents: int = 5
    device: str | None = None
    compute: str | None = None
    links: LinkTokens | str | Path | None = None
    writer: Path | None = None
    controls: bool = True
    noise_floor: bool = False
    out: Path | None = None
    tops: Sequence[int] = (4, 6, 10)
    chunk_tokens: int = 256


def label(contestant: Contestant) -> str:
    """Return the policy's name, marked if link tokens follow the chunks, or a writer acted."""
    return contestant.policy + LINKED * contestant.linked + WRITTEN * contestant.written


def _takes_ratio(policy: str) -> bool:
    return policy == ORACLE or takes_ratio(policy)


def contestants(options: QualityOptions, with_links: bool = False) -> list[Contestant]:
    """Return all that take part, in the order asked for; with links, each of them twice.

    Raises
    ------
    ParameterError
        For an unknown policy or codec, a ratio out of range, or nothing to judge.
    """
    check_policies([name for name in options.policies if name != ORACLE], options.ratios)
    codecs = [choose_codec(name).label for name in options.codecs]
    for name in options.contexts:
        if parse_context(name).name == SIMILAR and RETRIEVED not in options.suite:
            raise ParameterError(
                f"context {name}: only the suite {RETRIEVED!r} has a corpus to choose from"
            )
    for name in options.evictions:
        make_eviction(name)
    if not all((options.policies, options.codecs, options.contexts, options.evictions)):
        raise ParameterError(
            "bench quality: at least one policy, one codec, one context and one eviction (or "
            "'none') must be given"
        )
    shared = {name for name in options.contexts if parse_context(name).is_shared}
    if options.writer is not None and not shared:
        check_use(parse_context(options.contexts[0]))
    if options.max_tokens < 1:
        raise ParameterError(f"max_tokens {options.max_tokens}: expected at least 1")
    if not options.ratios and ORACLE in options.policies:
        raise ParameterError("bench quality: policy 'oracle' needs a ratio, and none was given")
    found = [
        Contestant(policy, ratio, codec, context, linked, eviction, written)
        for context in options.contexts
        for written in ((False, True) if options.writer and context in shared else (False,))
        for codec in codecs
        for policy in options.policies
        for ratio in (options.ratios if _takes_ratio(policy) else [None])
        # The oracle's deviations are those of the prompt without links.
        for linked in ((False, True) if with_links and policy != ORACLE else (False,))
        # Innermost: one prompt serves them all.
        for eviction in options.evictions
    ]
    return list(dict.fromkeys(found))


def controls(options: QualityOptions, entered: Sequence[Contestant]) -> list[Contestant]:
    """Return the controls that are judged on every question."""
    plain = replace(entered[0], ratio=None, linked=False, eviction=NO_EVICTION)
    names = [NO_DOCUMENT] * options.controls + [NOISE_FLOOR] * options.noise_floor
    return [replace(plain, policy=name) for name in names]


def everything_again(options: QualityOptions, entered: Sequence[Contestant]) -> list[Contestant]:
    """Return the control that computes all again, for one question of each type."""
    whole = [one for one in entered if not one.linked]
    if not options.controls or not whole:
        return []
    return [replace(whole[0], policy="boundary", ratio=1.0, eviction=NO_EVICTION)]


def load_asked(options: QualityOptions) -> list[JudgedQuestion]:
    """Return the questions that the options name.

    Raises as `load_suite`, `load_questions` and `retrieve`.
    """
    if RETRIEVED in options.suite:
        return list(_retrieved(options).questions)
    if options.suite:
        file = None if options.data == GENERATED else options.data
        return load_suite(
            suite_sets(options.suite, file),
            seed=options.seed,
            num_questions_per_set=50 if options.num_questions is None else options.num_questions,
            musique=file,
        )
    return load_questions(
        options.data,
        options.num_questions,
        seed=options.seed,
        num_documents=options.num_documents,
        with_left_out=any(parse_context(one).is_of_document for one in options.contexts),
    )


def _retrieved(options: QualityOptions) -> Found:
    if len(options.suite) > 1:
        raise ParameterError(
            f"set {RETRIEVED!r} is judged alone: its questions have their own index"
        )
    return retrieve(
        None if options.data == GENERATED else options.data,
        options.model,
        tuple(options.tops),
        options.chunk_tokens,
        tuple(options.contexts),
        seed=options.seed,
        num_questions=50 if options.num_questions is None else options.num_questions,
        beside=options.out,
    )


def similar_passages(options: QualityOptions) -> dict[str, tuple[int, ...]]:
    """Return the tokens of context ``similar`` for each chunk of the suite ``retrieved``."""
    return _retrieved(options).similar if RETRIEVED in options.suite else {}


def suite_sets(names: Sequence[str], file: str | None = None) -> list[str]:
    """Return the sets that names stand for.

    ``real`` stands for all, ``biography`` for those of all sizes; longer than about 2,000 tokens
    only if they are named (``needle:4k``).
    """
    short = [one for one in SETS if not one.endswith((":4k", ":8k"))]
    found: list[str] = []
    for name in names:
        if name == REAL:
            found += [*short, *([MUSIQUE] if file else [])]
        else:
            found += [one for one in short if one.partition(":")[0] == name] or [name]
    return list(dict.fromkeys(found))
