"""Files that list the records an index keeps for other uses than its chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import IndexFormatError, StoreError
from kvrag.ingest.config import write_atomically
from kvrag.regularfile import open_regular

FOLDER = "kept"
_VERSION = 1


def write_kept(path: Path, keys: Mapping[str, int]) -> None:
    """Write the digests of keys, each with its number of tokens. Raises StoreError."""
    content = {"version": _VERSION, "keys": dict(keys)}
    write_atomically(path, json.dumps(content).encode())


def kept_keys(folder: Path) -> dict[str, int]:
    """Return the keys that the lists in an index folder keep, each with its number of tokens.

    Raises
    ------
    IndexFormatError
        When a list is damaged: garbage collection must not rely on it.
    StoreError
        When a list cannot be read.
    """
    found: dict[str, int] = {}
    for path in sorted((folder / FOLDER).glob("[!.]*.json")):
        try:
            with open_regular(path) as file:  # of any size: kvrag wrote it
                content = json.load(file)
            keys = content["keys"]
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}, expected {_VERSION}")
            found |= {ChunkKey(key).digest: int(keys[key]) for key in keys}
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IndexFormatError(
                f"{path}: not a list of kept records ({error}); write it again, with 'kvrag pml "
                "encode' and the schema's file, or delete it if nobody uses that schema"
            ) from error
    return found
