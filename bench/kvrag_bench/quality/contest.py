"""`kvrag bench quality`: the run over all questions."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvrag.errors import ParameterError
from kvrag.eviction import NO_EVICTION
from kvrag.fusion.layout import Layout
from kvrag.fusion.linked_rows import LINKS_OFF, ChosenLinks
from kvrag.fusion.links import LinkTokens
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import NonePolicy
from kvrag.fusion.repair import Repair
from kvrag.ingest.contexts import SIMILAR, check_filler, parse_context
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag_bench.judge.answers import Answerer, Comparison, ReferenceAnswer
from kvrag_bench.judge.effort import Effort
from kvrag_bench.judge.judgements import Asked, Contestant, Judgement
from kvrag_bench.judge.judging import Judge, prompts_that_fit
from kvrag_bench.judge.questions import JudgedQuestion, render
from kvrag_bench.quality import metrics
from kvrag_bench.quality.codecs import fit_codecs
from kvrag_bench.quality.datasets import GENERATED, load_questions
from kvrag_bench.quality.entrants import (
    NO_DOCUMENT,
    NOISE_FLOOR,
    QualityOptions,
    contestants,
    controls,
    everything_again,
    label,
    load_asked,
    similar_passages,
)
from kvrag_bench.quality.oracle import TrueDeviation, policy_of
from kvrag_bench.quality.results import Results
from kvrag_bench.quality.retrieved import RETRIEVED
from kvrag_bench.quality.rows import OVERALL, QualityRow, RowName, make_row
from kvrag_corpus import generate_corpus

# Characters of text that codecs are fitted to: about 5,000 tokens.
_LEAST_CHARACTERS_TO_FIT = 20_000


def run_quality_bench(
    options: QualityOptions,
    on_progress: Callable[[str], None] | None = None,
    on_effort: Callable[[Effort], None] = lambda _: None,
) -> list[QualityRow]:
    """Judge every policy and codec against full prefill, on the same prompts.

    Token ids are the plain pipeline's, the same for all. The reference answers greedily with the
    model's own forward. Each contestant's distributions are taken after the reference's tokens and
    after the answers to choose from, in one pass. Its own greedy answer is scored as the
    reference's is.

    Parameters
    ----------
    options
        What to judge.
    on_progress
        Receives a line whenever there is something new to say.
    on_effort
        Receives what judging cost.

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
        LinkTokens.load(options.links)  # names a bad file before anything is computed
    if options.writer is not None:
        LinkTokens.load(options.writer, is_writer=True)
    say("reading the questions")
    questions = load_asked(options)
    if not isinstance(options.model, KVModel):
        load_tokenizer(options.model)  # fails in a moment where loading weights takes minutes
    say("loading the model")
    model = KVModel.load(options.model, device=options.device, compute=options.compute)
    if RETRIEVED in options.suite:
        room = model.max_positions - len(model.default_prefix_ids())
        for name in options.contexts:
            check_filler(parse_context(name), model.tokenizer, room, options.chunk_tokens)
    judged, left_out = judge_questions(model, questions, options, say, on_effort)
    file = "" if options.data == GENERATED else Path(options.data).name
    dataset = ", ".join(options.suite) or file or GENERATED
    if RETRIEVED in options.suite:
        dataset += f" from {file or 'the handbook'}"
    return [
        make_row(
            RowName(
                model=model.name,
                dataset=dataset,
                question_type=kind,
                policy=label(contestant),
                ratio=contestant.ratio,
                codec=contestant.codec,
                context=contestant.context,
                eviction=contestant.eviction,
            ),
            _of_kind(judgements, kind),
            plain_reuse=_beside(judged, contestant, kind, _plain_reuse(contestant)),
            full_cache=None
            if contestant.eviction == NO_EVICTION
            else _beside(judged, contestant, kind, contestant.with_full_cache),
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
    on_effort: Callable[[Effort], None] = lambda _: None,
) -> tuple[dict[Contestant, list[Judgement]], Counter[str]]:
    """Judge every contestant on every question whose prompt fits the model.

    Returns
    -------
    dict
        The judgements of each contestant, in the order of the questions.
    Counter
        Question types to the number of questions left out.

    Raises
    ------
    ParameterError
        When no prompt fits, or the options name no contestant.
    """
    run = _Run(model, questions, options, say)
    results = Results(options.out, run.settings, run.text_before)
    results.mend()
    run.judge(results)
    on_effort(run.effort)
    left_out = Counter(question.type for question in questions) - Counter(
        one.question.type for one in run.asked
    )
    judged: dict[Contestant, list[Judgement]] = {}
    for contestant in dict.fromkeys(c for one in run.asked for c in one.contestants):
        found = (
            results.find(one.question, contestant)
            for one in run.asked
            if contestant in one.contestants
        )
        judged[contestant] = [one for one in found if one is not None]
    return judged, left_out


class _Run:
    """What is asked of whom, and the judge."""

    def __init__(
        self,
        model: KVModel,
        questions: Sequence[JudgedQuestion],
        options: QualityOptions,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._options, self._say = model, options, say
        self._links = ChosenLinks(options.links, lambda: model.folder, lambda: model).on_model
        writer = options.writer
        self._writer = None if writer is None else LinkTokens.load(writer, is_writer=True).on(model)
        self._low = _in_bfloat16(model) if options.noise_floor else None
        entered = contestants(options, self._links is not None)
        everyone = [*entered, *controls(options, entered)]
        whole = everything_again(options, entered)
        fitting = prompts_that_fit(
            model,
            questions,
            options.max_tokens,
            options.use_chat_template,
            0 if self._links is None else self._links.header.num_links,
        )
        seen: set[str] = set()
        self.asked: list[Asked] = []
        for one in fitting:
            first = one.question.type not in seen
            seen.add(one.question.type)
            judged = dict.fromkeys([*everyone, *whole] if first else everyone)
            self.asked.append(replace(one, contestants=tuple(judged)))
        self._texts = [text for one in self.asked for text in one.question.texts]
        self._similar = similar_passages(options)
        self.effort = Effort()
        header = None if self._links is None else str(self._links.header)
        self.settings = {
            "compute": model.compute,
            "model": model.fingerprint,
            "prefix_ids": model.default_prefix_ids(),
            "max_tokens": options.max_tokens,
            "use_chat_template": options.use_chat_template,
            "links": header,
            "suite": bool(options.suite),
        }

    def text_before(self, question: JudgedQuestion, contestant: Contestant) -> str:
        """Return what `Results` wants: the text of a context that is chosen from a corpus."""
        by = self._writer.digest if self._writer is not None and contestant.written else ""
        if parse_context(contestant.context).name != SIMILAR:
            return by
        return by + repr([self._similar[text] for text in question.texts])

    def judge(self, results: Results) -> None:
        """Judge what is not among the results yet."""
        missing = []
        for one in self.asked:
            left = [c for c in one.contestants if results.find(one.question, c) is None]
            if left:
                missing.append(replace(one, contestants=tuple(left)))
        if not missing:
            return
        to_fit = _texts_to_fit(self._options, self._texts)
        judge = Judge(
            self._model,
            fit_codecs(self._model, self._options.codecs, to_fit, self._say),
            Answerer(self._model, self._options.max_tokens),
            links=self._links,
            choose_repair=_RepairOf(self._model),
            judge_aside=self._judge_aside,
            is_generated=_is_worth_an_answer if self._options.suite else lambda *_: True,
            say=self._say,
            similar=self._similar,
            writer=self._writer,
        )
        # Few questions over a large corpus share chunks: each is written as soon as it is judged.
        alone = RETRIEVED in self._options.suite
        for one, judgements in judge.each(missing, len(self._options.tops) if alone else None):
            results.add(one, judgements)
        self.effort = judge.effort

    def _judge_aside(
        self, asked: Asked, contestant: Contestant, reference: ReferenceAnswer
    ) -> tuple[Comparison, float] | None:
        if contestant.policy not in (NOISE_FLOOR, NO_DOCUMENT):
            return None
        tokenizer = self._model.tokenizer
        token_ids = asked.prompt.token_ids(tokenizer)
        if contestant.policy == NOISE_FLOOR:
            assert self._low is not None
            return Answerer(self._low, len(reference.token_ids)).compare_plain(
                token_ids, reference
            ), 1.0
        prompt = render(asked.question.question, (), tokenizer, self._options.use_chat_template)
        alone = prompt.token_ids(tokenizer)
        answerer = Answerer(self._model, len(reference.token_ids))
        return answerer.compare_plain(alone, reference), len(alone) / len(token_ids)


def _is_worth_an_answer(question: JudgedQuestion, text: str) -> bool:
    """Whether full prefill's text answers the question, or is to be compared as a summary."""
    return question.is_summary or bool(metrics.substring_match(text, question.answers))


class _RepairOf:
    """Chooses a contestant's policy; computes a prompt's true deviation once for all oracles."""

    def __init__(self, model: KVModel) -> None:
        self._model = model
        self._known: tuple[tuple[Layout, str], TrueDeviation] | None = None

    def __call__(self, contestant: Contestant, layout: Layout, open_kv: OpenKV) -> Repair:
        def deviation() -> TrueDeviation:
            about = (layout, contestant.codec)
            if self._known is None or self._known[0] != about:
                self._known = (about, TrueDeviation.of(self._model, layout, open_kv))
            return self._known[1]

        return policy_of(contestant, deviation)


def _in_bfloat16(model: KVModel) -> KVModel:
    if model.spec.dtype == torch.bfloat16:
        raise ParameterError(
            f"noise floor: {model.name} is in bfloat16 already, so there is nothing to compare"
        )
    return KVModel(copy.deepcopy(model.hf).bfloat16(), model.tokenizer, name=model.name)


def _texts_to_fit(options: QualityOptions, judged: list[str]) -> list[str]:
    """Return what codecs are fitted to: texts that are not judged, where there are enough.

    For generated questions these are documents of another split. For a file they are the texts of
    its other questions; if those are few, the judged texts too, as an index is fitted to its own.
    """
    if RETRIEVED in options.suite:
        return judged  # as an index is fitted to its own
    if options.suite:
        # Another seed's questions are about other people and numbers.
        return [
            text
            for one in load_asked(replace(options, seed=options.seed + 1))
            for text in one.texts
        ]
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
        return [one for one in judgements if one.question.type == kind]
    # What the prompt cannot answer is another task; it is counted with the rest only if all is so.
    return [one for one in judgements if not one.question.document_answers] or list(judgements)


def _plain_reuse(contestant: Contestant) -> Contestant:
    """Return plain reuse of chunks that are encoded alone and stored by the same codec."""
    return Contestant(NonePolicy.name, None, contestant.codec)


def _beside(
    judged: Mapping[Contestant, list[Judgement]],
    contestant: Contestant,
    kind: str,
    other: Contestant,
) -> list[Judgement] | None:
    """Return what another contestant made of a contestant's questions, if it took part."""
    if other not in judged:
        return None
    answered = {one.question: one for one in judged[other]}
    return [answered[one.question] for one in _of_kind(judged[contestant], kind)]


def _types(judgements: Sequence[Judgement]) -> list[str]:
    kinds = sorted({judgement.question.type for judgement in judgements} - {"", OVERALL})
    return [OVERALL, *kinds]
