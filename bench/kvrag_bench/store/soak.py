"""Many queries one after the other: memory and open files must not grow."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index

_NUM_DOCUMENTS = 60
_CHUNKS_PER_QUERY = 3
# Share of queries until which caches and the allocator's pools fill.
_WARM_SHARE = 0.2


@dataclass(frozen=True)
class SoakRow:
    """What a long run takes.

    Attributes
    ----------
    num_queries, seconds
        Prompts of three chunks fused and answered with one token, and the time.
    memory_bytes, memory_growth_bytes
        Resident memory at the end, with freed memory returned to the system, and its growth since
        the first fifth.
    num_files, num_files_growth
        Open file descriptors likewise.
    num_misses
        Chunks that had to be prefilled.
    hits
        Records opened, by tier.
    """

    num_queries: int
    seconds: float
    memory_bytes: int
    memory_growth_bytes: int
    num_files: int
    num_files_growth: int
    num_misses: int
    hits: dict[str, int]


def measure_soak(folder: Path, num_queries: int, on_progress: Callable[[str], None]) -> SoakRow:
    """Ask an index of kvrag-tiny whose KV is in memory over disk over another folder."""
    home = f"file:{folder / 'home'}"
    # Both tiers are smaller than the index: records come and go all the time.
    url = f"tiered:memory:?limit=8MB|file:{folder / 'near'}?limit=12MB|{home}"
    with Index.create(
        folder / "index", model="kvrag-tiny", embedding="hashing", chunk_tokens=64, store=home
    ) as index:
        index.add([Document(f"document-{n}", _text(n)) for n in range(_NUM_DOCUMENTS)])
    chance = random.Random(0)
    num_misses = 0
    warm = max(int(_WARM_SHARE * num_queries), 1)
    memory = files = 0
    started = time.perf_counter()
    with Index.open(folder / "index", store=url) as index:
        engine = KVEngine(index, policy="none", max_tokens=1, session_bytes=0)
        for number in range(num_queries):
            texts = [_text(n) for n in chance.sample(range(_NUM_DOCUMENTS), _CHUNKS_PER_QUERY)]
            answer = engine.generate("\n\n".join([*texts, f"Question {number % 10}?\nAnswer:"]))
            num_misses += sum(answer.report.misses.values())
            if number + 1 == warm:
                memory, files = _resident_bytes(), _num_files()
            if number % 100 == 0:
                on_progress(f"{number:,} of {num_queries:,} queries")
        hits: dict[str, int] = {}
        for place, counts in enumerate(index.store.counts()):
            hits[f"{place}: {counts.name}"] = counts.hits
        memory_bytes, num_files = _resident_bytes(), _num_files()
    return SoakRow(
        num_queries=num_queries,
        seconds=time.perf_counter() - started,
        memory_bytes=memory_bytes,
        memory_growth_bytes=memory_bytes - memory,
        num_files=num_files,
        num_files_growth=num_files - files,
        num_misses=num_misses,
        hits=hits,
    )


def _text(number: int) -> str:
    chance = random.Random(number)
    names = ("Ines", "Tomas", "Mara", "Edvin", "Ruth", "Olaf", "Petra", "Janek")
    things = ("ledger", "clock", "boats", "mill", "archive", "school", "garden", "bridge")
    return " ".join(
        f"{chance.choice(names)} of house {number} keeps the {chance.choice(things)}."
        for _ in range(5)
    )


def _resident_bytes() -> int:
    gc.collect()
    # Freed memory that the allocator keeps, more or less of it by chance, is no growth.
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def _num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
