"""The arguments and the command with which vLLM serves fused prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from kvrag.fusion.controller import calibrated
from kvrag.ingest.index import Index
from kvrag.llms.vllm.artefacts import ArtefactStore
from kvrag.llms.vllm.opening import config_of, place_of
from kvrag.llms.vllm.settings import CONNECTOR, ConnectorSettings
from kvrag.llms.vllm.versions import require_tested
from kvrag.models.loading import resolve_model


def engine_options(settings: ConnectorSettings) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` and ``AsyncEngineArgs`` that serve an index.

    Parameters
    ----------
    settings
        The operator's settings; model, dtype and context window are the index's.

    Raises
    ------
    IndexNotFoundError, IndexFormatError
        If there is no index, or its configuration is damaged.
    ModelLoadError
        If the folder of the index's model is gone.
    StoreError
        If a shared index cannot be reached.
    """
    config = config_of(settings)
    return {
        "model": resolve_model(config.model),
        "dtype": config.dtype,
        "worker_cls": "kvrag.llms.vllm.engine_worker.KVRagWorker",
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "kvrag.llms.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings.to_extra_config() | {"index": place_of(settings)},
        },
    }


def serve_command(
    settings: ConnectorSettings, *, host: str, port: int, more: Sequence[str] = ()
) -> list[str]:
    """Return the command that serves an index over vLLM's OpenAI-compatible API.

    Parameters
    ----------
    settings
        The operator's settings.
    host, port
        The address to listen on.
    more
        Further options of ``vllm serve``; they come last, so they override earlier ones.

    Raises
    ------
    EngineVersionError
        If vLLM is not installed, or its version was not tested.
    IndexNotFoundError, IndexFormatError, ModelLoadError
        See `engine_options`.
    ParameterError, StoreError
        If a store's URL is wrong, the store refuses, or the policy needs a missing calibration.
    """
    require_tested(any_version=settings.any_version)
    _check_opening(settings)
    options = engine_options(settings)
    return [
        sys.executable,
        "-m",
        # The module that "vllm serve" runs; CPU builds of vLLM have no working "vllm" command.
        "vllm.entrypoints.openai.api_server",
        f"--model={options['model']}",
        f"--dtype={options['dtype']}",
        f"--worker-cls={options['worker_cls']}",
        f"--kv-transfer-config={json.dumps(options['kv_transfer_config'])}",
        # Every answer, also a streamed one, then contains the number of cached tokens.
        "--enable-prompt-tokens-details",
        f"--host={host}",
        f"--port={port}",
        *more,
    ]


def _check_opening(settings: ConnectorSettings) -> None:
    """Raise the errors now that the engine's processes would otherwise raise a minute later."""
    with Index.open(place_of(settings), store=settings.store) as index:
        ArtefactStore(index, settings.artefacts).close()
        calibrated(settings.make_policy(), lambda: index.calibration)
