"""Continuous batching: answers join and leave a running batch between two steps of decoding.

A step computes one token of every running answer together. Prompts that join are fused beside it,
slices of a quarter of a second before each step, so that no running answer waits for a long prompt.
With fewer slices, answers end before others join, and each step reads the weights for few tokens.
While one prompt waits for its stored KV, another is computed. On a card, prompts go through layers
together (`kvrag.models.batched_prefill`). On the CPU, rows of several in one matrix product would
gain little: of SmolLM2 a row takes 1.23 ms beside 63 others, 1.07 beside 255.

One thread at a time advances the batch: whichever waits for a piece of an answer. While event loops
wait, a thread of the scheduler's own does, which ends with their last answer. Beside it, other
threads fuse further prompts, each with a twin of the model and its share of the cores: two cores
compute two prompts 1.7 times as fast as one after the other, since no operator waits for both.

Source: Yu et al., Orca (OSDI 2022) §3, iteration-level scheduling. Slices of prompts: Agrawal et
al., Sarathi-Serve (arXiv 2403.02310) §4. Deviation: a slice and a step are computed one after the
other, because a slice goes through one layer and a step through all.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.open_answer import OpenAnswer
from kvrag.engine.options import MAX_BATCH
from kvrag.fusion.decoding import step_all
from kvrag.fusion.slices import Slices
from kvrag.loading import threads
from kvrag.models.batched_prefill import Meeting, Share
from kvrag.models.kv_model import KVModel
from kvrag.process import working

logger = logging.getLogger("kvrag")

_REST_SECONDS = 0.05
# How long prompts hold up running answers for each token: nobody reads faster.
_PACE_SECONDS = 0.25
# Prompts that wait for their stored KV before no other one begins: buffers take memory.
_MOST_SLOW = 2
# Prompts that are fused at the same time: buffers take memory.
_MOST_AT_ONCE = 4
# Prompts that go through layers together.
_MOST_JOINED = 8


@dataclass(frozen=True)
class Start:
    """A prompt that can be fused.

    Attributes
    ----------
    fuse
        Fuses it; takes the time, by `time.perf_counter`, at which it was submitted, and a twin of
        the model, or None for the model itself.
    due_seconds
        How long after that its answer should begin: its target, or what it takes alone. The prompt
        that is due first is fused first, so a short one does not wait for long ones before it, and
        a long one not for ever.
    has_target
        Whether that is a target: no other prompt begins to load while this one does.
    """

    fuse: Callable[[float, KVModel | None], Slices[OpenAnswer]]
    due_seconds: float = 0.0
    has_target: bool = False


@dataclass(eq=False)
class Job:
    """One answer to write.

    Attributes
    ----------
    start
        Makes the answer; a future while another thread reads the prompt.
    tell
        Receives each piece, or the error that ended the answer, in the thread that advances. If
        it raises an error, nobody listens any more, and the job is dropped.
    is_streamed
        Whether somebody reads the pieces, and waits for the next one.
    """

    start: Start | Future[Start]
    tell: Callable[[AnswerDelta | Exception], None]
    is_streamed: bool = True
    submitted: float = field(default=0.0, init=False)
    is_cancelled: bool = field(default=False, init=False)
    is_ended: bool = field(default=False, init=False)
    has_target: bool = field(default=False, init=False)
    is_slow: bool = field(default=False, init=False)
    fusing: Slices[OpenAnswer] | None = field(default=None, init=False)
    share: Share | None = field(default=None, init=False)
    answer: OpenAnswer | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    @property
    def is_read(self) -> bool:
        """Whether fusing may begin."""
        return not isinstance(self.start, Future) or self.start.done()

    @property
    def _read(self) -> Start | None:
        """What fuses a prompt that is read; None if reading failed, which is reported at once."""
        start = self.start
        if not isinstance(start, Future):
            return start
        return None if start.cancelled() or start.exception() is not None else start.result()

    @property
    def asks_for_target(self) -> bool:
        """Whether a prompt that is read has a target for its first token."""
        start = self._read
        return start is not None and start.has_target

    @property
    def due(self) -> float:
        """When the answer of a prompt that is read should begin."""
        start = self._read
        return self.submitted + (0.0 if start is None else start.due_seconds)


class Scheduler:
    """Writes the answers of one engine, several at a time: first due, first served.

    Parameters
    ----------
    max_batch
        Most answers that run at the same time; each one holds its prompt's KV in memory.
    twin
        Returns a twin of the model by its number (`KVModel.twin`); None: there are none.

    Attributes
    ----------
    moved
        When the batch was last advanced, by `time.perf_counter`.
    """

    def __init__(
        self,
        max_batch: int = MAX_BATCH,
        twin: Callable[[int], KVModel | None] = lambda _: None,
    ) -> None:
        self._max_batch = max_batch
        self._twin = twin
        self._waiting: deque[Job] = deque()
        self._joining: list[Job] = []
        # By the number of the twin that a thread fuses with: it alone touches its job, until that
        # is fused, or has failed.
        self._aside: dict[int, Job | None] = {}
        self._num_cores, self._num_paused = 1, 0
        self._fused: list[Job] = []
        self._meeting = Meeting()
        self._running: list[Job] = []
        self._cancelled: deque[Job] = deque()
        # Only the thread that drives touches jobs that have begun.
        self._is_driven = self._rests = False
        self._changed = threading.Condition()
        self._background: set[Job] = set()
        self._thread: threading.Thread | None = None
        self._step_seconds = 0.0
        self.moved = 0.0

    @property
    def num_open(self) -> int:
        """Number of answers that are waiting, joining or running."""
        return len(self._waiting) + self._num_joined

    @property
    def _num_joined(self) -> int:
        aside = sum(job is not None for job in list(self._aside.values()))
        return len(self._joining) + aside + len(self._fused) + len(self._running)

    @property
    def _room(self) -> int:
        """How many further answers may join."""
        return self._max_batch - self._num_joined

    def submit(self, job: Job, *, in_background: bool = False) -> None:
        """Queue a job.

        Parameters
        ----------
        in_background
            Whether the scheduler's own thread advances it; otherwise callers do, by `wait_until`.
        """
        job.submitted = time.perf_counter()
        with self._changed:
            self._waiting.append(job)
            if in_background:
                self._background.add(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvrag-batch")
                    self._thread.start()
        if isinstance(job.start, Future):
            job.start.add_done_callback(lambda _: self.wake())

    def cancel(self, job: Job) -> None:
        """Drop a job and what it holds; a step that has begun is finished first."""
        if job.is_ended:
            return
        job.is_cancelled = True
        with self._changed:
            self._cancelled.append(job)
            if self._is_driven:
                return  # the driver drops it
            self._is_driven = True
        self._stop_driving()

    def answers(self, starts: Sequence[Start]) -> list[Answer | Exception]:
        """Return several answers, in order; an error takes its answer's place."""
        done: dict[int, Answer | Exception] = {}

        def tell(number: int, event: AnswerDelta | Exception) -> None:
            outcome = event if isinstance(event, Exception) else event.answer
            if outcome is not None:
                done[number] = outcome
                self.wake()

        jobs = [
            Job(start, partial(tell, number), is_streamed=False)
            for number, start in enumerate(starts)
        ]
        try:
            for job in jobs:
                self.submit(job)
            self.wait_until(lambda: len(done) == len(jobs))
        finally:
            for job in jobs:
                self.cancel(job)
        return [done[number] for number in range(len(jobs))]

    def pieces(self, start: Start) -> Iterator[AnswerDelta]:
        """Yield an answer piece by piece; raise the error that ended it."""
        events: deque[AnswerDelta | Exception] = deque()

        def tell(event: AnswerDelta | Exception) -> None:
            events.append(event)
            self.wake()

        job = Job(start, tell)
        self.submit(job)
        try:
            while True:
                self.wait_until(lambda: bool(events))
                event = events.popleft()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.answer is not None:
                    return
        finally:
            self.cancel(job)

    async def apieces(self, start: Start | Future[Start]) -> AsyncGenerator[AnswerDelta, None]:
        """Yield an answer piece by piece while the event loop runs on."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[AnswerDelta | Exception] = asyncio.Queue()

        def tell(event: AnswerDelta | Exception) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(start, tell)
        self.submit(job, in_background=True)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.answer is not None:
                    return
        finally:
            self.cancel(job)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Advance the batch until something is ready, or wait while another thread does."""
        with self._changed:
            self._changed.wait_for(lambda: is_ready() or not self._is_driven)
            if is_ready():
                return
            self._is_driven = True
        try:
            while not is_ready():
                self._advance()
        finally:
            self._stop_driving()

    def wake(self) -> None:
        """Let waiting threads see whether they are ready."""
        with self._changed:
            self._changed.notify_all()

    def _stop_driving(self) -> None:
        while True:
            self._drop_cancelled()
            with self._changed:
                if not self._cancelled:
                    self._is_driven = False
                    self._changed.notify_all()
                    return

    def _run(self) -> None:
        while True:
            try:
                self.wait_until(lambda: not self._background)
            except Exception as error:
                for job in list(self._background):
                    self._end(job, error)
            with self._changed:
                if not self._background:
                    self._thread = None
                    return

    def _advance(self) -> None:
        """Fuse slices of the prompts that join, then write one token of each running answer."""
        self.moved, self._rests = time.perf_counter(), False
        with working():
            self._drop_cancelled()
            self._take_fused()
            self._share()
            self._fuse()
            if self._running:
                self._step()
                return
        if not self._joining:
            with self._changed:
                self._rests = True
                self._changed.wait_for(
                    lambda: self._cancelled or self._fused or (self._room > 0 and self._ready()),
                    _REST_SECONDS,
                )

    def _share(self) -> None:
        """Let other threads fuse prompts that would wait for this one."""
        self._num_cores = threads.num_computing()
        most = min(self._num_cores, _MOST_AT_ONCE) if threads.can_share() else 1
        while len(self._aside) < most - 1:
            number = next(one for one in range(most) if one not in self._aside)
            with self._changed:
                job = self._next_aside()
                if job is None:
                    return
                self._aside[number] = job
            is_begun = False
            try:
                # Without the lock: it may have to load the model. What fails here fails again for
                # the prompt that needs it, and for no other.
                with suppress(Exception):
                    if self._twin(number) is not None:
                        threads.start(partial(self._fuse_aside, number, job), threads.ASIDE)
                        is_begun = True
            finally:
                if not is_begun:  # interrupted, maybe
                    with self._changed:
                        del self._aside[number]
                        self._waiting.appendleft(job)
            if not is_begun:
                return

    def _ready(self) -> list[Job]:
        """Return the prompts that wait and are read; hold the lock."""
        return [job for job in self._waiting if job.is_read]

    def _next_aside(self) -> Job | None:
        """Take the prompt that another thread than the driving one fuses next; hold the lock."""
        ready = self._ready()
        # The driving thread has something to do as well, and one with a target computes alone.
        is_busy = bool(self._joining or self._running)
        if min(len(ready), self._room) <= (not is_busy):
            return None
        if any(job.has_target for job in self._joining):
            return None
        job = min(ready, key=lambda one: one.due)
        if job.asks_for_target:
            return None
        self._waiting.remove(job)
        return job

    def _fuse_aside(self, number: int, job: Job | None) -> None:
        """Fuse prompts with a twin of the model, as long as there are any."""
        with self._changed:
            if self._aside.get(number) is not job:
                return  # no thread could be started at the time, and the prompt waits again
        while job is not None:
            answer, error = None, None
            try:
                twin = self._twin(number)
                answer = self._fuse_with(twin, number, job)
            except Exception as failed:
                error = failed
            with self._changed:
                is_wanted = not job.is_ended
                if is_wanted:
                    job.answer, job.error = answer, error
                    self._fused.append(job)
                self._aside[number] = None
                self._changed.notify_all()
            if answer is not None and not is_wanted:
                _close(answer)
            with self._changed:
                job = self._aside[number] = self._next_aside()
                if job is None:
                    del self._aside[number]

    def _fuse_with(self, twin: KVModel | None, number: int, job: Job) -> OpenAnswer | None:
        """Fuse a prompt, with a twin of the model if there is one; None if it was cancelled."""
        start = job.start.result() if isinstance(job.start, Future) else job.start
        fusing, waits = start.fuse(job.submitted, twin), None
        try:
            while self._goes_on(job):
                with working(), self._sharing(number):
                    fusing.send(waits)
                waits = True
            fusing.close()
        except StopIteration as done:
            answer: OpenAnswer = done.value
            return answer
        return None

    def _goes_on(self, job: Job) -> bool:
        """Return whether a prompt is wanted, once none with a target that is due before computes.

        That was planned for all cores.
        """

        def is_free() -> bool:
            targets = (one for one in list(self._joining) if one.has_target and not one.is_slow)
            is_gone = job.is_ended or job.is_cancelled
            return is_gone or all(one.due >= job.due for one in targets)

        with self._changed:
            if not is_free():
                self._num_paused += 1
                while not self._changed.wait_for(is_free, _REST_SECONDS):
                    pass
                self._num_paused -= 1
        return not (job.is_ended or job.is_cancelled)

    def _sharing(self, number: int = -1) -> AbstractContextManager[None]:
        """Compute with a thread's share of the cores: the one with a twin, or that which drives."""
        drives = not self._rests
        num_sharing = len(self._aside) - self._num_paused + drives
        return threads.computing_with(num_sharing, number + drives, self._num_cores)

    def _take_fused(self) -> None:
        """Let prompts join that other threads have fused."""
        for job in list(self._fused):
            if job.answer is None:  # it failed, or was cancelled
                self._end(job, job.error)
            else:
                self._running.append(job)
                self._fused.remove(job)
                self._take(job)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            job = self._cancelled.popleft()
            if not job.is_ended:
                self._end(job)

    def _fuse(self) -> None:
        """Fuse for a while; without a running answer, one slice.

        If nobody reads pieces of the running answers, fuse all prompts first: the sooner they
        join, the more answers share each step.
        """
        begun = slice_begun = time.perf_counter()
        while self._fuse_slice():
            self._take_fused()
            now = time.perf_counter()
            # A further slice is likely to take as long as this one.
            expected = now + (now - slice_begun)
            if not self._running or self._cancelled:
                return
            is_read = any(job.is_streamed for job in self._running)
            if is_read and expected > begun + max(self._step_seconds, _PACE_SECONDS):
                return
            slice_begun = now

    def _fuse_slice(self) -> bool:
        """Fuse a slice of a prompt; return whether there was one that did not wait for stored KV.

        While no answer is running either, wait for what comes first.
        """
        slow: list[Job] = []
        while (job := self._next_due(slow)) is not None:
            job.is_slow = self._slice_of(job, waits=False)
            if job.share is None and not job.is_slow:
                return True
            if job.is_slow:
                slow.append(job)
        if self._compute_shares():
            return True
        if slow and not self._running:
            self._slice_of(slow[0], waits=True)
        return False

    def _compute_shares(self) -> bool:
        """Compute what prompts offer together; return whether there was anything."""
        meeting = sorted((job for job in self._joining if job.share), key=lambda one: one.due)
        shares = [job.share for job in meeting if job.share is not None]
        done = self._meeting.compute(shares) if shares else []
        for job in meeting:
            if job.share in done:
                job.share = None
        return bool(shares)

    def _next_due(self, slow: Sequence[Job]) -> Job | None:
        """Return the prompt to fuse next, besides slow ones; it joins if it has not."""
        with self._changed:
            meeting = [job for job in self._joining if job.share is not None]
            ready = [job for job in self._joining if job not in slow and job not in meeting]
            # Not only those in `slow`: one with a target may be due after others.
            is_alone = any(job.has_target and job.is_slow for job in self._joining)
            has_room = self._room > 0 and len(meeting) < _MOST_JOINED
            if has_room and len(slow) < _MOST_SLOW and not is_alone:
                ready += self._ready()
            job = min(ready, key=lambda one: one.due, default=None)
            if job is not None and job in self._waiting:
                self._waiting.remove(job)
                self._joining.append(job)
        return job

    def _slice_of(self, job: Job, *, waits: bool | None) -> bool:
        """Fuse a slice; return whether the prompt waits for stored KV, which may take long."""
        try:
            if job.fusing is None:
                start = job.start.result() if isinstance(job.start, Future) else job.start
                job.fusing, job.has_target = start.fuse(job.submitted, None), start.has_target
                waits = None
            with self._changed:
                is_alone = len(self._joining) == 1 and not self._ready()
            meeting = nullcontext() if is_alone else self._meeting.open()
            with self._sharing(), meeting:
                is_slow = job.fusing.send(waits)
            job.share = self._meeting.taken()
            return is_slow
        except StopIteration as done:
            job.answer = done.value
            self._joining.remove(job)
            self._running.append(job)
            self._take(job)
        except Exception as error:
            self._end(job, error)
        except BaseException:
            # The thread that drives was interrupted; another one begins again.
            job.fusing = None
            raise
        return False

    def _step(self) -> None:
        """Write one token of each running answer."""
        begun = time.perf_counter()
        asking = []
        coming = []
        for job in list(self._running):
            answer = job.answer
            assert answer is not None
            if answer.logits is not None:  # it waits for its constraint, or was interrupted
                self._take(job)
            if job.is_ended:
                continue
            try:
                if (late := answer.end_if_late()) is not None:
                    answer.close()
                    self._tell(job, late)
                    self._end(job)
                elif answer.logits is None:
                    asking.append((job, answer, answer.decoder))
                elif (one := answer.coming) is not None:
                    coming.append(one)
            except Exception as error:
                self._end(job, error)
        if not asking:
            wait(coming, _REST_SECONDS, FIRST_COMPLETED)
            return
        with self._sharing():
            outcomes = step_all([(decoder, answer.token) for _, answer, decoder in asking])
        for (_, answer, _), outcome in zip(asking, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                answer.logits = outcome
        for (job, _, _), outcome in zip(asking, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._end(job, outcome)
            else:
                self._take(job)
        self._step_seconds = time.perf_counter() - begun

    def _take(self, job: Job) -> None:
        answer = job.answer
        assert answer is not None
        if answer.coming is not None:
            return  # others need not wait for what may follow in this one
        try:
            deltas = answer.take()
            if answer.is_done:
                answer.close()  # before anybody can ask for more: the next turn takes its KV
            for delta in deltas:
                self._tell(job, delta)
        except Exception as error:
            self._end(job, error)
        if answer.is_done:
            self._end(job)

    def _tell(self, job: Job, event: AnswerDelta | Exception) -> None:
        if job.is_ended or job.is_cancelled:
            return
        try:
            job.tell(event)
        except Exception:  # for example, the event loop is closed
            job.is_cancelled = True
            self._end(job)

    def _end(self, job: Job, error: Exception | None = None) -> None:
        """Free what a job holds, and tell its error."""
        if job.is_ended:
            return
        if error is not None:
            self._tell(job, error)
        job.is_ended = True
        if isinstance(job.start, Future):
            job.start.cancel()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            self._background.discard(job)
        for jobs in (self._joining, self._fused, self._running):
            if job in jobs:
                jobs.remove(job)
        fusing, answer = job.fusing, job.answer
        job.fusing = job.answer = job.share = None
        if fusing is not None:
            _close(fusing)
        if answer is not None:
            _close(answer, error)


def _close(held: OpenAnswer | Slices[OpenAnswer], *error: Exception | None) -> None:
    """Free what a job holds; others go on if that fails."""
    try:
        held.close(*error)
    except Exception:
        logger.exception("what an answer held cannot be freed")
