"""`kvrag bench quality`: who takes part, and the run over all questions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from kvrag.codec.presets import choose_codec
from kvrag.errors import ParameterError
from kvrag.eviction import NO_EVICTION
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.chosen_links import LINKS_OFF, ChosenLinks
from kvrag.fusion.compression.spec import NO_COMPRESSION, parse_compression
from kvrag.fusion.controller import takes_ratio
from kvrag.fusion.layout import Layout
from kvrag.fusion.links import LinkTokens, insert_links
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.repair import Repair, make_repair
from kvrag.ingest.contexts import NO_CONTEXT, context_limit
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag.tune.answers import Answerer, FusedAnswer, ReferenceAnswer
from kvrag.tune.bank import ChunkBank
from kvrag.tune.exact_match import exact_match
from kvrag.tune.judging import check_policies, progress, prompts_that_fit
from kvrag.tune.questions import JudgedQuestion, RenderedPrompt
from kvrag_bench.quality import metrics
from kvrag_bench.quality.codecs import fit_codecs
from kvrag_bench.quality.datasets import GENERATED, load_questions
from kvrag_bench.quality.oracle import ORACLE, OraclePolicy, TrueDeviation
from kvrag_bench.quality.rows import OVERALL, Judgement, QualityRow, TextScores, make_row
from kvrag_corpus import generate_corpus

LINKED = " + links"
"""Suffix of a policy's label when link tokens follow the chunks."""

# Characters of text that codecs are fitted to: about 5,000 tokens.
_LEAST_CHARACTERS_TO_FIT = 20_000


@dataclass(frozen=True)
class QualityOptions:
    """What to judge.

    Attributes
    ----------
    model
        A model folder or name, or a loaded `KVModel`.
    data
        ``"generated"`` or the path of a data set (`load_questions`).
    policies, ratios
        Each policy is judged at each ratio, except that ``none`` and policies that state their own
        budget (``query:ratio=0.1``, ``boundary:tokens=8``) are judged once.
    codecs
        Codecs that store the chunks.
    contexts
        Contexts that chunks are encoded after (`kvrag.ingest.contexts`). With any except ``none``,
        generated carried-over questions are asked once more without the predecessor, as a separate
        type that is left out of the overall figures.
    compressions
        How chunks are stored (`kvrag.fusion.compression.spec`). All except ``none`` are judged only
        with policy ``none``, since their rows cannot be recomputed.
    num_questions
        Number of questions, from the first; None takes all (1,000 generated ones).
    max_tokens
        Most tokens in an answer.
    use_chat_template
        Ask through the model's chat template if it has one.
    seed, num_documents
        Of generated questions.
    device
        Where the model runs; None means the CPU.
    evictions
        Each is judged with what every one of them leaves while answers are written
        (`kvrag.eviction.registry`); ``none`` keeps the full cache.
    links
        Link tokens: a file, or ``"off"``; None takes those in the model's folder. If there are any,
        each policy except ``oracle`` is judged without and with them.
    """

    model: str | KVModel = "kvrag-tiny"
    data: str = GENERATED
    policies: Sequence[str] = ("none", "boundary", "deviation", "query", "two_stage")
    ratios: Sequence[float] = (0.05, 0.15, 0.3)
    codecs: Sequence[str] = ("raw",)
    contexts: Sequence[str] = (NO_CONTEXT,)
    compressions: Sequence[str] = (NO_COMPRESSION,)
    evictions: Sequence[str] = (NO_EVICTION,)
    num_questions: int | None = None
    max_tokens: int = 16
    use_chat_template: bool = True
    seed: int = 2024
    num_documents: int = 5
    device: str | None = None
    links: LinkTokens | str | Path | None = None


@dataclass(frozen=True)
class Contestant:
    """A policy at a ratio over a codec, with the other choices that a figure depends on.

    Chunks are encoded after a context and stored compressed or whole, with or without links.
    Answers use all keys or those that an eviction leaves.
    """

    policy: str
    ratio: float | None
    codec: str
    context: str = NO_CONTEXT
    linked: bool = False
    compression: str = NO_COMPRESSION
    eviction: str = NO_EVICTION

    @property
    def with_full_cache(self) -> Contestant:
        """The same without eviction."""
        return replace(self, eviction=NO_EVICTION)

    @property
    def label(self) -> str:
        """The policy's name, marked if link tokens follow the chunks."""
        return self.policy + LINKED if self.linked else self.policy

    def policy_for(self, deviation: Callable[[], TrueDeviation]) -> Repair:
        """Return the policy at the ratio; only ``oracle`` calls `deviation`."""
        if self.policy == ORACLE:
            assert self.ratio is not None
            return Repair(OraclePolicy(self.ratio, deviation()))
        return make_repair(self.policy, ratio=self.ratio)


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
        context_limit(name, None)
    for name in options.evictions:
        make_eviction(name)
    lists = (options.policies, options.codecs, options.contexts, options.compressions)
    if not all((*lists, options.evictions)):
        raise ParameterError(
            "bench quality: at least one policy, one codec, one context, one compression and one "
            "eviction (or 'none') must be given"
        )
    compressions = [str(parse_compression(name) or NO_COMPRESSION) for name in options.compressions]
    if set(compressions) != {NO_COMPRESSION} and not any(map(_is_none, options.policies)):
        raise ParameterError(
            "bench quality: compressed chunks are judged with policy 'none', which was not asked "
            f"for; found {', '.join(options.policies)}"
        )
    if options.max_tokens < 1:
        raise ParameterError(f"max_tokens {options.max_tokens}: expected at least 1")
    if not options.ratios and ORACLE in options.policies:
        raise ParameterError("bench quality: policy 'oracle' needs a ratio, and none was given")
    found = [
        Contestant(policy, ratio, codec, context, linked, compression, eviction)
        for context in options.contexts
        for compression in compressions
        for codec in codecs
        for policy in options.policies
        if compression == NO_COMPRESSION or _is_none(policy)
        for ratio in (options.ratios if _takes_ratio(policy) else [None])
        # The oracle's deviations are those of the prompt without links.
        for linked in ((False, True) if with_links and policy != ORACLE else (False,))
        # Innermost: one prompt serves them all.
        for eviction in options.evictions
    ]
    return list(dict.fromkeys(found))


def _is_none(policy: str) -> bool:
    """Whether a policy computes nothing again, whatever it scales."""
    return policy.partition(":")[0] == NonePolicy.name


def run_quality_bench(
    options: QualityOptions, on_progress: Callable[[str], None] | None = None
) -> list[QualityRow]:
    """Judge every policy and codec against full prefill, on the same prompts.

    Token ids are the plain pipeline's, the same for all. The reference answers greedily with the
    model's own forward. Each contestant's distributions are taken after the reference's tokens, and
    its own greedy answer is scored as the reference's is.

    Parameters
    ----------
    options
        What to judge.
    on_progress
        Receives a line whenever there is something new to say.

    Returns
    -------
    list of QualityRow
        For each contestant a row over all questions, then one for each type of the data set.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError, LinksError
        Before anything is computed.
    """
    say = on_progress or (lambda _: None)
    contestants(options)
    if isinstance(options.links, str | Path) and options.links != LINKS_OFF:
        options = replace(options, links=LinkTokens.load(options.links))
    say("reading the questions")
    questions = load_questions(
        options.data,
        options.num_questions,
        seed=options.seed,
        num_documents=options.num_documents,
        with_left_out=set(options.contexts) != {NO_CONTEXT},
    )
    if not isinstance(options.model, KVModel):
        load_tokenizer(options.model)  # fails in a moment where loading weights takes minutes
    say("loading the model")
    model = KVModel.load(options.model, device=options.device)
    judged, left_out = judge_questions(model, questions, options, say)
    dataset = options.data if options.data == GENERATED else Path(options.data).name
    return [
        make_row(
            _of_kind(judgements, kind),
            model=model.name,
            dataset=dataset,
            question_type=kind,
            policy=contestant.label,
            ratio=contestant.ratio,
            codec=contestant.codec,
            context=contestant.context,
            compression=contestant.compression,
            eviction=contestant.eviction,
            full_cache=_twin(judged, contestant, kind),
            num_left_out=left_out.total() if kind == OVERALL else left_out[kind],
        )
        for contestant, judgements in judged.items()
        for kind in _types(judgements)
    ]


def judge_questions(
    model: KVModel,
    questions: Sequence[JudgedQuestion],
    options: QualityOptions,
    say: Callable[[str], None],
) -> tuple[dict[Contestant, list[Judgement]], Counter[str]]:
    """Judge every contestant on every question whose prompt fits the model.

    Returns
    -------
    dict
        One judgement a question for each contestant, in the same order.
    Counter
        Question types to the number of questions left out.

    Raises
    ------
    ParameterError
        When no prompt fits, or the options name no contestant.
    """
    links = _links(options, model)
    entered = contestants(options, links is not None)
    prompts = prompts_that_fit(
        model,
        questions,
        options.max_tokens,
        options.use_chat_template,
        0 if links is None else links.header.num_links,
    )
    left_out = Counter(question.type for question in questions) - Counter(
        question.type for question, _ in prompts
    )
    passages = [passage for question, _ in prompts for passage in question.passages]
    texts = [passage.text for passage in passages]
    to_fit = _texts_to_fit(options, texts)
    codecs = {
        compression: fit_codecs(model, options.codecs, to_fit, say, compression)
        for compression in dict.fromkeys(one.compression for one in entered)
    }
    banks = {
        (context, compression): ChunkBank(
            model,
            passages,
            codecs[compression],
            lambda done, total: say(f"computing chunk {done:,} of {total:,}"),
            context,
            compression,
        )
        for context, compression in dict.fromkeys((one.context, one.compression) for one in entered)
    }
    judge = _Judge(banks, Answerer(model, options.max_tokens), links)
    judged: dict[Contestant, list[Judgement]] = {contestant: [] for contestant in entered}
    # The first forward pays for what every later one finds ready; let it not count.
    judge.judge(*prompts[0], entered)
    started = time.perf_counter()
    for done, (question, prompt) in enumerate(prompts):
        say(progress(done, len(prompts), time.perf_counter() - started))
        for contestant, judgement in zip(
            entered, judge.judge(question, prompt, entered), strict=True
        ):
            judged[contestant].append(judgement)
    return judged, left_out


def _links(options: QualityOptions, model: KVModel) -> LinkTokens | None:
    """Return the links that take part, on the model."""
    return ChosenLinks(options.links, lambda: model.folder, lambda: model).on_model


def _texts_to_fit(options: QualityOptions, judged: list[str]) -> list[str]:
    """Return what codecs are fitted to: texts that are not judged, where there are enough.

    For generated questions these are documents of another split. For a file they are the texts of
    its other questions; if those are few, the judged texts too, as an index is fitted to its own.
    """
    if options.data == GENERATED:
        corpus = generate_corpus(options.seed, "train", 500, options.num_documents)
        return [paragraph for document in corpus.documents for paragraph in document.paragraphs]
    known = set(judged)
    others = [
        text
        for question in load_questions(options.data)
        for text in question.texts
        if text not in known
    ]
    return others if sum(map(len, others)) >= _LEAST_CHARACTERS_TO_FIT else judged


def _of_kind(judgements: Sequence[Judgement], kind: str) -> list[Judgement]:
    """Return the judgements that a row is made of."""
    if kind != OVERALL:
        return [one for one in judgements if one.question_type == kind]
    # What the prompt cannot answer is another task; it is counted with the rest only if all is so.
    return [one for one in judgements if one.document_match is None] or list(judgements)


def _twin(
    judged: Mapping[Contestant, list[Judgement]], contestant: Contestant, kind: str
) -> list[Judgement] | None:
    """Return what the same contestant made of the same questions with the full cache."""
    if contestant.eviction == NO_EVICTION or contestant.with_full_cache not in judged:
        return None
    return _of_kind(judged[contestant.with_full_cache], kind)


def _types(judgements: Sequence[Judgement]) -> list[str]:
    kinds = sorted({judgement.question_type for judgement in judgements} - {"", OVERALL})
    return [OVERALL, *kinds]


# Context and compression.
_BankName = tuple[str, str]


class _Judge:
    def __init__(
        self, banks: Mapping[_BankName, ChunkBank], answerer: Answerer, links: LinkTokens | None
    ) -> None:
        self._banks = banks
        self._links = links
        self._model = next(iter(banks.values())).model
        self._answerer = answerer

    def judge(
        self, question: JudgedQuestion, prompt: RenderedPrompt, entered: Sequence[Contestant]
    ) -> list[Judgement]:
        """Return one judgement a contestant on one question."""
        started = time.perf_counter()
        token_ids = prompt.token_ids(self._model.tokenizer)
        tokenise_seconds = time.perf_counter() - started
        layouts: dict[_BankName, Layout] = {}
        layout_seconds: dict[_BankName, float] = {}
        for name, bank in self._banks.items():
            started = time.perf_counter()
            layouts[name] = bank.compact(bank.lay_out(prompt, question.passages))
            layout_seconds[name] = time.perf_counter() - started
            assert layouts[name].plain_token_ids == tuple(token_ids), (
                "a cache never changes what is asked"
            )
        reference = self._answerer.reference(token_ids)
        deviation = cache(partial(self._true_deviation, layouts))
        reference_scores = self._score(question, reference)
        judgements = []
        fused_as: Contestant | None = None
        for contestant in entered:
            name = (contestant.context, contestant.compression)
            bank, layout = self._banks[name], layouts[name]
            links = self._links if contestant.linked else None
            if links is not None:
                layout = insert_links(layout, links.header)
            if contestant.with_full_cache != fused_as:
                fused = self._answerer.fuse(
                    layout,
                    bank.opener(contestant.codec),
                    contestant.policy_for(partial(deviation, name, contestant.codec)),
                    links,
                )
                fused_as = contestant.with_full_cache
            eviction = make_eviction(contestant.eviction)
            given = self._answerer.answer(fused, reference, eviction)
            stored_bytes, stored_tokens = bank.stored(contestant.codec, question.passages)
            report = given.report
            judgements.append(
                Judgement(
                    question_type=question.type,
                    given=self._score(question, given),
                    reference=reference_scores,
                    kl=given.kl,
                    agrees=given.agrees,
                    ttft_seconds=layout_seconds[name] + given.ttft_seconds,
                    plain_ttft_seconds=tokenise_seconds + reference.ttft_seconds,
                    num_recomputed=report.num_recomputed,
                    num_found=report.num_recomputed + report.num_reused,
                    num_cached=report.num_cached,
                    num_prompt=report.num_tokens,
                    num_rows=sum(report.rows_by_layer) + report.rows_asked,
                    work_share=report.work_share,
                    stored_bytes=stored_bytes,
                    stored_tokens=stored_tokens,
                    kept_share=1.0 if report.eviction is None else report.eviction.prompt_share,
                    document_match=self._document_match(question, given),
                    reference_document_match=self._document_match(question, reference),
                )
            )
        return judgements

    def _true_deviation(
        self, layouts: Mapping[_BankName, Layout], name: _BankName, codec: str
    ) -> TrueDeviation:
        opener = self._banks[name].opener(codec)
        return TrueDeviation.of(self._model, layouts[name], opener)

    def _text(self, question: JudgedQuestion, answer: ReferenceAnswer | FusedAnswer) -> str:
        return self._answerer.text(answer.token_ids, first_line_only=not question.is_summary)

    def _document_match(
        self, question: JudgedQuestion, answer: ReferenceAnswer | FusedAnswer
    ) -> float | None:
        if not question.document_answers:
            return None
        return exact_match(self._text(question, answer), question.document_answers)

    def _score(self, question: JudgedQuestion, answer: ReferenceAnswer | FusedAnswer) -> TextScores:
        text = self._text(question, answer)
        return TextScores(
            exact_match=exact_match(text, question.answers),
            strict_match=metrics.strict_match(text, question.answers),
            substring_match=metrics.substring_match(text, question.answers),
            f1=metrics.token_f1(text, question.answers),
            rouge_l=metrics.rouge_l(text, question.answers) if question.is_summary else None,
        )
