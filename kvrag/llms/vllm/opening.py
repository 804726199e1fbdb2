"""Opens the index that an engine serves: a folder, or a shared index, which is followed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvrag import arguments
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.index import Index
from kvrag.ingest.shared.place import read_place
from kvrag.llms.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
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
