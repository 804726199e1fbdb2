"""Everything that a vLLM must be told so that it serves fused prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrag.ingest.config import IndexConfig
from kvrag.llms.vllm.settings import ConnectorSettings
from kvrag.models.loading import resolve_model


def engine_options(settings: ConnectorSettings) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` and ``AsyncEngineArgs`` that serve an index.

    Parameters
    ----------
    settings
        The operator's; model, type and context window are the index's own.

    Raises
    ------
    IndexNotFoundError, IndexFormatError
        When there is no index.
    ModelLoadError
        When its model's folder is gone.
    """
    folder = Path(settings.index).expanduser().resolve()
    config = IndexConfig.load(folder)
    return {
        "model": resolve_model(config.model),
        "dtype": config.dtype,
        "worker_cls": "kvrag.llms.vllm.engine_worker.KVRagWorker",
        "kv_transfer_config": {
            "kv_connector": "KVRagConnector",
            "kv_connector_module_path": "kvrag.llms.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings.to_extra_config() | {"index": str(folder)},
        },
    }
