"""vLLM's worker, extended to share its loaded weights with the connector."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from kvrag.llms.vllm.weights import prepare

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class KVRagWorker(_Worker):  # type: ignore[misc]
    """The platform's worker; vLLM's option ``worker_cls`` names this class."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and what kvrag fuses with, for the connector that is made next."""
        super().load_model(*args, **kwargs)
        prepare(self.vllm_config, self.model_runner.get_model())
