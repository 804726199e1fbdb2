"""`KVRagConnector`: offers fused prompts to vLLM as external prefix hits.

An unmodified vLLM loads it by module path::

    KVTransferConfig(
        kv_connector="KVRagConnector",
        kv_connector_module_path="kvrag.llms.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"index": "my-index"},
    )

`kvrag.llms.vllm.options.engine_options` returns all of these arguments.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from kvrag.codec.base import EncodedChunk
from kvrag.codec.raw import HeadRange
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import PlacedPrompt
from kvrag.errors import EngineError
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.report import FusionReport
from kvrag.fusion.slices import StoppedError
from kvrag.kvcache import FusedKV
from kvrag.llms.vllm.options import check_engine, open_index
from kvrag.llms.vllm.pages import Brought, Pages
from kvrag.llms.vllm.plan import Load, LoadPlan, NoPlan, Planner
from kvrag.llms.vllm.settings import PARAMS, ConnectorSettings, require_tested
from kvrag.llms.vllm.weights import PROCESS_CORES, Part, fusing
from kvrag.models.kv_model import KVModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# -- the side of the worker ----------------------------------------------------------------------
#
# A separate thread fuses prompts, one after another, while the engine computes its batch. The rows
# are written between two steps.

logger = logging.getLogger("kvrag")

_IDLE_WAIT_SECONDS = 0.02
"""How long a step without work waits for a fused prompt, so that an idle engine does not spin."""
_WRITE_SECONDS = 0.005
"""How long rows are written after a step while a batch runs; at least one layer."""


# -- messages between the two sides, one per step and direction ---------------------------------


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The message from the scheduler to the worker.

    Attributes
    ----------
    loads
        Loads to begin in this step.
    is_idle
        Whether the engine computes nothing in this step.
    engine_id
        The engine that runs the step. vLLM keeps one connector per process: a second engine in the
        same process would get the first one's.
    """

    loads: list[Load]
    is_idle: bool
    engine_id: str


@dataclass
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The message from the worker to the scheduler: the results of loads that have ended.

    Attributes
    ----------
    reports
        For each loaded request, the fusion's report of each worker, by the worker's number.
    failures
        For each failed request, the reason; the engine computes its prompt.
    """

    reports: dict[str, dict[int, FusionReport]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both outcomes combined."""
        assert isinstance(other, StepOutcome)
        reports = {
            request_id: {**self.reports.get(request_id, {}), **other.reports.get(request_id, {})}
            for request_id in {**self.reports, **other.reports}
        }
        return StepOutcome(reports, {**self.failures, **other.failures})


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
            open_kv = partial(_open_heads, open_kv, heads)
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


def _open_heads(
    open_kv: OpenKV, heads: slice, chunk_id: str, context_ids: tuple[int, ...]
) -> EncodedChunk | None:
    """Open some heads of a record that `open_kv` opens."""
    record = open_kv(chunk_id, context_ids)
    return None if record is None else HeadRange(record, heads)


def _use_all_cores() -> None:
    """Let this thread run on all of the process's cores, not only on the one it inherits."""
    if PROCESS_CORES:
        # A core may no longer be available; fusing is then slower, but works.
        with suppress(OSError):
            os.sched_setaffinity(0, PROCESS_CORES)


# -- the side of the scheduler -------------------------------------------------------------------


@dataclass
class _Known:
    """A running request: its plan, while that is valid, and the result of loading."""

    request: Request
    plan: LoadPlan | None
    reason: str = ""
    reports: dict[int, FusionReport] = field(default_factory=dict)
    num_loaded: int = 0
    has_own_salt: bool = False

    def take_own_salt(self) -> None:
        """Let no other request find the rows: they are not those of the plan's salt."""
        if not self.has_own_salt:
            self.has_own_salt = True
            _add_salt(self.request, self.request.request_id)


class SchedulerSide:
    """Plans requests, offers their rows, and reports in the response what was done.

    Parameters
    ----------
    settings
        The operator's settings.
    """

    def __init__(self, settings: ConnectorSettings) -> None:
        index = open_index(settings)
        self.close = index.close
        self._planner = Planner(index, settings)
        self._known: dict[str, _Known] = {}
        self._loads: list[Load] = []

    def on_new_request(self, request: Request) -> None:
        """Plan a request before the engine looks it up in its own cache."""
        token_ids = request.prompt_token_ids
        if (
            token_ids is None
            or request.sampling_params is None
            or request.skip_reading_prefix_cache  # every prompt token must be computed
            or request.prompt_embeds is not None
            or request.lora_request is not None  # other weights than those of the stored KV
            or request.mm_features
        ):
            return
        plan = self._planner.plan(token_ids, request.kv_transfer_params)
        if isinstance(plan, NoPlan):
            if plan.reason:
                self._known[request.request_id] = _Known(request, None, plan.reason)
            return
        self._known[request.request_id] = _Known(request, plan)
        _add_salt(request, plan.salt)

    def num_matched(self, request: Request, num_computed: int) -> int:
        """Return how many rows to offer beyond those that the engine has cached itself."""
        known = self._known.get(request.request_id)
        if known is None or known.plan is None:
            return 0
        # At least one token has to be computed, for the logits.
        num_tokens: int = request.num_tokens
        return max(0, min(known.plan.num_tokens, num_tokens - 1) - num_computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Note where to write the rows of a request."""
        known = self._known.get(request.request_id)
        if num_external == 0 or known is None or known.plan is None:
            return
        end = min(known.plan.num_tokens, request.num_tokens - 1)
        block_ids = tuple(blocks.get_block_ids()[0])
        self._loads.append(Load(request.request_id, known.plan, block_ids, end - num_external, end))
        known.num_loaded = num_external

    def take_loads(self) -> list[Load]:
        """Return the loads that the worker begins in this step."""
        loads, self._loads = self._loads, []
        return loads

    def note(self, outcome: StepOutcome) -> None:
        """Take the worker's results of the loads that have ended."""
        for request_id, reports in outcome.reports.items():
            if (known := self._known.get(request_id)) is not None:
                known.reports.update(reports)
                planned = known.plan.layout.misses if known.plan else {}
                most = max(sum(report.misses.values()) for report in reports.values())
                if most > sum(planned.values()):
                    # A lost chunk was computed instead.
                    known.take_own_salt()
        for request_id, reason in outcome.failures.items():
            if (known := self._known.get(request_id)) is not None:
                # Offered again, the rows would fail again. So the engine computes the prompt.
                known.plan, known.reason, known.num_loaded = None, reason, 0
                known.take_own_salt()

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; return kvrag's part of the response, or None."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return None
        reports = [one for _, one in sorted(known.reports.items())]
        said: dict[str, Any] = {
            "num_loaded": known.num_loaded,
            "report": _whole(reports, request).to_dict() if reports else None,
            "computed_because": known.reason,
        }
        if len(reports) > 1:
            said["bytes_by_worker"] = [report.bytes_loaded for report in reports]
        return {PARAMS: said}


def _whole(reports: Sequence[FusionReport], request: Request) -> FusionReport:
    """Return the report for a whole prompt, including the tokens that the engine computed.

    It is the last pipeline stage's, with the bytes of all workers.
    """
    report = max(reports, key=lambda one: len(one.rows_by_layer))
    num_more = request.num_prompt_tokens - report.num_tokens
    return replace(
        report,
        num_tokens=request.num_prompt_tokens,
        num_fresh=report.num_fresh + num_more,
        rows_by_layer=tuple(rows + num_more for rows in report.rows_by_layer),
        bytes_loaded=sum(one.bytes_loaded for one in reports),
    )


def _add_salt(request: Request, salt: str) -> None:
    """Make the engine find a request's cached blocks only under this salt.

    vLLM names cached blocks by their tokens, so it would give fused blocks to ordinary requests
    with the same text. It hashes a request's salt into the first block's name, and so into all
    names. Names that already exist are made again.
    """
    request.cache_salt = salt if request.cache_salt is None else f"{request.cache_salt}|{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


# -- the connector -------------------------------------------------------------------------------


class KVRagConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's connector interface; `SchedulerSide` and `WorkerSide` do the work.

    Raises
    ------
    EngineVersionError
        If the version of vLLM was not tested.
    EngineError
        If the engine's configuration does not fit stored KV.
    IndexMismatchError
        If the engine's model is not the index's.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = ConnectorSettings.from_extra_config(extra)
        require_tested(any_version=settings.any_version)
        index_config = check_engine(vllm_config, kv_cache_config, settings)
        # vLLM calls the methods of one role alone.
        self._scheduler_side: Any = None
        self._worker_side: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_side = SchedulerSide(settings)
        else:
            found = fusing(vllm_config, index_config)
            self._worker_side = WorkerSide(settings, found.model, found.part, found.memory)

    def shutdown(self) -> None:
        for side in (self._scheduler_side, self._worker_side):
            if side is not None:
                side.close()
        self._scheduler_side = self._worker_side = None

    # -- called in the worker ----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        (group,) = self._kv_cache_config.kv_cache_groups
        self._worker_side.use_pages(Pages(layers, kv_caches, group.kv_cache_spec.block_size))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        if step.engine_id != self._kv_transfer_config.engine_id:
            raise EngineError(
                "another engine of this process already uses vLLM's only connector: shut it down "
                "first, or run each engine in a separate process "
                "(VLLM_ENABLE_V1_MULTIPROCESSING=1)"
            )
        self._worker_side.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after all its rows are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: kvrag saves no KV from the engine."""

    def wait_for_save(self) -> None:
        """Do nothing: kvrag saves no KV from the engine."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loading ended or failed.

        It names requests, not blocks: a window's block table contains blocks that others share.
        """
        ended, failed = self._worker_side.finish(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepOutcome | None:
        outcome: StepOutcome | None = self._worker_side.take_outcome()
        return outcome

    # -- called in the scheduler -------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_matched = self._scheduler_side.num_matched(request, num_computed_tokens)
        return num_matched, num_matched > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata(
            self._scheduler_side.take_loads(),
            is_idle=scheduler_output.total_num_scheduled_tokens == 0,
            engine_id=self._kv_transfer_config.engine_id,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        outcome = connector_output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self._scheduler_side.note(outcome)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler_side.finished(request)
