"""Stores by URL."""

from __future__ import annotations

from kvrag.errors import ParameterError
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.store.memory import MemoryStore


def open_store(url: str) -> Store:
    """Return the store at `url`.

    Parameters
    ----------
    url
        ``file:PATH`` (or ``file:///PATH``) for a folder, ``memory:`` for a new, empty store
        in this process.

    Raises
    ------
    ParameterError
        When the URL is of no known kind.
    StoreError
        When the store cannot be used.
    """
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "file" and rest:
        if not rest.startswith("//"):
            return FileStore(rest)
        if rest.startswith("///"):
            return FileStore("/" + rest.lstrip("/"))
    if colon and scheme == "memory" and not rest:
        return MemoryStore()
    raise ParameterError(f"a store is file:PATH, file:///PATH or memory:; found {url!r}")
