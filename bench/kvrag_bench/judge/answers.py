"""The reference answer by full prefill, and its comparison with a policy's answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kvrag.engine.text_stream import end_ids
from kvrag.eviction.base import EvictionPolicy
from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.layout import Layout
from kvrag.fusion.links import LinkTokens
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.repair import Repair
from kvrag.fusion.report import FusionReport
from kvrag.kvcache import FusedKV
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_bench.judge.continuing import Continuation, EvictingContinuation, FullContinuation
from kvrag_bench.judge.looks import Looks

MAX_CANDIDATE_TOKENS = 48
"""Tokens of a candidate answer that are scored; the rest of a longer one is left out."""

# Longer endings find the same places; more tokens cost more than they are likely to save.
_MAX_ENDING, _MAX_GUESSED = 4, 12


@dataclass(frozen=True)
class ReferenceAnswer:
    """The answer by full prefill.

    Attributes
    ----------
    token_ids
        Greedy answer of A tokens, with the end token if there is one.
    log_probs
        ``[A, vocabulary]`` float32: the distribution that each token was chosen from.
    ttft_seconds
        Time of plain Transformers from token ids to the first token.
    candidates
        Token ids of other answers to score.
    scores
        Their mean log-probability a token.
    """

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor
    ttft_seconds: float
    candidates: tuple[tuple[int, ...], ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """How far a prompt's distributions are from full prefill's.

    Attributes
    ----------
    kl
        KL(reference || prompt) in nats at each of the reference's A tokens, given those before.
    likeliest, agrees
        The likeliest token at each of those positions, and whether it is the reference's.
    scores
        Mean log-probability a token of each of the reference's candidates.
    """

    kl: tuple[float, ...]
    likeliest: tuple[int, ...]
    agrees: tuple[bool, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class FusedAnswer:
    """The model's answer over fused KV.

    Attributes
    ----------
    comparison
        How far it is from the reference.
    token_ids
        The policy's greedy answer, with the end token if there is one; None if nobody asked.
    ttft_seconds
        Time of fusion, from the layout to the first token.
    report
        The report of the fusion.
    """

    comparison: Comparison
    token_ids: tuple[int, ...] | None
    ttft_seconds: float
    report: FusionReport


@dataclass(frozen=True)
class TimedPrompt:
    """A fused prompt, and the seconds from its layout to the first token."""

    fused: FusedPrompt
    seconds: float


class Answerer:
    """Answers greedily with one model.

    Parameters
    ----------
    model
        The model.
    max_tokens
        The largest number of tokens in an answer.
    """

    def __init__(self, model: KVModel, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._ends = end_ids(model.hf.generation_config, model.tokenizer)

    @torch.no_grad()
    def reference(
        self, token_ids: Sequence[int], candidates: Sequence[Sequence[int]] = ()
    ) -> ReferenceAnswer:
        """Answer by the model's own forward pass over the whole prompt.

        Parameters
        ----------
        candidates
            Token ids of other answers to score, each of at least one token.
        """
        limit = self._limit(len(token_ids))
        kept = tuple(tuple(one[:MAX_CANDIDATE_TOKENS]) for one in candidates)
        kv = self._buffer(len(token_ids), kept)
        first, seconds = self._prefill(kv, token_ids)
        going_on = FullContinuation(self._model, kv)
        others = going_on.score([one[:-1] for one in kept])
        answer = [int(first.argmax())]
        rows = self._finish(going_on, answer, limit, [*kept, token_ids])
        return ReferenceAnswer(
            tuple(answer),
            torch.stack([first, *rows]).float().log_softmax(-1),
            seconds,
            kept,
            _scores(first, others, kept),
        )

    @torch.no_grad()
    def compare_plain(self, token_ids: Sequence[int], reference: ReferenceAnswer) -> Comparison:
        """Compare the model's own forward pass over another prompt, or of another model."""
        kv = self._buffer(len(token_ids), (reference.token_ids, *reference.candidates))
        first, _ = self._prefill(kv, token_ids)
        return compare(FullContinuation(self._model, kv), first, reference)

    def _prefill(self, kv: FusedKV, token_ids: Sequence[int]) -> tuple[torch.Tensor, float]:
        """Fill a buffer; return the first token's logits, and the seconds it took."""
        with self._model.lock:
            fed = torch.tensor([list(token_ids)], device=self._model.device)
            started = time.perf_counter()
            output = self._model.hf(
                input_ids=fed,
                **{CACHE_ARGUMENT: FusedCache(kv, 0)},
                use_cache=True,
                logits_to_keep=1,
            )
            int(output.logits[0, -1].argmax())
            seconds = time.perf_counter() - started
        logits: torch.Tensor = output.logits[0, -1]
        return logits, seconds

    @torch.no_grad()
    def fuse(
        self,
        layout: Layout,
        open_kv: OpenKV,
        policy: Repair | RecomputePolicy,
        links: LinkTokens | None = None,
        reference: ReferenceAnswer | None = None,
        looks: Looks | None = None,
    ) -> TimedPrompt:
        """Fuse a prompt.

        Parameters
        ----------
        links
            The layout's link tokens, on the model's device.
        reference
            What the answer will be compared with: its candidates need room too.
        looks
            What policies that look have seen on this prompt; None: nobody shares that. Its time
            counts for each of them.
        """
        model, num_prompt = self._model, len(layout.token_ids)
        candidates = () if reference is None else (reference.token_ids, *reference.candidates)
        repair = Repair(policy) if isinstance(policy, RecomputePolicy) else policy
        sharing = repair if looks is None else looks.share(repair)
        started = time.perf_counter()
        fused = fuse(model, layout, open_kv, sharing, self._buffer(num_prompt, candidates), links)
        int(fused.logits.argmax())
        seconds = time.perf_counter() - started
        if looks is not None:
            fused, saved = looks.settle(fused, repair)
            seconds += saved
        return TimedPrompt(fused, seconds)

    @torch.no_grad()
    def answer(
        self,
        prompt: TimedPrompt,
        reference: ReferenceAnswer,
        eviction: EvictionPolicy | None = None,
        *,
        in_own_words: bool = True,
        others: Sequence[Sequence[int]] = (),
    ) -> FusedAnswer:
        """Answer over fused KV; measure how far each token is from the reference's.

        Parameters
        ----------
        prompt
            The fused prompt; it may be answered again, with another eviction.
        eviction
            Which tokens to evict after the prompt and during the answer; None evicts nothing.
        in_own_words
            Also generate the greedy answer, which takes longer than the comparison.
        others
            Other answers to the question: one that resembles them is written sooner.
        """
        model, fused = self._model, prompt.fused
        report = fused.report
        going_on: Continuation = FullContinuation(model, fused)
        if eviction is not None:
            going_on = EvictingContinuation(model, fused, eviction)
        comparison = compare(going_on, fused.logits, reference)
        if isinstance(going_on, EvictingContinuation):
            report = replace(report, eviction=going_on.report())
        own_answer = None
        if in_own_words:
            texts = [reference.token_ids, *others, *reference.candidates]
            texts.append(fused.layout.plain_token_ids)
            with going_on.answering():
                own_answer = self._own_answer(
                    going_on, fused.kv.num_tokens, comparison, reference, texts
                )
        return FusedAnswer(comparison, own_answer, prompt.seconds, report)

    def _own_answer(
        self,
        going_on: Continuation,
        num_prompt: int,
        comparison: Comparison,
        reference: ReferenceAnswer,
        texts: Sequence[Sequence[int]],
    ) -> tuple[int, ...]:
        """Return the greedy answer, decoded only from where it leaves the reference's.

        Up to that point both get the same tokens, so the teacher-forced pass equals decoding.
        """
        if all(comparison.agrees):
            return reference.token_ids
        num_equal = comparison.agrees.index(False)
        answer = [*reference.token_ids[:num_equal], comparison.likeliest[num_equal]]
        self._finish(going_on, answer, self._limit(num_prompt), texts)
        return tuple(answer)

    def _finish(
        self,
        going_on: Continuation,
        answer: list[int],
        limit: int,
        texts: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Append the likeliest tokens to an answer, up to its end or the limit.

        A forward pass over a few tokens takes hardly longer than one over a single token. So it
        also computes what may follow, as another text goes on (prompt lookup decoding). The answer
        takes what proves to be the likeliest.

        Returns
        -------
        list of tensor
            For each token appended, the logits ``[V]`` that it was chosen by.
        """
        rows: list[torch.Tensor] = []
        while answer[-1] not in self._ends and len(answer) < limit:
            guessed: Sequence[int] = ()
            if going_on.can_guess:
                guessed = guess(answer, texts)[: limit - 1 - len(answer)]
            after = going_on.feed([*answer, *guessed], len(answer) - 1)
            for row, guessed_next in zip(after, [*guessed, None], strict=True):
                rows.append(row)
                answer.append(int(row.argmax()))
                if answer[-1] != guessed_next or answer[-1] in self._ends:
                    break
        return rows

    def text(self, token_ids: Sequence[int], *, first_line_only: bool) -> str:
        """Return an answer's text without end and special tokens.

        Parameters
        ----------
        token_ids
            The answer.
        first_line_only
            Drop what a model without a chat template adds, such as the next question.
        """
        text = self._model.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        stripped = str(text).strip()
        return stripped.split("\n", 1)[0].rstrip() if first_line_only else stripped

    def _limit(self, num_prompt: int) -> int:
        return min(self._max_tokens, self._model.max_positions - num_prompt)

    def _buffer(self, num_prompt: int, answers: Sequence[Sequence[int]]) -> FusedKV:
        """Return a buffer for a prompt, its answer, and answers that are scored side by side."""
        room = max(self._limit(num_prompt), sum(map(len, answers)))
        model = self._model
        return FusedKV(model.spec, num_prompt, num_prompt + room, model.device)


def guess(answer: Sequence[int], texts: Iterable[Sequence[int]]) -> Sequence[int]:
    """Return tokens that may follow an answer: those after its last tokens in another text.

    The longest ending counts that any text has; of several texts the first, of several places the
    last.
    """
    for length in range(min(_MAX_ENDING, len(answer)), 0, -1):
        ending = list(answer[-length:])
        for text in texts:
            for begin in range(len(text) - length - 1, -1, -1):
                if list(text[begin : begin + length]) == ending:
                    return text[begin + length : begin + length + _MAX_GUESSED]
    return ()


def compare(going_on: Continuation, first: torch.Tensor, reference: ReferenceAnswer) -> Comparison:
    """Compare what follows a prompt with full prefill.

    Parameters
    ----------
    going_on
        Continues after the prompt.
    first
        ``[V]``: the logits of the first answer token.
    reference
        Full prefill's answer.
    """
    answer, candidates = reference.token_ids, reference.candidates
    after, *others = going_on.score([answer[:-1], *(one[:-1] for one in candidates)])
    logits = torch.cat([first[None], after])
    likeliest = tuple(logits.argmax(-1).tolist())
    divergence = torch.nn.functional.kl_div(
        logits.float().log_softmax(-1), reference.log_probs, reduction="none", log_target=True
    ).sum(-1)
    return Comparison(
        # Rounding can put the divergence of equal distributions slightly below zero.
        kl=tuple(max(0.0, value) for value in divergence.tolist()),
        likeliest=likeliest,
        agrees=tuple(one == other for one, other in zip(likeliest, answer, strict=True)),
        scores=_scores(first, others, candidates),
    )


def _scores(
    first: torch.Tensor, others: Sequence[torch.Tensor], candidates: Sequence[Sequence[int]]
) -> tuple[float, ...]:
    """Return the mean log-probability of each candidate's tokens."""
    means = []
    for after, token_ids in zip(others, candidates, strict=True):
        log_probs = torch.cat([first[None], after]).float().log_softmax(-1)
        places = torch.arange(len(token_ids))
        # What has no tokens is certain.
        means.append(float(log_probs[places, list(token_ids)].mean()) if token_ids else 0.0)
    return tuple(means)
