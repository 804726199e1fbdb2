"""What an index may be made from, and whether a folder may become one."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.codec.names import RAW, parse_codec
from kvrag.errors import IndexMismatchError, ParameterError
from kvrag.fusion.compression.spec import parse_compression
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import config as configs
from kvrag.ingest import counting, lock, profiles, words
from kvrag.ingest.chunker import MIN_CHUNK_TOKENS
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import context_limit
from kvrag.models.control import default_control_tokens
from kvrag.store.base import Store
from kvrag.store.limited import LimitedStore
from kvrag.store.memory import MemoryStore
from kvrag.store.tiered import TieredStore
from kvrag.store.wrapper import innermost

if TYPE_CHECKING:
    import torch

    from kvrag.codec.profile import Profile
    from kvrag.ingest.embedding import Embedding
    from kvrag.models.kv_model import KVModel

KV_FOLDER = "kv"
_OUR_FILES = {
    configs.FILE_NAME,
    counting.FILE_NAME,
    lock.FILE_NAME,
    configs.VECTORS_NAME,
    words.FILE_NAME,
    KV_FOLDER,
    profiles.FOLDER_NAME,
} | {catalogs.FILE_NAME + end for end in ("", "-wal", "-shm", "-journal")}


def check_settings(codec: str, chunk_tokens: int, tenant_salt: bytes) -> None:
    """Raise ParameterError for values that no model could make good."""
    parse_codec(codec)
    arguments.whole(chunk_tokens, "chunk_tokens", MIN_CHUNK_TOKENS)
    if not isinstance(tenant_salt, bytes):
        raise ParameterError(
            f"tenant_salt: expected 1 to 64 bytes, found {type(tenant_salt).__name__}"
        )
    if not 1 <= len(tenant_salt) <= 64:
        raise ParameterError(f"tenant_salt is 1 to 64 bytes, found {len(tenant_salt)}")


def check_limit(store: Store, config: IndexConfig) -> None:
    """Close a store and raise ParameterError when a tier of it is limited to less than a chunk."""
    needed = config.chunk_tokens * config.expected_bytes_per_token
    tiers = store.tiers if isinstance(store, TieredStore) else (store,)
    for tier in tiers:
        if isinstance(tier, LimitedStore) and tier.limit_bytes < needed:
            store.close()
            raise ParameterError(
                f"{tier.url} holds no chunk of {config.chunk_tokens} tokens, which take about "
                f"{needed:,} bytes; raise its limit, or choose fewer chunk_tokens or another codec"
            )


def check_lasting(store: Store) -> None:
    """Raise ParameterError when what is kept in a store is gone with the process."""
    home = innermost(store.tiers[-1] if isinstance(store, TieredStore) else store)
    if isinstance(home, MemoryStore):
        raise ParameterError(
            f"{store.url} is gone when the process ends: choose a store that lasts; memory may be "
            "a tier before it"
        )


def check_device(device: str | None, model: KVModel | None = None) -> None:
    """Raise ParameterError when a device cannot be used here, or `model` is on another one."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ParameterError(f"device {device!r}: expected a name such as 'cpu' or 'cuda'")
    # Only now: without a device nothing of the model's library is needed yet.
    from kvrag.models.loading import usable_device

    wanted = usable_device(device)
    if model is not None and model.device != wanted:
        raise ParameterError(
            f"device {device} was asked for, but the model given is on {model.device}"
        )


def make_config(
    given: Any,
    model: KVModel,
    *,
    dtype: torch.dtype | str | None,
    embedding: Embedding,
    codec: str,
    profile: Profile | None,
    chunk_tokens: int,
    context: str,
    context_tokens: int | None,
    compression: str,
    tenant_salt: bytes,
    control_tokens: str | None,
) -> IndexConfig:
    """Return the settings of a new index.

    Parameters
    ----------
    given
        The model as the caller named it.
    model
        The same, loaded.

    Raises
    ------
    ParameterError
        When chunks would not fit into the model's context, or it is of another dtype.
    AnchorsError
        When chunks are to be compressed with anchors that the model does not have.
    """
    prefix_ids = model.default_prefix_ids()
    dtype_name = str(model.spec.dtype).removeprefix("torch.")
    if dtype is not None and str(dtype).removeprefix("torch.") != dtype_name:
        raise ParameterError(
            f"dtype {dtype} was asked for, but the model given is loaded in {dtype_name}"
        )
    if chunk_tokens + len(prefix_ids) > model.max_positions:
        raise ParameterError(
            f"chunk_tokens={chunk_tokens} behind a shared prefix of {len(prefix_ids)} tokens "
            f"exceeds the model's context of {model.max_positions}; choose at most "
            f"{model.max_positions - len(prefix_ids)}"
        )
    if profile is not None and parse_codec(codec).preset == RAW:
        raise ParameterError(
            f"codec {codec!r} takes no profile: name the codec it was fitted for, or leave it out"
        )
    if profile is not None:
        from kvrag.ingest.coding import check_profile

        check_profile(profile, codec, model.spec, model.fingerprint)
    chosen = parse_compression(compression)
    anchors = ""
    if chosen is not None:
        from kvrag.fusion.compression.encoding import Compressor, room_behind

        anchors = Compressor(model, chosen).anchors_digest
        most = model.max_positions - len(prefix_ids) - room_behind(chosen, model.tokenizer, 1)
        if chunk_tokens > most:
            raise ParameterError(
                f"chunk_tokens={chunk_tokens} leaves compression {chosen} no room in the model's "
                f"context of {model.max_positions} to work in behind a chunk; choose at most "
                f"{most}, better half of the context"
            )
    return IndexConfig(
        model=_model_reference(given, model),
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        num_layers=model.spec.num_layers,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=dtype_name,
        max_positions=model.max_positions,
        prefix_ids=prefix_ids,
        embedding=embedding.name,
        embedding_dim=embedding.dim,
        codec=parse_codec(codec).label,
        profile="" if profile is None else profile.hash,
        chunk_tokens=int(chunk_tokens),
        context=context,
        context_tokens=context_limit(context, context_tokens),
        compression=compression if chosen is None else str(chosen),
        anchors=anchors,
        tenant_salt=tenant_salt.hex(),
        index_id=secrets.token_hex(16),
        control_tokens=control_tokens or default_control_tokens(model.tokenizer),
    )


def _model_reference(given: Any, loaded: KVModel) -> str:
    """Return by what name a model can be loaded again, or "" if it cannot."""
    name = str(given) if isinstance(given, str | Path) else loaded.name
    path = Path(name).expanduser()
    if path.exists():  # a folder, or a GGUF file
        return str(path.resolve())
    return name if isinstance(given, str) or "/" in name or name == "kvrag-tiny" else ""


def check_embedding(config: IndexConfig, folder: Path, embedding: Embedding) -> None:
    """Raise IndexMismatchError unless `embedding` is the one an index was made with."""
    found = (embedding.name, embedding.dim)
    expected = (config.embedding, config.embedding_dim)
    if found != expected:
        raise IndexMismatchError(
            f"{folder} was made with the embedding {expected[0]!r} of {expected[1]} dimensions, "
            f"found {found[0]!r} of {found[1]}; use the one it was made with"
        )


def require_free(folder: Path) -> None:
    """Raise ParameterError when a folder holds an index or anything that is not ours."""
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise ParameterError(f"{folder} is not a folder that can be used: {error}") from error
    if configs.FILE_NAME in names:
        raise ParameterError(
            f"there is an index in {folder} already: open it with Index.open, or use another folder"
        )
    # Files of ours without index.json are from a run that was killed while making the index.
    foreign = sorted(name for name in names - _OUR_FILES if not name.endswith(".tmp"))
    if foreign:
        raise ParameterError(
            f"{folder} is not empty (it holds {foreign[0]!r}): use a new folder for the index"
        )
