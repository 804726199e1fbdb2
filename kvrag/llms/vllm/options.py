"""How vLLM serves an index: its arguments and command, and whether its configuration fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.errors import EngineError
from kvrag.fusion.controller import calibrated
from kvrag.ingest.config import IndexConfig, no_kv
from kvrag.ingest.index import Index
from kvrag.ingest.shared.place import read_place
from kvrag.kvcache import DTYPES
from kvrag.llms.vllm.settings import CONNECTOR, ConnectorSettings, require_tested
from kvrag.models.families import WHOLE
from kvrag.models.references import resolve_model
from kvrag.models.shards import check_shards

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvrag.models.kv_model import KVModel


def place_of(settings: ConnectorSettings) -> str:
    """Return the index's URL or folder, with absolute paths: an engine's processes run elsewhere.

    Raises ParameterError.
    """
    if arguments.is_url(settings.index):
        return read_place(settings.index).full_url
    return str(arguments.resolved_path(settings.index, "index"))


def config_of(settings: ConnectorSettings) -> IndexConfig:
    """Return the index's configuration.

    Raises
    ------
    IndexNotFoundError, IndexFormatError
        If there is no index, or its configuration is damaged.
    StoreError
        If a shared index cannot be reached.
    """
    place = place_of(settings)
    if not arguments.is_url(place):
        return IndexConfig.load(Path(place))
    with Index.open(place, store=settings.store) as index:
        return index.config


def open_index(settings: ConnectorSettings, model: KVModel | None = None) -> Index:
    """Open the index, and follow it if it is shared. Raises what `Index.open` does."""
    index = Index.open(place_of(settings), model=model, store=settings.store)
    index.follow()
    return index


def check_engine(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, settings: ConnectorSettings
) -> IndexConfig:
    """Check an engine's configuration, and return that of the index.

    The caches' configuration is None as long as the engine has none.

    Raises
    ------
    EngineError
        If the engine splits prompts, caches another type of KV, runs the model in another dtype
        than the index, or is otherwise set up so that stored KV does not fit.
    UnsupportedModelError
        If the model's heads cannot be shared by the engine's workers.
    IndexNotFoundError, IndexFormatError
        If there is no index, or its configuration is damaged.
    StoreError
        If a shared index cannot be reached.
    """
    config = config_of(settings)
    if not config.has_kv:
        kind = vllm_config.model_config.hf_text_config.model_type
        raise EngineError(no_kv(settings.index, WHOLE.get(kind, "")))
    parallel = vllm_config.parallel_config
    check_shards(vllm_config.model_config.hf_text_config, parallel.tensor_parallel_size)
    for what in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, what)) != 1:
            raise EngineError(
                f"{what}={size}: each worker would have a part of the tokens, but kvrag writes "
                "all of a prompt's to each; set it to 1"
            )
    found = vllm_config.model_config.dtype
    if found != DTYPES[config.dtype]:
        raise EngineError(
            f"the engine runs the model in {found}, but the index holds KV in {config.dtype}: "
            f"serve with dtype={config.dtype!r}, or make the index with the engine's dtype"
        )
    cache_type = vllm_config.cache_config.cache_dtype
    if cache_type not in ("auto", config.dtype):
        raise EngineError(
            f"kv_cache_dtype={cache_type!r}: the engine would round fused KV to {cache_type} with "
            "scales that fit other prompts, and answers would no longer be those that kvrag "
            "measures; set it to 'auto'"
        )
    if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) != 1:
        raise EngineError(
            "the engine has separate caches for several kinds of layers, which kvrag does not "
            "support; set disable_hybrid_kv_cache_manager"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise EngineError(
            "kv_load_failure_policy='fail' would fail requests whose KV cannot be loaded: set "
            "'recompute'"
        )
    return config


def engine_options(settings: ConnectorSettings) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` and ``AsyncEngineArgs`` that serve an index.

    Parameters
    ----------
    settings
        The operator's settings; model, dtype and context window are the index's.

    Raises
    ------
    EngineError
        If the index stores no KV.
    IndexNotFoundError, IndexFormatError
        If there is no index, or its configuration is damaged.
    ModelLoadError
        If the folder of the index's model is gone.
    StoreError
        If a shared index cannot be reached.
    """
    config = config_of(settings)
    if not config.has_kv:  # before vLLM loads anything
        raise EngineError(no_kv(settings.index))
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
        calibrated(settings.make_policy(), lambda: index.calibration)
