"""Stores whose process is killed at random moments."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import KVRagError
from kvrag.store.base import Store, capability, tiers_of
from kvrag.store.tiered import TieredStore
from kvrag_bench.store.contents import content_of, key_of
from kvrag_bench.store.victim import KINDS, LIMIT_BYTES, open_victim

# Between a victim's first word and its end.
_LONGEST_SECONDS = 0.3


@dataclass(frozen=True)
class CrashRow:
    """The records that killed processes left.

    Attributes
    ----------
    kind
        ``ingest``, ``write-behind`` or ``eviction``.
    num_kills
        Processes killed (SIGKILL), one after the other, on one folder.
    num_put
        Records whose `put` had returned.
    num_not_opened
        Times the store could not be opened and read afterwards.
    num_wrong
        Records found with other bytes than were put.
    num_lost
        Records whose `put` had returned and that are gone (of ``write-behind``: not uploaded
        after the next start either; of ``eviction``: none counts, they may go).
    num_beyond
        For ``eviction``: times that more was found than the limit and one record.
    """

    kind: str
    num_kills: int
    num_put: int
    num_not_opened: int
    num_wrong: int
    num_lost: int
    num_beyond: int


def measure_crashes(
    folder: Path, num_kills: int, seed: int, on_progress: Callable[[str], None]
) -> list[CrashRow]:
    """Kill processes at random moments of their work, and look what they left."""
    rows = []
    for number, kind in enumerate(KINDS):
        share = num_kills // len(KINDS) + (number < num_kills % len(KINDS))
        rows.append(_measure(kind, folder / kind, share, seed, on_progress))
    return rows


def _measure(
    kind: str, folder: Path, num_kills: int, seed: int, on_progress: Callable[[str], None]
) -> CrashRow:
    chance = random.Random(seed)
    put: set[int] = set()
    numbers_by_digest: dict[str, int] = {}
    num_not_opened = num_wrong = num_beyond = 0
    for kill in range(num_kills):
        on_progress(f"{kind}: {kill} of {num_kills} killed")
        told = _kill_one(kind, folder, seed * 100_003 + kill, chance.uniform(0, _LONGEST_SECONDS))
        put.update(told)
        numbers_by_digest.update({key_of(number).digest: number for number in told})
        try:
            with closing(open_victim(kind, folder)) as store:
                wrong, size_bytes = _look(store, numbers_by_digest, chance)
        except KVRagError:
            num_not_opened += 1
            continue
        num_wrong += wrong
        num_beyond += kind == "eviction" and size_bytes > LIMIT_BYTES + 120_000
    return CrashRow(
        kind=kind,
        num_kills=num_kills,
        num_put=len(put),
        num_not_opened=num_not_opened,
        num_wrong=num_wrong,
        num_lost=0 if kind == "eviction" else _num_lost(kind, folder, put),
        num_beyond=num_beyond,
    )


def _kill_one(kind: str, folder: Path, seed: int, seconds: float) -> list[int]:
    """Start a victim, kill it, and return the numbers it has told."""
    command = [sys.executable, "-m", "kvrag_bench.store.victim", kind, str(folder), str(seed)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    with victim.stdout:
        if victim.stdout.readline() == "ready\n":
            time.sleep(seconds)
        victim.kill()
        victim.wait()
        # The last line may be half a number.
        return [int(line) for line in victim.stdout.read().split("\n")[:-1]]


def _look(store: Store, numbers: dict[str, int], chance: random.Random) -> tuple[int, int]:
    """Return how many records have wrong bytes, of a sample, and the bytes of all."""
    sizes = dict(store.sizes())
    known = [key for key in sizes if key.digest in numbers]
    num_wrong = 0
    for key in chance.sample(known, min(len(known), 50)):
        record = store.open(key)
        if record is None:
            num_wrong += 1
            continue
        content = bytearray(record.size_bytes)
        record.read_into(0, memoryview(content))
        record.close()
        num_wrong += content != content_of(numbers[key.digest])
    return num_wrong, sum(sizes.values())


def _num_lost(kind: str, folder: Path, put: set[int]) -> int:
    with closing(open_victim(kind, folder)) as store:
        background = capability(store, TieredStore)
        if background is not None:
            background.flush()
        place = tiers_of(store)[-1]
        return sum(not place.contains(key_of(number)) for number in put)
