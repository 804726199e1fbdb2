"""Checks that a store, a device or an embedding suits an index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.arguments import shown
from kvrag.codec.names import RAW
from kvrag.errors import IndexMismatchError, ParameterError
from kvrag.ingest.config import IndexConfig
from kvrag.store.base import Limits, Store, capability, is_in_memory, tiers_of

if TYPE_CHECKING:
    from kvrag.ingest.embedding import Embedding
    from kvrag.models.kv_model import KVModel


def check_limit(store: Store, config: IndexConfig) -> None:
    """Close a store and raise ParameterError if one of its tiers cannot hold a single chunk."""
    if not config.profile:  # what is stored before there is enough to fit a codec is raw
        config = replace(config, codec=RAW)
    needed = config.chunk_tokens * config.expected_bytes_per_token
    for tier in tiers_of(store):
        limited = capability(tier, Limits)
        if limited is not None and limited.limit_bytes < needed:
            store.close()
            raise ParameterError(
                f"{tier.url} holds no chunk of {config.chunk_tokens} tokens, which take about "
                f"{needed:,} bytes; raise its limit, or choose fewer chunk_tokens or another codec"
            )


def check_lasting(store: Store) -> None:
    """Raise ParameterError if a store's content ends with the process."""
    if is_in_memory(tiers_of(store)[-1]):
        raise ParameterError(
            f"{store.url} is gone when the process ends: choose a store that lasts; memory may be "
            "a tier before it"
        )


def check_device(device: str | None, model: KVModel | None = None) -> None:
    """Raise ParameterError if a device cannot be used here, or `model` is on another one."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ParameterError(f"device {shown(device)}: expected a name such as 'cpu' or 'cuda'")
    # Imported late: without a device, the model's library is not needed yet.
    from kvrag.models.references import usable_device

    wanted = usable_device(device)
    if model is not None and model.device != wanted:
        raise ParameterError(
            f"device {device} was asked for, but the model given is on {model.device}"
        )


def check_embedding(config: IndexConfig, folder: Path, embedding: Embedding) -> None:
    """Raise IndexMismatchError unless the index was made with `embedding`."""
    found = (embedding.name, embedding.dim)
    expected = (config.embedding, config.embedding_dim)
    if found != expected:
        raise IndexMismatchError(
            f"{folder} was made with the embedding {shown(expected[0])} of {expected[1]} "
            "dimensions, "
            f"found {shown(found[0])} of {found[1]}; use the one it was made with"
        )
