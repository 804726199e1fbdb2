"""Ways to wait for a scheduler's answers: whole ones, pieces, and in event loops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kvrag.engine.answer import Answer, AnswerDelta, TokenLogprob
from kvrag.engine.scheduler import Job, Scheduler, Start


def answers(scheduler: Scheduler, starts: Sequence[Start]) -> list[Answer | Exception]:
    """Return several answers, in order; an error takes its answer's place."""
    done: dict[int, Answer | Exception] = {}

    def tell(number: int, event: AnswerDelta | Exception) -> None:
        outcome = event if isinstance(event, Exception) else event.answer
        if outcome is not None:
            done[number] = outcome
            scheduler.wake()

    jobs = [
        Job(start, partial(tell, number), is_streamed=False) for number, start in enumerate(starts)
    ]
    try:
        for job in jobs:
            scheduler.submit(job)
        scheduler.wait_until(lambda: len(done) == len(jobs))
    finally:
        for job in jobs:
            scheduler.cancel(job)
    return [done[number] for number in range(len(jobs))]


def pieces(
    scheduler: Scheduler, start: Start | Future[Start], *, once: bool
) -> Iterator[AnswerDelta | None]:
    """Yield an answer piece by piece; raise the error that ended it.

    Parameters
    ----------
    once
        Whether to yield after each step: all new pieces, joined, or None.
    """
    events: deque[AnswerDelta | Exception] = deque()

    def tell(event: AnswerDelta | Exception) -> None:
        events.append(event)
        scheduler.wake()

    job = Job(start, tell)
    scheduler.submit(job)
    try:
        while True:
            if not events:
                scheduler.wait_until(lambda: bool(events), once=once)
                if not events:
                    yield None
                    continue
            event = events.popleft()
            text = ""
            logprobs: tuple[TokenLogprob, ...] = ()
            while once and events and not isinstance(event, Exception):
                # Other streams have made several steps.
                text += event.text
                logprobs += event.logprobs
                event = events.popleft()
            if isinstance(event, Exception):
                raise event
            yield replace(event, text=text + event.text, logprobs=logprobs + event.logprobs)
            if event.answer is not None:
                return
    finally:
        scheduler.cancel(job)


async def apieces(
    scheduler: Scheduler, start: Start | Future[Start]
) -> AsyncGenerator[AnswerDelta, None]:
    """Yield an answer piece by piece while the event loop runs on."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[AnswerDelta | Exception] = asyncio.Queue()

    def tell(event: AnswerDelta | Exception) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    job = Job(start, tell)
    scheduler.submit(job, in_background=True)
    try:
        while True:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.answer is not None:
                return
    finally:
        scheduler.cancel(job)
