"""Places that only tasks of Ray read: URLs of buckets, and Parquet.

The driver lists them, and each task reads its own files: one that cannot be read is left out, with
its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, urlencode

from kvrag.errors import DocumentError, ParameterError
from kvrag.store.registry import without_password

_PARQUET = ".parquet"
_PART_BYTES = 128 << 20
"""Bytes of a Parquet file that one task reads."""
_BATCH_ROWS = 256
_FOOTERS_AT_ONCE = 16
_GCS_SECONDS = 30  # its client would try for 15 minutes
_SCHEMES = ("s3", "gs", "gcs", "abfss", "abfs", "file", "hdfs", "viewfs")  # pyarrow's


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


def check_scheme(place: str) -> None:
    """Raise ParameterError for a URL of a kind that is not read."""
    scheme, colon, _ = place.lower().partition("://")
    if not colon or scheme in _SCHEMES:
        return
    raise ParameterError(
        f"{without_password(place)}: {scheme}:// cannot be read; expected a URL of s3://, gs://, "
        "file:// or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH, or a path"
    )


def list_places(places: Sequence[str], suffixes: Collection[str]) -> list[Listed]:
    """Return the files of some places, each once, in the order of their names.

    A place that is a folder has the files with one of `suffixes` (with their dot) and Parquet,
    without hidden ones.

    Raises
    ------
    ParameterError
        When a place is of an unknown kind, does not exist, or cannot be listed.
    """
    files: dict[Listed, None] = {}
    servers: list[str] = []
    for place in places:
        system, _ = _opened(place)
        # The first place on a server stands for it, so that a file of two places is one file.
        server = next((one for one in servers if _opened(one)[0] == system), place)
        servers.append(server)
        for path, size in _files_of(place, {*suffixes, _PARQUET}):
            files[Listed(server, path, size)] = None
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE, "kvrag-footers") as pool:
        parts = zip(files, pool.map(_num_parts, files), strict=True)
        return [replace(one, part=part, num_parts=num) for one, num in parts for part in range(num)]


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
        Receives the reason why the file, or some of its rows, cannot be read.
    """
    path = listed.path
    try:
        with _opened(listed.place)[0].open_input_file(path) as file:
            if _is_parquet(path):
                yield from _rows(file, listed, fail)
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
        fail(f"{path}: cannot be read ({error})")
    else:
        yield {"path": path, "bytes": content}, path


def _rows(
    file: Any, listed: Listed, fail: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a part, each with where it is."""
    import pyarrow.parquet as pq

    path, parquet = listed.path, pq.ParquetFile(file)
    groups = range(parquet.num_row_groups)
    if parquet.metadata.num_rows == 0:
        raise DocumentError(f"{path}: holds no rows")
    share = [len(groups) * edge // listed.num_parts for edge in (listed.part, listed.part + 1)]
    end = sum(parquet.metadata.row_group(one).num_rows for one in groups[: share[0]])
    for group in groups[slice(*share)]:
        number, end = end, end + parquet.metadata.row_group(group).num_rows
        try:
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group]):
                for row in each_row(batch):
                    number += 1
                    place = f"{path}, row {number}"
                    if isinstance(row, dict):
                        yield row, place
                    else:
                        fail(f"{place}: cannot be read ({row})")
        except Exception as error:  # the other groups may be sound
            fail(f"{path}, rows {number + 1} to {end}: cannot be read ({error})")


def each_row(batch: Any) -> Iterator[dict[str, Any] | Exception]:
    """Yield each row of a batch of Arrow, or why Python cannot hold it: text that is not UTF-8."""
    for first in range(0, batch.num_rows, _BATCH_ROWS):
        part = batch.slice(first, _BATCH_ROWS)
        try:
            yield from part.to_pylist()
        except Exception:  # of any type of Arrow: one by one
            for number in range(part.num_rows):
                try:
                    yield part.slice(number, 1).to_pylist()[0]
                except Exception as error:
                    yield error


def _num_parts(listed: Listed) -> int:
    """Return the number of tasks that read a file."""
    import pyarrow.parquet as pq

    if listed.size_bytes < _PART_BYTES or not _is_parquet(listed.path):
        return 1
    try:
        with _opened(listed.place)[0].open_input_file(listed.path) as file:
            num_groups: int = pq.ParquetFile(file).num_row_groups
    except Exception:  # its task says why, once
        return 1
    return max(1, min(num_groups, 1 + listed.size_bytes // _PART_BYTES))


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(_PARQUET)


@functools.lru_cache(maxsize=64)
def _opened(place: str) -> tuple[Any, str]:
    """Return the file system of a place, and its path there."""
    from pyarrow import fs

    if "://" not in place:
        return fs.LocalFileSystem(), str(Path(place).expanduser().resolve())
    check_scheme(place)
    try:
        return fs.FileSystem.from_uri(_uri(place))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise _unreadable(place, "read", error) from error


def _uri(place: str) -> str:
    """Return a URL as pyarrow spells it; kvrag's stores say `endpoint`."""
    scheme, _, rest = place.partition("://")
    scheme = scheme.lower()
    if scheme not in ("s3", "gs", "gcs"):
        return f"{scheme}://{rest}"
    path, _, given = rest.partition("?")
    query = dict(parse_qsl(given, keep_blank_values=True))
    if "endpoint" in query:
        protocol, _, server = query.pop("endpoint").rpartition("://")
        query |= {"endpoint_override": server.rstrip("/"), "scheme": protocol or "https"}
    if scheme != "s3":
        query.setdefault("retry_limit_seconds", str(_GCS_SECONDS))
    return f"{scheme}://{path}" + (f"?{urlencode(query)}" if query else "")


def _unreadable(place: str, verb: str, error: Exception) -> ParameterError:
    # pyarrow's text may quote the URL.
    shown, reason = without_password(place), without_password(str(error))
    return ParameterError(f"{shown}: cannot be {verb} ({reason})")


def _files_of(place: str, suffixes: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield path and size of a place's files."""
    from pyarrow import fs

    files, root = _opened(place)
    try:
        (info,) = files.get_file_info([root])
        if info.type == fs.FileType.NotFound:
            raise ParameterError(f"{without_password(place)}: there is no such file or folder")
        if info.type == fs.FileType.File:
            yield info.path, info.size
            return
        listed = files.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, ValueError) as error:
        raise _unreadable(place, "listed", error) from error
    for info in sorted(listed, key=lambda one: one.path):
        below = PurePosixPath(info.path.removeprefix(root))
        is_hidden = any(name.startswith(".") for name in below.parts)
        is_file = info.type == fs.FileType.File
        if is_file and not is_hidden and below.suffix.lower() in suffixes:
            yield info.path, info.size
