"""Opens the index that an engine serves, and checks that the engine's configuration fits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvrag import arguments
from kvrag.errors import EngineError
from kvrag.fusion.compression.spec import NO_COMPRESSION
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.index import Index
from kvrag.ingest.shared.place import read_place
from kvrag.kvcache import DTYPES
from kvrag.llms.vllm.settings import ConnectorSettings
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
    if config.compression != NO_COMPRESSION:
        raise EngineError(
            f"{settings.index} stores chunks as {config.compression}, whose rows are not tokens, "
            "but vLLM has one row per token. Serve an index without compression"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise EngineError(
            "kv_load_failure_policy='fail' would fail requests whose KV cannot be loaded: set "
            "'recompute'"
        )
    return config
