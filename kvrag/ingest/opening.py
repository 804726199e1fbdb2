"""Opening an index's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvrag import arguments
from kvrag.codec.names import parse_codec
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.ingest import catalog as catalogs
from kvrag.ingest import lock
from kvrag.ingest.catalog import Catalog
from kvrag.ingest.catalogfile import is_lost
from kvrag.ingest.checks import check_device, check_embedding, check_limit
from kvrag.ingest.config import KV_FOLDER, VIEW_OF_NAME, IndexConfig
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.encryption import open_catalog, replace_catalog
from kvrag.ingest.storage import Storage
from kvrag.models.precision import check_compute
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.store.registry import open_store

logger = logging.getLogger("kvrag")


def open_index(
    path: str | Path,
    model: Any,
    embedding: Any,
    device: str | None,
    store: str | None,
    compute: str | None,
    *,
    mend: bool,
    is_view: bool = False,
) -> tuple[Storage, Encoders]:
    """Open an index. Parameters and errors are those of `Index.open`.

    With `is_view`, the folder is a view of a shared index, which nobody else may open.
    """
    check_device(device)
    check_compute(compute)
    arguments.flag(mend, "mend")
    folder = arguments.resolved_path(path, "path")
    config = _load_config(folder)
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
    except BaseException:
        storage.close()
        raise
    return storage, encoders


def _load_config(folder: Path) -> IndexConfig:
    """Return the settings of an index. Raises as `IndexConfig.load` does."""
    config = IndexConfig.load(folder)
    try:
        parse_codec(config.codec)
    except ParameterError as error:
        raise IndexFormatError(f"{folder}: {error}; a newer kvrag may know it") from error
    return config


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
        with lock.writer_lock(folder):
            catalog = replace_catalog(folder, config, store)
        lost = (
            f"{path} was damaged ({error.__cause__}) and is set aside as {path.name}.damaged"
            if is_there
            else f"{path} was missing or empty"
        )
        logger.warning("%s: all documents are lost; ingest all of them again", lost)
        return catalog, lost
