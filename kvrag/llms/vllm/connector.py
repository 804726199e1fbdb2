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

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from kvrag.errors import EngineError
from kvrag.llms.vllm.options import check_engine
from kvrag.llms.vllm.pages import Pages
from kvrag.llms.vllm.scheduler_side import SchedulerSide
from kvrag.llms.vllm.settings import ConnectorSettings, require_tested
from kvrag.llms.vllm.transfer import StepMetadata, StepOutcome
from kvrag.llms.vllm.weights import fusing
from kvrag.llms.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


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
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
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
        assert self._worker_side is not None
        layers = self._vllm_config.compilation_config.static_forward_context
        (group,) = self._kv_cache_config.kv_cache_groups
        self._worker_side.use_pages(Pages(layers, kv_caches, group.kv_cache_spec.block_size))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker_side is not None
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
        assert self._worker_side is not None
        ended, failed = self._worker_side.finish(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepOutcome | None:
        assert self._worker_side is not None
        return self._worker_side.take_outcome()

    # -- called in the scheduler -------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler_side is not None
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler_side is not None
        num_matched = self._scheduler_side.num_matched(request, num_computed_tokens)
        return num_matched, num_matched > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler_side is not None
        self._scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        assert self._scheduler_side is not None
        return StepMetadata(
            self._scheduler_side.take_loads(),
            is_idle=scheduler_output.total_num_scheduled_tokens == 0,
            engine_id=self._kv_transfer_config.engine_id,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler_side is not None
        outcome = connector_output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self._scheduler_side.note(outcome)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler_side is not None
        return False, self._scheduler_side.finished(request)
