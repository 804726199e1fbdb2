"""Comparison of policies with full prefill, question by question."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvrag.codec.base import Codec
from kvrag.errors import ParameterError
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.controller import LoadingController, takes_ratio
from kvrag.fusion.layout import Layout
from kvrag.fusion.linked_rows import insert_links
from kvrag.fusion.links import LinkTokens
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import check_ratio
from kvrag.fusion.repair import Repair, make_repair
from kvrag.models.kv_model import KVModel
from kvrag_bench.judge.answers import Answerer, Comparison, ReferenceAnswer
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.effort import Effort, progress
from kvrag_bench.judge.judgements import Asked, Contestant, Judgement, Reply
from kvrag_bench.judge.looks import Looks
from kvrag_bench.judge.questions import JudgedQuestion, render

# Bytes of KV that are kept at a time: chunks that several of a run's questions share are computed
# once, and a long run does not fill the memory.
_BANK_BYTES = 2 << 30
# English text has about four characters a token, other text fewer.
_CHARACTERS_A_TOKEN = 3


def check_policies(policies: Sequence[str], ratios: Sequence[float]) -> None:
    """Raise ParameterError unless each policy can be judged at each ratio.

    Policies that take a ratio need at least one.
    """
    for name in policies:
        if name.partition(":")[0] == LoadingController.name:
            raise ParameterError(
                "policy 'auto' cannot be judged: it chooses among the others ('kvrag calibrate')"
            )
        make_repair(name)
    for ratio in ratios:
        check_ratio(ratio)
    if not ratios and any(map(takes_ratio, policies)):
        raise ParameterError(
            "no ratio was given: give one, or choose policy 'none' or policies that name their "
            "budget ('query:ratio=0.1', 'boundary:tokens=8')"
        )


ChooseRepair = Callable[[Contestant, Layout, OpenKV], Repair]
"""Returns a contestant's policy for one prompt and its stored chunks."""

JudgeAside = Callable[[Asked, Contestant, ReferenceAnswer], tuple[Comparison, float] | None]
"""Compares a contestant that reuses nothing with full prefill, and returns its share of full
prefill's work; None for all others."""


def _repair_of(contestant: Contestant, layout: Layout, open_kv: OpenKV) -> Repair:  # noqa: ARG001
    return make_repair(contestant.policy, ratio=contestant.ratio)


class Judge:
    """Judges contestants on questions: each chunk is encoded once, each prompt prefilled once.

    Parameters
    ----------
    model
        The model.
    codecs
        The codecs that store the chunks.
    answerer
        Answers with the model.
    links
        Link tokens of the contestants that have them, on the model.
    choose_repair
        Chooses each contestant's policy.
    judge_aside
        Judges contestants that reuse nothing.
    is_generated
        Whether contestants write a whole answer to a question that full prefill answers with a
        text. The comparison of distributions does without.
    say
        Receives a line whenever there is something new to say.
    similar
        The texts of context ``similar`` (`ChunkBank`).
    writer
        The writer of the contestants that have one, on the model.

    Attributes
    ----------
    effort
        What all this has cost.
    """

    def __init__(
        self,
        model: KVModel,
        codecs: Sequence[Codec],
        answerer: Answerer,
        *,
        links: LinkTokens | None = None,
        choose_repair: ChooseRepair = _repair_of,
        judge_aside: JudgeAside = lambda *_: None,
        is_generated: Callable[[JudgedQuestion, str], bool] = lambda *_: True,
        say: Callable[[str], None] = lambda _: None,
        similar: Mapping[str, tuple[int, ...]] | None = None,
        writer: LinkTokens | None = None,
    ) -> None:
        self._model = model
        self._writer = writer
        self._similar = similar
        self._codecs = codecs
        self._answerer = answerer
        self._links = links
        self._choose_repair = choose_repair
        self._judge_aside = judge_aside
        self._is_generated = is_generated
        self._say = say
        self._banks: dict[tuple[str, bool], ChunkBank] = {}  # by context, and whether written
        self.effort = Effort()

    def each(
        self, asked: Sequence[Asked], most: int | None = None
    ) -> Iterator[tuple[Asked, dict[Contestant, Judgement]]]:
        """Yield each question with one judgement a contestant, in order.

        Parameters
        ----------
        most
            The most questions whose chunks are encoded before the first of them is asked; None
            for as many as the memory holds.
        """
        num_characters = sum(len(one.prompt.text) for one in asked)
        num_read = 0
        is_warm = False
        for block in self._blocks(asked, most or len(asked)):
            started = time.perf_counter()
            self._open_banks(block)
            self.effort.encoding_seconds += time.perf_counter() - started
            if not is_warm:
                # The first forward pays for what every later one finds ready; let it not count.
                self._judge(self._shortened(block[0]))
                is_warm = True
            for one in block:
                effort, share = self.effort, num_read / num_characters
                self._say(progress(effort.num_questions, len(asked), effort.judging_seconds, share))
                started = time.perf_counter()
                judgements = self._judge(one)
                effort.judging_seconds += time.perf_counter() - started
                effort.plain_seconds += next(iter(judgements.values())).plain_ttft_seconds
                effort.num_judgements += len(judgements)
                effort.num_questions += 1
                num_read += len(one.prompt.text)
                yield one, judgements

    def _blocks(self, asked: Sequence[Asked], most: int) -> Iterator[list[Asked]]:
        """Yield runs of at most `most` questions whose chunks fit the memory together."""
        a_character = self._model.spec.bytes_per_token / _CHARACTERS_A_TOKEN
        block: list[Asked] = []
        texts: set[str] = set()
        for one in asked:
            more = texts.union(one.question.texts)
            num_banks = len(_contexts([*block, one]))
            is_full = num_banks * a_character * sum(map(len, more)) > _BANK_BYTES
            if block and (is_full or len(block) == most):
                yield block
                block, more = [], set(one.question.texts)
            block.append(one)
            texts = more
        if block:
            yield block

    def _open_banks(self, asked: Sequence[Asked]) -> None:
        passages = [passage for one in asked for passage in one.question.passages]
        self._banks = {}
        for context, written in _contexts(asked):
            self._banks[context, written] = ChunkBank(
                self._model,
                passages,
                self._codecs,
                lambda done, total: self._say(f"computing chunk {done:,} of {total:,}"),
                context,
                # Both may want the same record, as after a filler and alone.
                next(iter(self._banks.values()), None),
                self._similar,
                self._writer if written else None,
            )

    def _shortened(self, asked: Asked) -> Asked:
        """Return a question with only the first of its chunks, and of those who are judged."""
        question = replace(
            asked.question, texts=asked.question.texts[:1], before=asked.question.before[:1]
        )
        text = asked.prompt.text
        for passage in asked.question.texts[1:]:
            text = text.replace(f"{passage}\n\n", "")
        prompt = replace(asked.prompt, text=text)
        return Asked(question, prompt, asked.contestants[:1])

    def _judge(self, asked: Asked) -> dict[Contestant, Judgement]:
        question, prompt = asked.question, asked.prompt
        started = time.perf_counter()
        token_ids = prompt.token_ids(self._model.tokenizer)
        tokenise_seconds = time.perf_counter() - started
        layouts: dict[tuple[str, bool], Layout] = {}
        layout_seconds: dict[tuple[str, bool], float] = {}
        for name in _contexts([asked]):
            started = time.perf_counter()
            bank = self._banks[name]
            layouts[name] = bank.lay_out(prompt, question.passages)
            layout_seconds[name] = time.perf_counter() - started
            bank.require(layouts[name])
            assert layouts[name].plain_token_ids == tuple(token_ids), (
                "a cache never changes what is asked"
            )
        candidates = [
            prompt.answer_ids(self._model.tokenizer, text)
            for text in (question.answers[0], *question.choices)
        ]
        answer = self._answerer.reference(token_ids, candidates)
        reference = self._reply(question, answer.token_ids, answer.scores)
        assert reference.text is not None
        is_generated = self._is_generated(question, reference.text)
        plain_seconds = tokenise_seconds + answer.ttft_seconds
        judgements: dict[Contestant, Judgement] = {}
        fused_as: Contestant | None = None
        # The same for all policies over the same records and links.
        looks: dict[Contestant, Looks] = {}
        texts: list[tuple[int, ...]] = []
        for contestant in asked.contestants:
            aside = self._judge_aside(asked, contestant, answer)
            if aside is not None:
                comparison, work_share = aside
                judgements[contestant] = Judgement(
                    question=question,
                    given=self._reply(question, None, comparison.scores),
                    reference=reference,
                    kl=comparison.kl,
                    agrees=comparison.agrees,
                    ttft_seconds=plain_seconds,
                    plain_ttft_seconds=plain_seconds,
                    num_recomputed=0,
                    num_found=0,
                    num_cached=0,
                    num_prompt=len(token_ids),
                    num_rows=0,
                    work_share=work_share,
                    stored_bytes=0,
                    stored_tokens=0,
                )
                continue
            name = contestant.context, contestant.written
            bank, layout = self._banks[name], layouts[name]
            links = self._links if contestant.linked else None
            opener = bank.opener(contestant.codec)
            if contestant.with_full_cache != fused_as:
                repair = self._choose_repair(contestant, layout, opener)
                if links is not None:
                    layout = insert_links(layout, links.header)
                stored = replace(contestant.with_full_cache, policy="", ratio=None)
                seen = looks.setdefault(stored, Looks(self._model.spec.num_layers))
                fused = self._answerer.fuse(layout, opener, repair, links, answer, seen)
                fused_as = contestant.with_full_cache
            given = self._answerer.answer(
                fused,
                answer,
                make_eviction(contestant.eviction),
                in_own_words=is_generated,
                others=texts,
            )
            if given.token_ids is not None and given.token_ids not in texts:
                texts.append(given.token_ids)
            stored_bytes, stored_tokens = bank.stored(contestant.codec, question.passages)
            report = given.report
            judgements[contestant] = Judgement(
                question=question,
                given=self._reply(question, given.token_ids, given.comparison.scores),
                reference=reference,
                kl=given.comparison.kl,
                agrees=given.comparison.agrees,
                ttft_seconds=layout_seconds[name] + given.ttft_seconds,
                plain_ttft_seconds=plain_seconds,
                num_recomputed=report.num_recomputed,
                num_found=report.num_recomputed + report.num_reused,
                num_cached=report.num_cached,
                num_prompt=report.num_tokens,
                num_rows=sum(report.rows_by_layer) + report.rows_asked,
                work_share=report.work_share,
                stored_bytes=stored_bytes,
                stored_tokens=stored_tokens,
                kept_share=1.0 if report.eviction is None else report.eviction.prompt_share,
            )
        return judgements

    def _reply(
        self,
        question: JudgedQuestion,
        token_ids: Sequence[int] | None,
        scores: tuple[float, ...],
    ) -> Reply:
        text = None
        if token_ids is not None:
            text = self._answerer.text(token_ids, first_line_only=not question.is_summary)
        return Reply(text, scores[0], scores[1:])


def _contexts(asked: Iterable[Asked]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((c.context, c.written) for one in asked for c in one.contestants))


def prompts_that_fit(
    model: KVModel,
    questions: Sequence[JudgedQuestion],
    max_tokens: int,
    use_chat_template: bool,
    num_links: int = 0,
) -> list[Asked]:
    """Return the questions whose prompt and longest answer fit the model.

    Parameters
    ----------
    num_links
        Link tokens after each chunk. All prompts are the same set, those that fit with links.

    Raises
    ------
    ParameterError
        When no prompt fits.
    """
    kept = []
    lengths = []
    for question in questions:
        prompt = render(question.question, question.texts, model.tokenizer, use_chat_template)
        num_tokens = len(prompt.token_ids(model.tokenizer))
        if num_links:
            num_tokens += num_links * len(question.texts) + 2
        lengths.append(num_tokens)
        if num_tokens + max_tokens <= model.max_positions:
            kept.append(Asked(question, prompt))
    if not kept:
        raise ParameterError(
            f"none of the {len(questions)} prompts fits {model.name}: the shortest has "
            f"{min(lengths)} tokens, and {max_tokens} of the {model.max_positions} it holds are "
            "kept for the answer"
        )
    return kept
