"""Whether an engine is set up in a way that stored KV fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.errors import EngineError
from kvrag.fusion.compression.spec import NO_COMPRESSION
from kvrag.ingest.config import IndexConfig
from kvrag.kvcache import DTYPES
from kvrag.llms.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def check_engine(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings
) -> IndexConfig:
    """Return what the index was made with.

    Raises
    ------
    EngineError
        When the engine splits the model, caches another type of KV, or runs the model in another
        type than the index.
    IndexNotFoundError, IndexFormatError
        When there is no index.
    """
    config = IndexConfig.load(Path(settings.index).expanduser().resolve())
    parallel = vllm_config.parallel_config
    for what, size in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if size != 1:
            raise EngineError(f"{what}={size}: kvrag writes whole models' KV only; set it to 1")
    found = vllm_config.model_config.dtype
    if found != DTYPES[config.dtype]:
        raise EngineError(
            f"the engine runs the model in {found}, the index holds KV in {config.dtype}: serve "
            f"with dtype={config.dtype!r}, or make the index with the engine's type"
        )
    cache_type = vllm_config.cache_config.cache_dtype
    if cache_type not in ("auto", config.dtype):
        raise EngineError(f"kv_cache_dtype={cache_type!r}: stored KV fits 'auto' only")
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise EngineError(
            "the engine caches several kinds of layers apart, which kvrag does not write into; set "
            "disable_hybrid_kv_cache_manager"
        )
    if config.compression != NO_COMPRESSION:
        raise EngineError(
            f"{settings.index} stores chunks as {config.compression}: their rows are no tokens, "
            "and vLLM counts one row a token. Serve an index without compression"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise EngineError(
            "kv_load_failure_policy='fail' would fail requests whose KV cannot be loaded: set "
            "'recompute'"
        )
    return config
