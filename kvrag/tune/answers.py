"""The reference answer by full prefill, and its comparison with a policy's answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from kvrag.models.kv_model import KVModel
from kvrag.tune.continuing import (
    Continuation,
    EvictingContinuation,
    FullContinuation,
)


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
    """

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor
    ttft_seconds: float


@dataclass(frozen=True)
class FusedAnswer:
    """The model's answer over fused KV.

    Attributes
    ----------
    token_ids
        The policy's greedy answer, with the end token if there is one.
    kl
        KL(reference || fused) in nats at each of the reference's A tokens, given those before.
    agrees
        Whether the likeliest token at each of those positions is the reference's.
    ttft_seconds
        Time of fusion, from the layout to the first token.
    report
        The report of the fusion.
    """

    token_ids: tuple[int, ...]
    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
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
    def reference(self, token_ids: Sequence[int]) -> ReferenceAnswer:
        """Answer by the model's own forward pass over the whole prompt."""
        limit = self._limit(len(token_ids))
        rows: list[torch.Tensor] = []
        answer: list[int] = []
        with self._model.lock:
            fed = torch.tensor([list(token_ids)], device=self._model.device)
            started = time.perf_counter()
            output = self._model.hf(input_ids=fed, use_cache=True, logits_to_keep=1)
            token = int(output.logits[0, -1].argmax())
            seconds = time.perf_counter() - started
            while True:
                rows.append(output.logits[0, -1].float())
                answer.append(token)
                if token in self._ends or len(answer) == limit:
                    break
                fed = torch.tensor([[token]], device=self._model.device)
                output = self._model.hf(
                    input_ids=fed, past_key_values=output.past_key_values, use_cache=True
                )
                token = int(output.logits[0, -1].argmax())
        return ReferenceAnswer(tuple(answer), torch.stack(rows).log_softmax(-1), seconds)

    @torch.no_grad()
    def fuse(
        self,
        layout: Layout,
        open_kv: OpenKV,
        policy: Repair | RecomputePolicy,
        links: LinkTokens | None = None,
    ) -> TimedPrompt:
        """Fuse a prompt; `links` are the layout's link tokens, on the model's device."""
        model, num_prompt = self._model, len(layout.token_ids)
        started = time.perf_counter()
        buffer = FusedKV(model.spec, num_prompt, num_prompt + self._limit(num_prompt), model.device)
        fused = fuse(model, layout, open_kv, policy, buffer, links)
        int(fused.logits.argmax())
        return TimedPrompt(fused, time.perf_counter() - started)

    @torch.no_grad()
    def answer(
        self,
        prompt: TimedPrompt,
        reference: ReferenceAnswer,
        eviction: EvictionPolicy | None = None,
    ) -> FusedAnswer:
        """Answer over fused KV; measure how far each token is from the reference's.

        Parameters
        ----------
        prompt
            The fused prompt; it may be answered again, with another eviction.
        eviction
            Which tokens to evict after the prompt and during the answer; None evicts nothing.
        """
        model, fused = self._model, prompt.fused
        logits, report = fused.logits[None], fused.report
        going_on: Continuation = FullContinuation(model, fused)
        if eviction is not None:
            going_on = EvictingContinuation(model, fused, eviction)
        with fused.answering(model):
            if len(reference.token_ids) > 1:
                logits = torch.cat([logits, going_on.feed(reference.token_ids[:-1], 0)])
            if isinstance(going_on, EvictingContinuation):
                report = replace(report, eviction=going_on.report())
            likeliest = logits.argmax(-1).tolist()
            agrees = tuple(
                one == other for one, other in zip(likeliest, reference.token_ids, strict=True)
            )
            limit = self._limit(fused.kv.num_tokens)
            own_answer = self._own_answer(going_on, limit, likeliest, agrees, reference)
        log_probs = logits.float().log_softmax(-1)
        divergence = torch.nn.functional.kl_div(
            log_probs, reference.log_probs, reduction="none", log_target=True
        ).sum(-1)
        return FusedAnswer(
            token_ids=own_answer,
            # Rounding can put the divergence of equal distributions slightly below zero.
            kl=tuple(max(0.0, value) for value in divergence.tolist()),
            agrees=agrees,
            ttft_seconds=prompt.seconds,
            report=report,
        )

    def _own_answer(
        self,
        going_on: Continuation,
        limit: int,
        likeliest: Sequence[int],
        agrees: Sequence[bool],
        reference: ReferenceAnswer,
    ) -> tuple[int, ...]:
        """Return the greedy answer, decoded only from where it leaves the reference's.

        Up to that point both get the same tokens, so the teacher-forced pass equals decoding.
        """
        if all(agrees):
            return reference.token_ids
        num_equal = agrees.index(False)
        answer = [*reference.token_ids[:num_equal], likeliest[num_equal]]
        while answer[-1] not in self._ends and len(answer) < limit:
            answer.append(int(going_on.feed(answer, len(answer) - 1)[-1].argmax()))
        return tuple(answer)

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
