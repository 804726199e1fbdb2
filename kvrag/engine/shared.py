"""Indexes opened once for a whole process, for adapters that are given a path.

A retriever and a language model that name the same folder then share one catalog, one
embedding model and one set of weights.
"""

from __future__ import annotations

import atexit
import threading
from pathlib import Path

from kvrag import arguments
from kvrag.ingest.config import FILE_NAME
from kvrag.ingest.index import Index

# What was opened is told by its index.json, which is written once: a folder that was deleted and
# made again is another index.
_opened: dict[tuple[str, str | None, str | None], tuple[tuple[int, ...] | None, Index]] = {}
_opening = threading.Lock()


def shared_index(
    index: Index | str | Path, *, model: str | None = None, device: str | None = None
) -> Index:
    """Return `index` if it is one, else the process's index for that folder.

    Parameters
    ----------
    index
        An opened index, or the folder of one.
    model
        Where to take the model from, if not from where the index says; an opened index is
        then opened once more, from its folder.
    device
        Where the model runs, such as ``"cuda"``; as with `model`.

    Raises
    ------
    IndexNotFoundError, IndexFormatError, IndexMismatchError
        As `Index.open` does.
    """
    if isinstance(index, Index):
        if model is None and device is None:
            return index
        return shared_index(index.path, model=model, device=device)
    path = arguments.path(index, "index").expanduser().resolve()
    key = (str(path), model, device)
    with _opening:
        identity = _identity(path)
        known = _opened.get(key)
        if known is not None and known[0] == identity:
            return known[1]
        opened = Index.open(path, model=model, device=device)
        _opened[key] = (identity, opened)
        return opened


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = (path / FILE_NAME).stat()
    except OSError:
        return None  # opening says what is wrong
    return status.st_dev, status.st_ino, status.st_mtime_ns


@atexit.register
def _close_all() -> None:
    for _, index in _opened.values():
        index.close()
