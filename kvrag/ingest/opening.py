"""Opening an index's folder."""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrag import arguments
from kvrag.arguments import check_compute
from kvrag.codec.names import parse_codec
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import config as configs
from kvrag.ingest import counting, profiles
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.catalogfile import is_lost
from kvrag.ingest.config import (
    KV_FOLDER,
    LOCK_NAME,
    NO_COMPRESSION,
    TEXT,
    VIEW_OF_NAME,
    IndexConfig,
    write_atomically,
    writer_lock,
)
from kvrag.ingest.contexts import (
    ALONE,
    INDEX,
    SIMILAR,
    check_filler,
    default_context,
    parse_context,
)
from kvrag.ingest.encoders import Encoders, check_device, check_embedding, check_limit
from kvrag.ingest.encryption import (
    key_check,
    make_catalog,
    open_catalog,
    replace_catalog,
    secret_salt,
)
from kvrag.ingest.profiles import adapter_of, check_use, kept_in, read_writer
from kvrag.ingest.settings import IndexSettings
from kvrag.ingest.storage import Storage
from kvrag.models.control import default_control_tokens
from kvrag.store.base import Store, capability
from kvrag.store.file import FileStore, store_errors
from kvrag.store.registry import open_store

if TYPE_CHECKING:
    from kvrag.ingest.embedding import Embedding
    from kvrag.models.kv_model import KVModel

logger = logging.getLogger("kvrag")


class Given(NamedTuple):
    """What a caller of `Index.open` gives, besides or in place of what the index records."""

    model: Any
    embedding: Any
    device: str | None
    store: str | None
    compute: str | None


def open_index(
    path: str | Path, given: Given, *, mend: bool, is_view: bool = False
) -> tuple[Storage, Encoders]:
    """Open an index. Parameters and errors are those of `Index.open`.

    With `is_view`, the folder is a view of a shared index, which nobody else may open.
    """
    model, embedding, device, store, compute = given
    check_device(device)
    check_compute(compute)
    arguments.flag(mend, "mend")
    folder = arguments.resolved_path(path, "path")
    config = IndexConfig.load(folder)
    try:
        parse_codec(config.codec)
    except ParameterError as error:
        raise IndexFormatError(f"{folder}: {error}; a newer kvrag may know it") from error
    if not is_view and (folder / VIEW_OF_NAME).exists():
        raise ParameterError(
            f"{folder} is this machine's view of a shared index: open that by its URL, which is in "
            f"{VIEW_OF_NAME} there"
        )
    if embedding is not None:
        from kvrag.ingest.embedding import recorded_embedding

        embedding = recorded_embedding(config.embedding, embedding)
        check_embedding(config, folder, embedding)
    encoders = Encoders(
        folder, config, model=model, embedding=embedding, device=device, compute=compute
    )
    storage = _open_storage(folder, config, store, mend)
    try:
        encoders.compare_given()
        if not is_view:  # which a shared index brings up to date first
            encoders.check_writer()
    except BaseException:
        storage.close()
        raise
    return storage, encoders


def _open_storage(folder: Path, config: IndexConfig, store: str | None, mend: bool) -> Storage:
    url = store or config.store
    opened = open_store(url, must_answer=False) if url else FileStore(folder / KV_FOLDER)
    check_limit(opened, config)
    try:
        catalog, lost = _open_catalog(folder, config, opened, mend)
    except BaseException:
        opened.close()
        raise
    return Storage(folder, config, catalog, opened, lost)


def _open_catalog(
    folder: Path, config: IndexConfig, store: Store, mend: bool
) -> tuple[Catalog, str]:
    """Return the catalog, and the reason if an empty one replaces the index's, or ""."""
    try:
        return open_catalog(folder, config, store), ""
    except IndexFormatError as error:
        path = folder / catalogs.FILE_NAME
        is_there = not is_lost(path)
        if not mend or (is_there and error.__cause__ is None):
            raise  # another schema is not damage
        with writer_lock(folder):
            catalog = replace_catalog(folder, config, store)
        lost = (
            f"{path} was damaged ({error.__cause__}) and is set aside as {path.name}.damaged"
            if is_there
            else f"{path} was missing or empty"
        )
        logger.warning("%s: all documents are lost; ingest all of them again", lost)
        return catalog, lost


_OUR_FILES = {
    configs.FILE_NAME,
    counting.FILE_NAME,
    LOCK_NAME,
    configs.VECTORS_NAME,
    configs.RUNS_NAME,
    configs.WORDS_NAME,
    KV_FOLDER,
    profiles.FOLDER_NAME,
} | {catalogs.FILE_NAME + end for end in ("", "-wal", "-shm", "-journal")}


def make_index(path: str | Path, given: Any, settings: IndexSettings) -> tuple[Storage, Encoders]:
    """Create an empty index. Parameters and errors are those of `Index.create`."""
    from kvrag.ingest.embedding import default_embedding, get_embedding
    from kvrag.models.kv_model import KVModel

    folder = arguments.resolved_path(path, "path")
    _require_free(folder)
    device = settings.device
    wanted = default_embedding() if settings.embedding is None else settings.embedding
    embedding = get_embedding(wanted)
    model = KVModel.load(given, dtype=settings.dtype, device=device)
    check_device(device, model)
    writer, fingerprint = (b"", "") if settings.writer is None else read_writer(settings.writer)
    config = replace(_make_config(given, model, embedding, settings), writer=fingerprint)
    if settings.writer is not None:
        check_use(parse_context(config.context))
        adapter_of(writer, Path(settings.writer), model)
    encoders = Encoders(folder, config, model=model, embedding=embedding, device=device)
    return _make_storage(folder, config, settings, writer), encoders


def _make_config(
    given: Any, model: KVModel, embedding: Embedding, settings: IndexSettings
) -> IndexConfig:
    """Return the configuration of a new index.

    Parameters
    ----------
    given
        The model as the caller gave it.
    model, embedding
        The loaded model and the loaded embedding.
    settings
        The caller's settings.

    Raises
    ------
    ParameterError
        When chunks would not fit into the model's context, or the model has another dtype.
    """
    dtype, codec, profile = settings.dtype, settings.codec, settings.profile
    chunk_tokens = settings.chunk_tokens
    prefix_ids = model.default_prefix_ids()
    dtype_name = str(model.chunk_spec.dtype).removeprefix("torch.")
    if dtype is not None and str(dtype).removeprefix("torch.") != dtype_name:
        raise ParameterError(
            f"dtype {dtype} was asked for, but the model given is loaded in {dtype_name}"
        )
    if chunk_tokens + len(prefix_ids) > model.max_positions:
        raise ParameterError(
            f"chunk_tokens={chunk_tokens} after a shared prefix of {len(prefix_ids)} tokens "
            f"exceeds the model's context of {model.max_positions}; choose at most "
            f"{model.max_positions - len(prefix_ids)}"
        )
    if profile is not None and not parse_codec(codec).takes_profile:
        raise ParameterError(
            f"codec {arguments.shown(codec)} takes no profile: name the codec it was fitted for, "
            "or leave it out"
        )
    if profile is not None:
        from kvrag.ingest.coding import check_profile

        check_profile(profile, codec, model.chunk_spec, model.fingerprint)
    room = model.max_positions - len(prefix_ids)
    if model.why_whole and settings.context not in (None, ALONE.name):
        raise ParameterError(
            f"context {settings.context}: chunks have no KV with this model ({model.why_whole}); "
            "leave it out"
        )
    if settings.context is not None:
        context = parse_context(settings.context)
        check_filler(context, model.tokenizer, room, chunk_tokens)
    elif model.why_whole or model.is_position_bound:
        context = ALONE
    else:
        context = default_context(model.tokenizer, model.max_positions, room, chunk_tokens)
    if settings.trust != INDEX and context.name != SIMILAR:
        raise ParameterError(
            f"trust {settings.trust}: only context {SIMILAR} puts other documents before a chunk, "
            f"and this index has {context}; leave it out, or choose {SIMILAR}"
        )
    return IndexConfig(
        model=_model_reference(given, model),
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        num_layers=model.chunk_spec.num_layers,
        num_kv_heads=model.chunk_spec.num_kv_heads,
        head_dim=model.chunk_spec.head_dim,
        dtype=dtype_name,
        max_positions=model.max_positions,
        prefix_ids=prefix_ids,
        embedding=embedding.name,
        embedding_dim=embedding.dim,
        codec=parse_codec(codec).label,
        profile="" if profile is None else profile.hash,
        chunk_tokens=int(chunk_tokens),
        context=context.name,
        context_tokens=context.num_tokens,
        trust=settings.trust,
        compression=TEXT if model.why_whole else NO_COMPRESSION,
        tenant_salt=settings.salt.hex(),
        index_id=secrets.token_hex(16),
        control_tokens=settings.control_tokens or default_control_tokens(model.tokenizer),
    )


def _make_storage(
    folder: Path, config: IndexConfig, settings: IndexSettings, writer: bytes
) -> Storage:
    """Create an empty index in a new or empty folder and open it. Raises as `Index.create`."""
    with contextlib.ExitStack() as undoing:
        opened = None if settings.store is None else open_store(settings.store)
        if opened is not None:
            undoing.callback(opened.close)
            config = replace(config, store=opened.url, key_check=key_check(opened))
            if settings.tenant_salt is None and (salt := secret_salt(opened)) is not None:
                config = replace(config, tenant_salt=salt.hex())
            check_limit(opened, config)
            if (folder_store := capability(opened, FileStore)) is not None:
                folder_store.check_writable()
        with store_errors("make the folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
        with writer_lock(folder):
            _require_free(folder)
            store = FileStore(folder / KV_FOLDER) if opened is None else opened
            catalog = make_catalog(folder, config, store)
            if writer:
                place = kept_in(folder, config.writer)
                place.parent.mkdir(exist_ok=True)
                write_atomically(place, writer)
            if settings.profile is not None:
                profiles.ProfileFolder(folder / profiles.FOLDER_NAME).add(settings.profile)
            # Written last, since this file makes the folder an index.
            config.save(folder)
        undoing.pop_all()
    return Storage(folder, config, catalog, store)


def _require_free(folder: Path) -> None:
    """Raise ParameterError if a folder holds an index or any foreign file."""
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise ParameterError(f"{folder} is not a folder that can be used: {error}") from error
    if configs.FILE_NAME in names:
        raise ParameterError(
            f"there is an index in {folder} already: open it with Index.open, or use another folder"
        )
    # Our files without index.json come from a run that was killed while it created the index.
    foreign = sorted(name for name in names - _OUR_FILES if not name.endswith(".tmp"))
    if foreign:
        raise ParameterError(
            f"{folder} is not empty (it holds {foreign[0]!r}): use a new folder for the index"
        )


def _model_reference(given: Any, loaded: KVModel) -> str:
    """Return the name by which a model can be loaded again, or "" if it cannot."""
    name = str(given) if isinstance(given, str | Path) else loaded.name
    path = arguments.path(name, "model")
    if path.exists():  # a folder, or a GGUF file
        return str(path.resolve())
    return name if isinstance(given, str) or "/" in name or name == "kvrag-tiny" else ""
