"""A program that works on a store until it is killed, and tells what it has done.

``python -m kvrag_bench.store.victim KIND FOLDER SEED``: `KIND` is ``ingest`` (records one after
another), ``write-behind`` (through a disk tier to another folder) or ``eviction`` (far more than
the store's limit). A line with its number follows each record whose `put` has returned.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore
from kvrag.store.tiered import TieredStore
from kvrag_bench.store.contents import content_of, key_of

KINDS = ("ingest", "write-behind", "eviction")
LIMIT_BYTES = 4_000_000


def open_victim(kind: str, folder: Path) -> Store:
    """Return the store that a kind of victim works on."""
    disk = FileStore(folder / "disk")
    if kind == "ingest":
        return disk
    if kind == "eviction":
        return LimitedStore(disk, LIMIT_BYTES)
    home = FileStore(folder / "home")
    return TieredStore([disk, home], outbox_folder=folder / "disk", check=_accept)


def _accept(key: ChunkKey, record: bytes) -> None:
    """Let anything pass: these records are no records of KV."""
    del key, record


def main(kind: str, folder: str, seed: str) -> None:
    """Put records until killed."""
    store = open_victim(kind, Path(folder))
    chance = random.Random(int(seed))
    print("ready", flush=True)
    while True:
        number = chance.randrange(100_000)
        store.put(key_of(number), content_of(number))
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
