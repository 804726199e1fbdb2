"""Requests to engine calls, and the engine's pieces to one sequence of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.engine import KVEngine
from kvrag.engine.options import Sampling
from kvrag.engine.request import Request
from kvrag.engine.verify import Audits
from kvrag.llms.tool_calls import Shape
from kvrag.optiontable import options_of
from kvrag.server.problems import ClientGoneError
from kvrag.server.queue import AnswerQueue, Job, left
from kvrag.server.requests import Generating

PREFIX = "rag:"

_OF_KVRAG = ("policy", "ratio", "boundary_tokens", "reuse", "explain")


def request_options(asked: Generating, form: Shape, tenant: str) -> dict[str, Any]:
    """Return the fields of the engine's request that a client's request gives.

    Parameters
    ----------
    asked
        The client's request.
    form
        The tools that answers may call, and the form that they must have.
    tenant
        Who asks: nobody else's KV is taken.
    """
    given = {
        **{one.name: getattr(asked, one.name) for one, _ in options_of(Sampling)},
        **{name: getattr(asked.kvrag, name) for name in _OF_KVRAG},
        "max_tokens": asked.max_tokens,
        "stop": asked.stops,
        "tools": form.tools,
        "constraint": form.constraint,
        "session": tenant,
        "logprobs": asked.num_logprobs,
    }
    return {name: value for name, value in given.items() if value is not None}


def choices(requests: Sequence[Request], n: int) -> list[Request]:
    """Return `n` requests for each; a seed belongs to the first, each further one adds one."""
    return [
        replace(one, seed=None if one.seed is None else one.seed + number)
        for one in requests
        for number in range(n)
    ]


class Generation:
    """The answers to one request, as they are written.

    Parameters
    ----------
    queue, engine
        Where answers wait for their turn, and what writes them.
    tenant
        Who asks.
    requests
        One for each choice.
    audits
        What verifies some of the answers.

    Attributes
    ----------
    answers
        The finished answers by choice.
    num_pieces
        Number of pieces so far; each one is at least a token, except perhaps the last.
    ttft_seconds
        Seconds from here to the first piece, the wait included; None before it.

    Raises
    ------
    BusyError
        When the queue is full.
    """

    def __init__(
        self,
        queue: AnswerQueue,
        engine: KVEngine,
        tenant: str,
        requests: Sequence[Request],
        audits: Audits,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.num_pieces = 0
        self.ttft_seconds: float | None = None
        self._started = time.perf_counter()
        self._num_choices = len(requests)
        self._queue = queue
        self._audits = audits
        self._audited: dict[int, Request] = {}
        self._without_tokens: set[int] = set()
        self._events: asyncio.Queue[tuple[int, AnswerDelta | Exception]] = asyncio.Queue()
        self._jobs = []
        for number, given in enumerate(requests):
            request, is_audited = audits.chosen(given)
            if is_audited:
                self._audited[number] = request
                if given.logprobs is None:
                    self._without_tokens.add(number)
            job = Job(tenant, partial(engine.astream, request), partial(self._tell, number))
            self._jobs.append(job)
        queue.submit(self._jobs)

    def _tell(self, number: int, event: AnswerDelta | Exception) -> None:
        self._events.put_nowait((number, event))

    async def next(self, seconds: float | None = None) -> tuple[int, AnswerDelta] | None:
        """Return the next piece and its choice, or None if there is none within `seconds`.

        Raises the engine's error, or ClientGoneError.
        """
        try:
            async with asyncio.timeout(seconds):
                number, event = await self._events.get()
        except TimeoutError:
            return None
        # Outside the block: the engine's error may be a TimeoutError.
        if isinstance(event, Exception):
            raise event
        if self.ttft_seconds is None:
            self.ttft_seconds = time.perf_counter() - self._started
        self.num_pieces += 1
        answer = event.answer
        if answer is not None and number in self._audited:
            self._audits.add(self._audited.pop(number), answer)
        if number in self._without_tokens:  # an answer looks the same whether it is verified or not
            answer = None if answer is None else replace(answer, logprobs=())
            event = replace(event, answer=answer, logprobs=())
        if answer is not None:
            self.answers[number] = answer
        return number, event

    @property
    def is_done(self) -> bool:
        """Whether all answers are finished."""
        return len(self.answers) == self._num_choices

    @property
    def in_order(self) -> list[Answer]:
        """The finished answers, in the order of their choices."""
        return [self.answers[number] for number in sorted(self.answers)]

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of the finished answers: ``prompt``, ``cached`` (a part of those), ``completion``.

        For a request that was left, the last are at least its pieces.
        """
        usages = [one.usage for one in self.answers.values()]
        counted = sum(one.completion_tokens for one in usages)
        return {
            "prompt": sum(one.prompt_tokens for one in usages),
            "cached": sum(one.cached_tokens for one in usages),
            "completion": counted if self.is_done else max(counted, self.num_pieces),
        }

    async def ended(self) -> None:
        """Return when the queue has no more of it."""
        await asyncio.gather(*(one.task for one in self._jobs if one.task is not None))
        await asyncio.sleep(0)  # the queue learns it then

    def cancel(self) -> None:
        """Stop generating what is not finished."""
        for job in self._jobs:
            self._queue.cancel(job)

    @asynccontextmanager
    async def ended_by(self, http: HttpRequest) -> AsyncIterator[None]:
        """Let `next` raise ClientGoneError in the block when the client goes away."""
        watching = asyncio.create_task(self._watch(http))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, http: HttpRequest) -> None:
        await left(http)
        self._events.put_nowait((0, ClientGoneError()))
