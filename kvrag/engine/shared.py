"""Indexes opened once per process, for adapters that take a path.

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
from kvrag.process import after_fork

# index.json identifies an opened index. It is written once, so a folder that was deleted and made
# again is another index.
_opened: dict[tuple[str, str | None, str | None], tuple[tuple[int, ...] | None, Index]] = {}
_opening = threading.Lock()


def _forget() -> None:
    """Forget the indexes of a forked process's parent."""
    global _opening
    _opening = threading.Lock()
    _opened.clear()


after_fork(_forget)


def shared_index(
    index: Index | str | Path, *, model: str | None = None, device: str | None = None
) -> Index:
    """Return an opened `index` unchanged, or the process's index for a folder.

    Parameters
    ----------
    index
        An opened index, the folder of one, or the URL of a shared one, which is then followed.
    model
        The model to use instead of the one that the index names; an opened index is then opened
        again from its folder.
    device
        The device of the model, such as ``"cuda"``; an opened index is then opened again too.

    Raises
    ------
    IndexNotFoundError, IndexFormatError, IndexMismatchError
        See `Index.open`.
    """
    if isinstance(index, Index):
        if model is None and device is None:
            return index
        return shared_index(place_of(index), model=model, device=device)
    is_url = isinstance(index, str) and arguments.is_url(index)
    place = index if is_url else arguments.resolved_path(index, "index")
    key = (str(place), model, device)
    with _opening:
        identity = None if is_url else _identity(Path(place))
        known = _opened.get(key)
        if known is None or known[0] != identity:
            opened = Index.open(place, model=model, device=device)
            if is_url:
                opened.follow()
            known = _opened[key] = (identity, opened)
        return known[1]


def place_of(index: Index | str | Path) -> str:
    """Return the folder or the URL by which another process can open an index."""
    return str(index.url or index.path if isinstance(index, Index) else index)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = (path / FILE_NAME).stat()
    except OSError:
        return None  # opening the index reports what is wrong
    return status.st_dev, status.st_ino, status.st_mtime_ns


@atexit.register
def _close_all() -> None:
    for _, index in _opened.values():
        index.close()
