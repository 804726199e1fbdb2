"""Places that only Ray reads: URLs of buckets, and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from kvrag.errors import ParameterError

_JSON = (".jsonl", ".ndjson")
_PARQUET = ".parquet"


def is_for_ray(place: str) -> bool:
    """Return whether a place is a URL or a Parquet file, which Ray Data reads."""
    return "://" in place or place.lower().endswith(_PARQUET)


def open_dataset(places: Sequence[str], suffixes: Sequence[str]) -> Any:
    """Return the dataset of some places; nothing is read yet.

    Parquet and JSON lines become a row for each of their rows. Other places become a row for each
    file with one of `suffixes` (with their dot), which kvrag's loaders read.

    Raises
    ------
    ParameterError
        When the places are of several kinds, or do not exist.
    """
    import ray.data

    kinds = {PurePosixPath(place.partition("?")[0]).suffix.lower() for place in places}
    try:
        if kinds == {_PARQUET}:
            return ray.data.read_parquet(list(places), include_paths=True)
        if kinds and kinds <= set(_JSON):
            extensions = [one[1:] for one in _JSON]
            return ray.data.read_json(
                list(places), lines=True, include_paths=True, file_extensions=extensions
            )
        if not kinds & {_PARQUET, *_JSON}:
            extensions = sorted(one[1:] for one in suffixes if one not in _JSON)
            return ray.data.read_binary_files(
                list(places), include_paths=True, file_extensions=extensions
            )
    except (OSError, ValueError) as error:
        raise ParameterError(f"{places[0]}: cannot be read ({error})") from error
    raise ParameterError(
        f"{', '.join(places)}: Parquet, JSON lines and other files are read in different ways; "
        "give those of one kind, each kind in a run"
    )
