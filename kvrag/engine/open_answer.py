"""An answer while it is written: its tokens become text, and it decides when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch

from kvrag.engine.answer import (
    Answer,
    AnswerDelta,
    FinishReason,
    TokenLogprob,
    Usage,
)
from kvrag.engine.constraint import Allowed
from kvrag.engine.prompt_reader import LaidOutPrompt, prompt_parts
from kvrag.engine.request import Request
from kvrag.engine.sampling import Sampler, log_probabilities
from kvrag.engine.text_stream import TextStream, end_ids
from kvrag.fusion.decoding import Decoder, make_decoder
from kvrag.fusion.fuser import FusedPrompt
from kvrag.models.kv_model import KVModel

Release = Callable[[Sequence[int] | None], None]
"""Takes a prompt's KV back, with the tokens of the answer whose KV follows it; None: an error."""


class HeldPrompt(NamedTuple):
    """A prompt's KV, and what takes it back."""

    fused: FusedPrompt
    release: Release


class OpenAnswer:
    """One answer, from its prompt's KV to its last token.

    Parameters
    ----------
    model
        The model.
    request
        The request, with an engine's defaults.
    laid_out
        The prompt as it was laid out.
    held
        The prompt's KV.
    allowed
        Which tokens may follow, if the request has a constraint.
    started
        When the request came, by `time.perf_counter`.

    Attributes
    ----------
    logits
        ``[vocabulary]``: the distribution of the next token, which `take` draws; None if a step has
        to compute it.
    token
        The last token; a step writes its KV.
    is_done
        Whether the answer is finished.
    on_close
        Called once, by `close`: with the whole answer, the error that ended it, or None if nobody
        waited for it any more.
    """

    def __init__(
        self,
        model: KVModel,
        request: Request,
        laid_out: LaidOutPrompt,
        held: HeldPrompt,
        allowed: Allowed | None,
        started: float,
    ) -> None:
        self._fused = fused = held.fused
        self._model = model
        self._request = request
        self._sources = laid_out.sources
        self._parts = prompt_parts(laid_out, fused) if request.explain else ()
        self._started = started
        self._release: Release | None = held.release
        assert request.max_tokens is not None  # the engine's defaults set it
        self._limit = min(request.max_tokens, model.max_positions - fused.layout.end_position)
        self._ends = end_ids(model.decoder.generation_config, model.tokenizer)
        device = fused.logits.device
        self._sampler = Sampler(request.sampling, device, allowed)
        self._text = TextStream(
            model.tokenizer,
            request.stop,
            is_calling=bool(request.tools),
            # A form may want any repetition.
            stop_loops=request.stop_loops and request.constraint is None,
        )
        # The plain ids: repetition penalties must not count link tokens.
        plain_ids = fused.layout.plain_token_ids
        self._token_ids = torch.empty(len(plain_ids) + self._limit, dtype=torch.long, device=device)
        self._token_ids[: len(plain_ids)] = torch.tensor(plain_ids, device=device)
        self._num_plain = len(plain_ids)
        self._num_generated = 0
        self._logprobs: list[TokenLogprob] = []
        self._num_told = 0
        self._ttft_seconds = 0.0
        self.logits: torch.Tensor | None = fused.logits
        self.token = 0
        self.is_done = False
        self.on_close: Callable[[Answer | Exception | None], None] | None = None
        self._answer: Answer | None = None

    @cached_property
    def decoder(self) -> Decoder:
        """What computes the next logits; made after the first token, which does not need it."""
        return make_decoder(self._model, self._fused, self._request.eviction_policy)

    @property
    def coming(self) -> Future[bytes] | None:
        """What `take` would wait for, if anything."""
        return self._sampler.coming

    def take(self) -> list[AnswerDelta]:
        """Draw the next token; return the pieces that have become final, at most two."""
        assert self.logits is not None
        logits, self.logits = self.logits, None
        num_so_far = self._num_plain + self._num_generated
        token = self._sampler.next_token(logits, self._token_ids[:num_so_far])
        now = time.perf_counter() - self._started
        if self._num_generated == 0:
            self._ttft_seconds = now
        self._token_ids[num_so_far] = token
        self._num_generated += 1
        self.token = token
        if token in self._ends:
            return [self._finish("stop")]
        if self._request.logprobs is not None:
            logprob, top = log_probabilities(logits, token, self._request.logprobs)
            self._logprobs.append(TokenLogprob(token, logprob, self._text.start_of(token), top))
        deltas = []
        if piece := self._text.push(token):
            deltas.append(AnswerDelta(piece, logprobs=self._tell_logprobs()))
        if self._text.stopped or self._sampler.is_complete:
            deltas.append(self._finish("stop"))
        elif self._text.looped:
            deltas.append(self._finish("loop"))
        elif self._num_generated == self._limit:
            deltas.append(self._finish("length"))
        return deltas

    def _tell_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return the tokens that begin in the text shown so far, each once."""
        begun = self._num_told
        while self._num_told < len(self._logprobs) and (
            self._logprobs[self._num_told].start < self._text.num_shown
        ):
            self._num_told += 1
        return tuple(self._logprobs[begun : self._num_told])

    def end_if_late(self) -> AnswerDelta | None:
        """Finish the answer, and return its last piece, if its time is over."""
        seconds = self._request.timeout_seconds
        if seconds is None or time.perf_counter() - self._started <= seconds:
            return None
        return self._finish("timeout")

    def _finish(self, finish: FinishReason) -> AnswerDelta:
        self.is_done = True
        tail = "" if self._text.stopped else self._text.finish()
        last = self._tell_logprobs()
        report = self._fused.report
        eviction = self.decoder.report() if "decoder" in self.__dict__ else None
        self._answer = Answer(
            text=self._text.text,
            sources=self._sources,
            report=replace(report, eviction=eviction),
            usage=Usage(report.num_tokens, report.num_cached, self._num_generated),
            finish_reason=finish,
            ttft_seconds=self._ttft_seconds,
            total_seconds=time.perf_counter() - self._started,
            parts=self._parts,
            # Without the tokens of a stop string, and others that add no text at the end.
            logprobs=tuple(self._logprobs[: self._num_told]),
        )
        return AnswerDelta(tail, self._answer, last)

    def close(self, error: Exception | None = None) -> None:
        """Free the prompt's KV; further calls do nothing.

        Parameters
        ----------
        error
            What ended the answer early.
        """
        release, self._release = self._release, None
        if release is None:
            return
        # The KV of the last token is not written: nothing follows it.
        num_written = max(0, self._num_generated - 1)
        written = self._token_ids[self._num_plain : self._num_plain + num_written]
        release(written.tolist() if error is None else None)
        if self.on_close is not None:
            self.on_close(error or self._answer)
