"""The connector's half in vLLM's worker: fuses prompts, and writes rows to the engine's cache.

A separate thread fuses prompts, one after another, while the engine computes its batch. The rows
are written between two steps.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.codec.raw import HeadRange
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import PlacedPrompt
from kvrag.errors import EngineError
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.slices import StoppedError
from kvrag.kvcache import FusedKV
from kvrag.llms.vllm.options import open_index
from kvrag.llms.vllm.pages import Brought, Pages
from kvrag.llms.vllm.settings import ConnectorSettings
from kvrag.llms.vllm.transfer import Load, StepMetadata, StepOutcome
from kvrag.llms.vllm.weights import PROCESS_CORES, Part
from kvrag.models.kv_model import KVModel

logger = logging.getLogger("kvrag")

_IDLE_WAIT_SECONDS = 0.02
"""How long a step without work waits for a fused prompt, so that an idle engine does not spin."""
_WRITE_SECONDS = 0.005
"""How long rows are written after a step while a batch runs; at least one layer."""


class WorkerSide:
    """Loads the rows that the scheduler has offered.

    Parameters
    ----------
    settings
        The operator's settings.
    model
        The model that fuses: of several workers that share its heads, this one's part.
    part
        What this worker has of the engine's model.
    memory
        Room for a prompt's KV, if it was taken before.

    Raises
    ------
    IndexMismatchError
        If it is not the model that the index was made with.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        model: KVModel,
        part: Part | None = None,
        memory: FusedKV | None = None,
    ) -> None:
        self._part = part or Part()
        self._model = model
        self._index = open_index(settings, model)
        self._engine = KVEngine(self._index, links="off", never_slower=False)
        if memory is not None:
            self._engine.give_memory(memory)
        self._pages: Pages | None = None
        self._threads = ThreadPoolExecutor(1, "kvrag-fuse", initializer=_use_all_cores)
        self._running: dict[str, tuple[Load, Future[Brought]]] = {}
        self._abandoned: set[str] = set()
        # What was fused last, by its salt: the other answers to one request (n > 1) want it next.
        self._last: tuple[str, Brought] | None = None
        self._writing: dict[str, Generator[None, None, None]] = {}
        self._is_idle = False
        self._outcome = StepOutcome()

    def use_pages(self, pages: Pages) -> None:
        """Use the engine's cache. Raise EngineError if it is not for the index's model."""
        expected = self._index.config.num_layers
        first, end = self._part.workers.most([-pages.layers.start, pages.layers.stop])
        if (-first, end) != (0, expected):
            raise EngineError(
                f"the engine caches KV of the layers {-first} to {end - 1}, but the index's model "
                f"has {expected} layers: serve the index's model"
            )
        # A pipeline's stage computes the layers before its own too, for what these begin with.
        self._model.layer_stop = pages.layers.stop
        self._pages = pages

    def close(self) -> None:
        """Finish running loads, and close the index."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._last is not None:
            self._last[1].release()
        self._index.close()

    def start(self, step: StepMetadata) -> None:
        """Begin the loads of a step; if the engine is idle, wait for them a little."""
        for load in step.loads:
            self._running[load.request_id] = (load, self._submit(load))
        self._is_idle = step.is_idle
        # A partly written request can be finished without waiting.
        if step.is_idle and self._running and not self._writing:
            futures = [future for _, future in self._running.values()]
            wait(futures, timeout=_IDLE_WAIT_SECONDS, return_when=FIRST_COMPLETED)

    def finish(self, abandoned: Iterable[str]) -> tuple[set[str], set[str]]:
        """Write the rows that are ready; return the requests that ended, and which of them failed.

        While the engine has a batch, writing takes only a fraction of a step's time; the rest is
        written after later steps.

        Parameters
        ----------
        abandoned
            Requests that the engine has given up: their fusing ends after the present layer.
        """
        ended, failed = set(), set()
        for request_id in abandoned:
            if request_id in self._running:
                self._abandoned.add(request_id)
            elif request_id in self._writing:
                self._writing.pop(request_id).close()
                ended.add(request_id)
        fused = [name for name, (_, future) in self._running.items() if future.done()]
        until = math.inf if self._is_idle else time.perf_counter() + _WRITE_SECONDS
        for request_id in [*self._writing, *fused]:
            # Not made before its turn: one that has not begun would release nothing when closed.
            if request_id not in self._writing:
                self._writing[request_id] = self._write(*self._running.pop(request_id))
            try:
                if not all(time.perf_counter() < until for _ in self._writing[request_id]):
                    break
            except StoppedError:
                pass  # the engine has given it up
            except Exception as error:
                # No error may stop the engine: it can compute the prompt itself.
                logger.warning("request %s is computed: %s", request_id, error)
                failed.add(request_id)
                self._outcome.failures[request_id] = f"{type(error).__name__}: {error}"
            del self._writing[request_id]
            ended.add(request_id)
        return ended, failed

    def take_outcome(self) -> StepOutcome | None:
        """Return the results of loads since the last call, or None if there are none."""
        outcome, self._outcome = self._outcome, StepOutcome()
        return outcome if outcome.reports or outcome.failures else None

    def _submit(self, load: Load) -> Future[Brought]:
        try:
            return self._threads.submit(self._bring, load)
        except RuntimeError as error:  # no thread is available: the load fails
            failed: Future[Brought] = Future()
            failed.set_exception(error)
            return failed

    def _write(self, load: Load, future: Future[Brought]) -> Generator[None, None, None]:
        self._abandoned.discard(load.request_id)
        brought = future.result()
        try:
            assert self._pages is not None
            yield from self._pages.write(load, brought)
            self._outcome.reports[load.request_id] = {self._part.workers.rank: brought.report}
        finally:
            brought.release()

    def _bring(self, load: Load) -> Brought:
        """Return a request's rows. All workers have them, or each raises an error."""
        last, self._last = self._last, None
        if last is not None and last[0] == load.plan.salt:
            # All workers fuse in the same order, so they agree on this.
            last[1].hold()
            self._last = last
            return last[1]
        if last is not None:
            last[1].release()
        brought: Brought | None = None
        failure: Exception | None = None
        try:
            brought = self._bring_part(load)
        except Exception as error:
            failure = error
        misses = 0 if brought is None else sum(brought.report.misses.values())
        failed, most, least = self._part.workers.most([failure is not None, misses, -misses])
        if failure is not None:
            raise failure
        assert brought is not None
        if failed or most != -least:
            brought.release()
            raise EngineError("the engine's workers do not all have the prompt's KV")
        # With more misses these are not the salt's rows.
        if misses <= sum(load.plan.layout.misses.values()):
            brought.hold()
            self._last = load.plan.salt, brought
        return brought

    def _bring_part(self, load: Load) -> Brought:
        plan, heads = load.plan, self._part.head_range(self._index.config.num_kv_heads)

        def is_wanted() -> bool:
            (is_abandoned,) = self._part.heads.most([load.request_id in self._abandoned])
            return not is_abandoned

        is_whole = self._part.heads.size == 1
        open_kv = self._index.on_demand.opener(self._index.open_kv, plan.layout, makes=is_whole)
        if not is_whole:
            open_kv = _of_heads(open_kv, heads)
        prompt = PlacedPrompt(plan.layout, open_kv)
        fused = self._engine.fuse(prompt, policy=plan.policy, max_tokens=1, is_wanted=is_wanted)
        if fused.kv.storage.is_cuda:
            # The engine writes from another thread, and perhaps on another stream.
            torch.cuda.current_stream(fused.kv.storage.device).synchronize()
        return Brought(
            [layer[0] for layer in fused.kv.keys],
            [layer[0] for layer in fused.kv.values],
            fused.report,
            partial(self._engine.give_back, fused),
        )


def _of_heads(open_kv: OpenKV, heads: slice) -> OpenKV:
    """Return what opens only some heads of the records that `open_kv` opens."""

    def open_part(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
        record = open_kv(chunk_id, context_ids)
        return None if record is None else HeadRange(record, heads)

    return open_part


def _use_all_cores() -> None:
    """Let this thread run on all of the process's cores, not only on the one it inherits."""
    if PROCESS_CORES:
        # A core may no longer be available; fusing is then slower, but works.
        with suppress(OSError):
            os.sched_setaffinity(0, PROCESS_CORES)
