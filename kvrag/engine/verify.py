"""What full prefill says of an answer that was written from reused KV."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from kvrag.engine.answer import Answer, Verdict
from kvrag.engine.engine import KVEngine
from kvrag.engine.idle import Idle, IdleJob
from kvrag.engine.request import Request
from kvrag.engine.text_stream import TextStream, end_ids
from kvrag.errors import ParameterError
from kvrag.fusion.decoding import Decoder, make_decoder, step_all
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.slices import StoppedError

logger = logging.getLogger("kvrag")

_MOST_WAITING = 16
_MOST_TRIES = 3


def to_verify(request: Request) -> Request:
    """Return a request whose answer has the tokens that `verify` reads.

    Raises
    ------
    ParameterError
        If the answer would not keep the prompt's KV.
    """
    if request.eviction_policy is not None:
        raise ParameterError(
            "an answer with eviction cannot be verified, because it does not keep the prompt's KV: "
            "leave eviction out"
        )
    return replace(request, logprobs=request.logprobs or 0)


def verify(
    engine: KVEngine,
    request: Request,
    answer: Answer,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Verdict:
    """Compute a prompt twice, from stored KV and in full, and read an answer after both.

    Stored KV is read again: KV that was kept from earlier answers is not used. It takes as long as
    full prefill and the answer.

    Parameters
    ----------
    engine
        What has answered.
    request, answer
        The request as `to_verify` returns it, and its answer.
    is_wanted
        Asked between layers and tokens; if it returns False, the work stops.

    Raises
    ------
    ParameterError
        If the answer lacks its tokens, or see `to_verify`.
    StoppedError
        If the result is no longer wanted.
    """
    request = to_verify(request.over(engine.defaults))
    if answer.text and not answer.logprobs:
        raise ParameterError(
            "this answer cannot be verified without its tokens: give the request that to_verify "
            "returns, and its answer"
        )
    model = engine.index.model
    token_ids = [one.token_id for one in answer.logprobs]
    with ExitStack() as held, torch.no_grad():

        def fused(one: Request) -> FusedPrompt:
            prompt = engine.fuse(one, is_wanted=is_wanted)
            held.callback(engine.give_back, prompt)
            return prompt

        full = fused(replace(request, reuse=False))
        reused = fused(request)
        decoders = [make_decoder(model, one, None) for one in (full, reused)]
        logits = [full.logits, reused.logits]
        likeliest: list[tuple[int, int]] = []
        kl = 0.0
        num_tokens = len(token_ids) + (answer.finish_reason == "stop")
        for number in range(num_tokens):
            wanted, given = (torch.log_softmax(one.float(), -1) for one in logits)
            kl += float((wanted.exp() * (wanted - given)).nansum())
            likeliest.append((int(wanted.argmax()), int(given.argmax())))
            if number + 1 < num_tokens:
                logits = _step(decoders, token_ids[number], is_wanted)
        num_same = next((n for n, (a, b) in enumerate(likeliest) if a != b), num_tokens)
        instead = None
        if num_same < num_tokens and _is_greedy(request):
            said = [*token_ids[:num_same], likeliest[num_same][0]]
            instead = _going_on(engine, full, said, request, is_wanted)
    return Verdict(
        policy=reused.report.policy.partition("(")[0],
        num_tokens=num_tokens,
        num_agreed=sum(a == b for a, b in likeliest),
        num_same=num_same,
        kl=kl / max(1, num_tokens),
        instead=instead,
    )


def _step(
    decoders: Sequence[Decoder], token_id: int, is_wanted: Callable[[], bool]
) -> list[torch.Tensor]:
    if not is_wanted():
        raise StoppedError("the verdict is no longer wanted")
    logits = step_all([(one, token_id) for one in decoders])
    for one in logits:
        if isinstance(one, Exception):
            raise one
    return [one for one in logits if isinstance(one, torch.Tensor)]


def _is_greedy(request: Request) -> bool:
    one = request.sampling
    penalties = (one.frequency_penalty, one.presence_penalty, one.repetition_penalty - 1)
    return not (one.temperature or any(penalties) or request.constraint or request.tools)


def _going_on(
    engine: KVEngine,
    full: FusedPrompt,
    said: list[int],
    request: Request,
    is_wanted: Callable[[], bool],
) -> str:
    """Return the text that full prefill writes, of which the first tokens are known."""
    model = engine.index.model
    ends = end_ids(model.decoder.generation_config, model.tokenizer)
    text = TextStream(model.tokenizer, request.stop, stop_loops=request.stop_loops)
    decoder = make_decoder(model, full, None)
    most = min(request.max_tokens or 1, model.max_positions - full.layout.end_position)
    for number in range(1, most + 1):
        token_id = said[number - 1]
        if token_id in ends:
            break
        text.push(token_id)
        if text.stopped or text.looped or number == most:
            break
        (logits,) = _step([decoder], token_id, is_wanted)
        if number == len(said):
            said.append(int(logits.argmax()))
    return text.text


class Audits(IdleJob):
    """Verifies a share of all answers.

    Parameters
    ----------
    engine
        What answers.
    share
        Which share of the answers, 0 to 1.
    on_verdict
        Called with each verdict; with None for an answer that was never verified, because others
        asked or because of an error.
    """

    if_it_fails = "answers are no longer verified"

    def __init__(
        self, engine: KVEngine, share: float, on_verdict: Callable[[Verdict | None], None]
    ) -> None:
        self._engine = engine
        self._share = share
        self._on_verdict = on_verdict
        self._draw = random.Random()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Request, Answer, int]] = deque()

    def chosen(self, request: Request) -> tuple[Request, bool]:
        """Return a request as it is to be answered, and whether to give its answer to `add`."""
        evicts = request.over(self._engine.defaults).eviction_policy is not None
        if evicts or not request.reuse or self._draw.random() >= self._share:
            return request, False
        return to_verify(request), True

    def add(self, request: Request, answer: Answer) -> None:
        """Verify an answer when nobody asks; the oldest one goes if many wait."""
        if not answer.report.num_cached:
            return  # all of it is full prefill's
        with self._lock:
            self._waiting.append((request, answer, 0))
            lost = self._waiting.popleft() if len(self._waiting) > _MOST_WAITING else None
        if lost is not None:
            self._on_verdict(None)

    def work(self, idle: Idle) -> None:
        """Verify what waits, the oldest first."""
        while True:
            idle.check()
            with self._lock:
                if not self._waiting:
                    return
                request, answer, tries = self._waiting.popleft()
            try:
                self._on_verdict(verify(self._engine, request, answer, idle.is_wanted))
            except StoppedError:
                if tries + 1 < _MOST_TRIES:
                    with self._lock:
                        self._waiting.appendleft((request, answer, tries + 1))
                else:
                    self._on_verdict(None)
            except Exception as error:  # this answer's: a document is gone, for example
                logger.warning("an answer is not verified: %s", error)
                self._on_verdict(None)
