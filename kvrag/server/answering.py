"""Requests to engine calls, and the engine's pieces to one sequence of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request as HttpRequest

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Prompt, Request
from kvrag.llms.shape import Shape
from kvrag.server.problems import ClientGoneError
from kvrag.server.requests import Generating
from kvrag.server.worker import Job, Worker


@dataclass(frozen=True)
class Question:
    """A prompt for the engine.

    Attributes
    ----------
    prompt
        A text, or messages.
    hints
        Ids of the chunks that the server has put into it.
    stop
        Strings that end the answer besides the client's.
    stop_loops
        Whether it ends where it repeats itself: not in prompts that are the client's own.
    """

    prompt: Prompt
    hints: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_loops: bool = False


def engine_requests(
    questions: Sequence[Question], asked: Generating, form: Shape, tenant: str
) -> list[Request]:
    """Return the engine's requests for all choices: `n` for each question.

    A seed belongs to the first choice; each further one adds one to it.

    Parameters
    ----------
    questions, asked
        The prompts, and the request that has brought them.
    form
        The tools that answers may call, and the form that they must have.
    tenant
        Who asks: nobody else's KV is taken.

    Raises
    ------
    ParameterError
        When a value is out of range, or the policy is unknown.
    """
    options = asked.kvrag
    requests = []
    for question in questions:
        request = Request(
            question.prompt,
            policy=options.policy,
            ratio=options.ratio,
            boundary_tokens=options.boundary_tokens,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature or 0.0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
            repetition_penalty=asked.repetition_penalty or 1.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            presence_penalty=asked.presence_penalty or 0.0,
            min_p=asked.min_p or 0.0,
            seed=asked.seed,
            # A form says itself where an answer ends.
            stop=(*asked.stops, *(() if form.constraint else question.stop)),
            stop_loops=question.stop_loops,
            hints=question.hints,
            reuse=options.reuse,
            tools=form.tools,
            constraint=form.constraint,
            session=tenant,
            explain=options.explain,
            logprobs=asked.num_logprobs,
        )
        for number in range(asked.n or 1):
            seed = None if asked.seed is None else asked.seed + number
            requests.append(replace(request, seed=seed))
    return requests


class Generation:
    """The answers to one request, as the worker generates them.

    Parameters
    ----------
    worker, engine
        Who generates, and with what.
    tenant
        Who asks.
    requests
        One for each choice.

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
        When the worker's queue is full.
    """

    def __init__(
        self, worker: Worker, engine: KVEngine, tenant: str, requests: Sequence[Request]
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.num_pieces = 0
        self.ttft_seconds: float | None = None
        self._started = time.perf_counter()
        self._num_choices = len(requests)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, AnswerDelta | Exception]] = asyncio.Queue()
        context = copy_context()  # the worker's thread has another one
        self._jobs = [
            Job(tenant, partial(context.run, engine.steps, request), partial(self._tell, number))
            for number, request in enumerate(requests)
        ]
        worker.submit(self._jobs)

    def _tell(self, number: int, event: AnswerDelta | Exception) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

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
        if event.answer is not None:
            self.answers[number] = event.answer
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
    def completion_tokens(self) -> int:
        """Tokens of the finished answers; for a request that was left, at least its pieces."""
        counted = sum(one.usage.completion_tokens for one in self.answers.values())
        return counted if self.is_done else max(counted, self.num_pieces)

    def cancel(self) -> None:
        """Stop generating what is not finished."""
        for job in self._jobs:
            self._worker.cancel(job)

    @asynccontextmanager
    async def ended_by(self, http: HttpRequest) -> AsyncIterator[None]:
        """Let `next` raise ClientGoneError in the block when the client goes away."""
        watching = asyncio.create_task(self._watch(http))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait((0, ClientGoneError()))
