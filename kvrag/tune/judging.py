"""Comparison of policies with full prefill, question by question."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError
from kvrag.fusion.controller import LoadingController, takes_ratio
from kvrag.fusion.policies.base import check_ratio
from kvrag.fusion.repair import make_repair
from kvrag.models.kv_model import KVModel
from kvrag.tune.answers import Answerer
from kvrag.tune.bank import ChunkBank
from kvrag.tune.exact_match import exact_match
from kvrag.tune.questions import JudgedQuestion, RenderedPrompt, render

Entrant = tuple[str, float | None]
"""A policy and its ratio; None for policies that take none, or include it in their name."""

_CODEC = "raw"


@dataclass(frozen=True)
class Trial:
    """One question under one policy, compared with full prefill.

    Attributes
    ----------
    exact_match, reference_exact_match
        Score of the policy's answer, and of full prefill's.
    agrees
        Whether the policy's likeliest token is the same, at each token of full prefill's answer.
    ttft_seconds
        Time from the prompt's text to the first token.
    num_rows
        Rows computed, summed over layers.
    num_cached
        Prompt tokens whose stored KV was kept.
    """

    exact_match: float
    reference_exact_match: float
    agrees: Sequence[bool]
    ttft_seconds: float
    num_rows: int
    num_cached: int


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


def judge_policies(
    model: KVModel,
    questions: Sequence[JudgedQuestion],
    policies: Sequence[str],
    ratios: Sequence[float],
    *,
    max_tokens: int,
    use_chat_template: bool,
    say: Callable[[str], None],
) -> dict[Entrant, list[Trial]]:
    """Judge each policy at each ratio, on every question whose prompt fits the model.

    Chunks are stored as the model computes them, without link tokens after them.

    Raises
    ------
    ParameterError
        When a policy or a ratio cannot be judged, or no prompt fits.
    """
    check_policies(policies, ratios)
    pairs = [
        (policy, ratio)
        for policy in policies
        for ratio in (ratios if takes_ratio(policy) else [None])
    ]
    judged: dict[Entrant, list[Trial]] = {pair: [] for pair in pairs}
    prompts = prompts_that_fit(model, questions, max_tokens, use_chat_template)
    bank = ChunkBank(
        model,
        [passage for question, _ in prompts for passage in question.passages],
        [get_codec(_CODEC)],
        lambda done, total: say(f"computing chunk {done:,} of {total:,}"),
    )
    answerer = Answerer(model, max_tokens)
    # The first forward pass also pays for one-time setup; do not count it.
    _judge(bank, answerer, *prompts[0], list(judged))
    started = time.perf_counter()
    for done, (question, prompt) in enumerate(prompts):
        say(progress(done, len(prompts), time.perf_counter() - started))
        trials = _judge(bank, answerer, question, prompt, list(judged))
        for pair, trial in zip(judged, trials, strict=True):
            judged[pair].append(trial)
    return judged


def _judge(
    bank: ChunkBank,
    answerer: Answerer,
    question: JudgedQuestion,
    prompt: RenderedPrompt,
    pairs: Sequence[Entrant],
) -> list[Trial]:
    def score(token_ids: Sequence[int]) -> float:
        text = answerer.text(token_ids, first_line_only=not question.is_summary)
        return exact_match(text, question.answers)

    started = time.perf_counter()
    layout = bank.lay_out(prompt, question.passages)
    layout_seconds = time.perf_counter() - started
    reference = answerer.reference(prompt.token_ids(bank.model.tokenizer))
    reference_score = score(reference.token_ids)
    trials = []
    for policy, ratio in pairs:
        fused = answerer.fuse(layout, bank.opener(_CODEC), make_repair(policy, ratio=ratio))
        given = answerer.answer(fused, reference)
        report = given.report
        trials.append(
            Trial(
                exact_match=score(given.token_ids),
                reference_exact_match=reference_score,
                agrees=given.agrees,
                ttft_seconds=layout_seconds + given.ttft_seconds,
                num_rows=sum(report.rows_by_layer) + report.rows_asked,
                num_cached=report.num_cached,
            )
        )
    return trials


def prompts_that_fit(
    model: KVModel,
    questions: Sequence[JudgedQuestion],
    max_tokens: int,
    use_chat_template: bool,
    num_links: int = 0,
) -> list[tuple[JudgedQuestion, RenderedPrompt]]:
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
            kept.append((question, prompt))
    if not kept:
        raise ParameterError(
            f"none of the {len(questions)} prompts fits {model.name}: the shortest has "
            f"{min(lengths)} tokens, and {max_tokens} of the {model.max_positions} it holds are "
            "kept for the answer"
        )
    return kept


def progress(num_done: int, num_questions: int, seconds: float) -> str:
    """Return a line with the number of the current question and the remaining time."""
    line = f"question {num_done + 1:,} of {num_questions:,}"
    if num_done < 5:
        return line
    left = seconds / num_done * (num_questions - num_done)
    return f"{line}, {left / 60:.0f} min left" if left > 90 else f"{line}, {left:.0f} s left"
