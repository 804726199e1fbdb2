"""Places that only tasks of Ray read: URLs of buckets, and Parquet.

The driver lists them, and each task reads its own files: one that cannot be read is left out, with
its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvrag.errors import DocumentError, ParameterError
from kvrag.store.registry import without_password

_PARQUET = ".parquet"
_PART_BYTES = 128 << 20
"""Bytes of a Parquet file that one task reads."""
_BATCH_ROWS = 256


@dataclass(frozen=True)
class Listed:
    """A file, or some row groups of a Parquet file.

    Attributes
    ----------
    place, path
        The given place, and the file in its file system.
    size_bytes
        Size of the whole file.
    part, num_parts
        Which part of the file's row groups it is.
    """

    place: str
    path: str
    size_bytes: int
    part: int = 0
    num_parts: int = 1


def is_for_ray(place: str) -> bool:
    """Return whether a place is a URL or a Parquet file, which tasks of Ray read."""
    return "://" in place or _is_parquet(place)


def list_places(places: Sequence[str], suffixes: Collection[str]) -> list[Listed]:
    """Return the files of some places, in the order of their names.

    A place that is a folder has the files with one of `suffixes` (with their dot) and Parquet,
    without hidden ones.

    Raises
    ------
    ParameterError
        When a place is of an unknown kind, does not exist, or cannot be listed.
    """
    found = []
    for place in places:
        for path, size in _files_of(place, {*suffixes, _PARQUET}):
            num_parts = 1 + size // _PART_BYTES if _is_parquet(path) else 1
            parts = range(num_parts)
            found += [Listed(place, path, size, part, num_parts) for part in parts]
    return found


def read_listed(
    listed: Listed, max_bytes: int, fail: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a file as one row, or the rows of Parquet; each with where it is, for messages.

    Parameters
    ----------
    listed
        The file.
    max_bytes
        Largest size of a file that is read whole.
    fail
        Receives the reason why the file, or the rest of it, cannot be read.
    """
    place = path = listed.path
    try:
        with _opened(listed.place)[0].open_input_file(path) as file:
            if _is_parquet(path):
                for number, row in _rows(file, listed):
                    place = f"{path}, row {number}"
                    yield {"path": path, **row}, place
                return
            if listed.size_bytes > max_bytes:
                raise DocumentError(
                    f"{path}: has {listed.size_bytes:,} bytes, and at most {max_bytes:,} are read; "
                    "split it, or raise the limit (--max-file-size, or ParseLimits.max_file_bytes)"
                )
            content = file.read()
    except DocumentError as error:
        fail(str(error))
    except Exception as error:  # of the file system, or of damaged Parquet
        after = "" if place == path else " after this row; the rows before it are indexed"
        fail(f"{place}: cannot be read{after} ({error})")
    else:
        yield {"path": path, "bytes": content}, path


def _rows(file: Any, listed: Listed) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of the rows of a part."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    groups = range(parquet.num_row_groups)
    if parquet.metadata.num_rows == 0:
        raise DocumentError(f"{listed.path}: holds no rows")
    share = [len(groups) * edge // listed.num_parts for edge in (listed.part, listed.part + 1)]
    number = sum(parquet.metadata.row_group(one).num_rows for one in groups[: share[0]])
    for group in groups[slice(*share)]:  # one by one: a damaged one leaves those before it
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group]):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(_PARQUET)


@functools.lru_cache(maxsize=64)
def _opened(place: str) -> tuple[Any, str]:
    """Return the file system of a place, and its path there."""
    from pyarrow import fs

    shown = without_password(place)
    if "://" not in place:
        return fs.LocalFileSystem(), str(Path(place).expanduser().resolve())
    if place.lower().startswith(("az://", "azure://")):
        raise ParameterError(
            f"{shown}: the URL does not name the account; write "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
        )
    try:
        return fs.FileSystem.from_uri(place)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        scheme = place.partition("://")[0]
        raise ParameterError(
            f"{shown}: {scheme}:// cannot be read ({error}); expected a URL of s3://, gs://, "
            "abfss:// or file://, or a path"
        ) from error


def _files_of(place: str, suffixes: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield path and size of a place's files."""
    from pyarrow import fs

    files, root = _opened(place)
    shown = without_password(place)
    try:
        (info,) = files.get_file_info([root])
        if info.type == fs.FileType.NotFound:
            raise ParameterError(f"{shown}: there is no such file or folder")
        if info.type == fs.FileType.File:
            yield info.path, info.size
            return
        listed = files.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, ValueError) as error:
        raise ParameterError(f"{shown}: cannot be listed ({error})") from error
    for info in sorted(listed, key=lambda one: one.path):
        below = PurePosixPath(info.path.removeprefix(root))
        is_hidden = any(name.startswith(".") for name in below.parts)
        is_file = info.type == fs.FileType.File
        if is_file and not is_hidden and below.suffix.lower() in suffixes:
            yield info.path, info.size
