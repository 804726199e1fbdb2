"""Indexes opened once for a whole process, for adapters that are given a path.

A retriever and a language model that name the same folder then share one catalog, one
embedding model and one set of weights.
"""

from __future__ import annotations

import threading
from pathlib import Path

from kvrag.ingest.index import Index

# The folder's device and inode are part of the entry: a folder that was deleted and made again
# is another index.
_opened: dict[tuple[str, str | None], tuple[tuple[int, int], Index]] = {}
_opening = threading.Lock()


def shared_index(index: Index | str | Path, *, model: str | None = None) -> Index:
    """Return `index` if it is one, else the process's index for that folder.

    Parameters
    ----------
    index
        An opened index, or the folder of one.
    model
        Where to take the model from, if not from where the index says; only with a folder.

    Raises
    ------
    IndexNotFoundError, IndexFormatError, IndexMismatchError
        As `Index.open` does.
    """
    if isinstance(index, Index):
        return index if model is None else shared_index(index.path, model=model)
    path = Path(index).expanduser().resolve()
    key = (str(path), model)
    with _opening:
        if key in _opened and path.is_dir():
            identity, opened = _opened[key]
            if identity == _identity(path):
                return opened
        opened = Index.open(path, model=model)
        _opened[key] = (_identity(path), opened)
        return opened


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
