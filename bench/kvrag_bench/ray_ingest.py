"""`kvrag bench ingest --ray`: what a token costs on two actors of Ray, against one process.

Both have two threads: two actors have one each. The difference between a long and a short run
leaves out what starts and ends once. Processor time is that of the ingesting process, of all calls
in workers, and of Ray's daemons; waiting for other users of the machine costs none.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.ingest.ray import RayOptions, RayRunner
from kvrag.models.kv_model import KVModel
from kvrag_bench.shapes import random_text

_TICK_SECONDS = 0.25
_DAEMONS = ("raylet", "gcs_server")


@dataclass(frozen=True)
class RayRow:
    """The cost of a token of chunks: seconds of a long run less those of a short one.

    Attributes
    ----------
    num_tokens
        Tokens of the long run that the short one lacks.
    here_cpu, workers_cpu, rest_cpu
        Processor time for each token, in milliseconds: in one process; with Ray in the workers,
        and in the driver and the daemons, whose loops also run while they wait.
    here_wall, ray_wall
        Wall time for each token, in milliseconds.
    overhead
        How much more processor time a token takes with Ray: 0.1 is 10 %.
    """

    model: str
    num_tokens: int
    here_cpu: float
    workers_cpu: float
    rest_cpu: float
    here_wall: float
    ray_wall: float
    overhead: float


def run_ray_bench(
    model: str,
    num_chunks: int,
    chunk_tokens: int,
    on_progress: Callable[[str], None] | None = None,
) -> RayRow:
    """Ingest a quarter of the chunks, and all of them, in this process' way and with Ray.

    Parameters
    ----------
    model
        A model folder or name, which workers load too.
    num_chunks, chunk_tokens
        Chunks of the long run, and the tokens of each.
    """
    say = on_progress or (lambda _: None)
    if num_chunks < 8:
        raise ParameterError(f"bench ingest --ray: {num_chunks} chunks are too few; take 8 or more")
    loaded = KVModel.load(model)
    texts = [random_text(loaded, chunk_tokens, seed=number) for number in range(num_chunks)]
    del loaded
    sizes = (num_chunks // 4, num_chunks)
    costs: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for size in sizes:
        for on_ray in costs:
            say(f"{size} chunks {'on two actors' if on_ray else 'in one process'}")
            costs[on_ray].append(_cost(model, texts[:size], on_ray))
    (here_cpu, _, here_wall, num_tokens), (rest_cpu, workers_cpu, ray_wall, _) = (
        tuple(long - short for short, long in zip(*costs[on_ray], strict=True))
        for on_ray in (False, True)
    )
    scale = 1000 / num_tokens
    return RayRow(
        model=model,
        num_tokens=int(num_tokens),
        here_cpu=here_cpu * scale,
        workers_cpu=workers_cpu * scale,
        rest_cpu=rest_cpu * scale,
        here_wall=here_wall * scale,
        ray_wall=ray_wall * scale,
        overhead=(workers_cpu + rest_cpu) / here_cpu - 1,
    )


def _cost(model: str, texts: list[str], on_ray: bool) -> tuple[float, ...]:
    """Return processor time here and in workers, wall time and tokens of one ingestion."""
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        given = Path(folder) / "texts.json"
        given.write_text(json.dumps(texts))
        # On a machine that others use, workers at Ray's niceness of 15 would hardly run.
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1" if on_ray else "2",
            "RAY_worker_niceness": "0",
        }
        command = [sys.executable, "-m", __name__, model, str(given), "ray" if on_ray else "here"]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            with _processor_time(process.pid) as seconds:
                out, _ = process.communicate()
            if process.returncode:
                raise ParameterError(f"bench ingest --ray: a run ended with {process.returncode}")
        cpu, in_workers, num_tokens = map(float, out.split()[-3:])
        return seconds() + cpu, in_workers, time.perf_counter() - started, num_tokens


@contextlib.contextmanager
def _processor_time(pid: int) -> Iterator[Callable[[], float]]:
    """Follow Ray's daemons below a process; yield a function of their seconds so far."""
    seen: dict[int, float] = {}
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_TICK_SECONDS):
            seen.update(_daemon_seconds(pid))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield lambda: sum(seen.values())
    finally:
        ended.set()
        thread.join()


def _daemon_seconds(root: int) -> dict[int, float]:
    """Return the processor seconds of Ray's daemons below a process, by process id."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = place.read_text().rpartition(")")
            values = rest.split()
            pid = int(place.parent.name)
            parents[pid] = int(values[1])
            if head.partition("(")[2] in _DAEMONS:
                seconds[pid] = (int(values[11]) + int(values[12])) / ticks

    def is_below(pid: int) -> bool:
        while pid not in (0, root):
            pid = parents.get(pid, 0)
        return pid == root

    return {pid: found for pid, found in seconds.items() if is_below(pid)}


def _ingest(model: str, given: Path, how: str) -> tuple[float, float, int]:
    """Index texts in a new index; return processor seconds here and in workers, and tokens."""
    texts = json.loads(given.read_text())
    documents = [Document(f"{number:06}", text) for number, text in enumerate(texts)]
    # Half a processor each, as far as Ray counts: two cores have room for every stage.
    options = RayOptions("local", min_actors=2, max_actors=2, cpus=0.5)
    with Index.create(
        given.parent / "index",
        model=model,
        embedding="hashing",
        chunk_tokens=600,
        context="none",
        store=f"file:{given.parent / 'kv'}",
    ) as index:
        runner = RayRunner(options) if how == "ray" else None
        started = time.process_time()
        num_tokens = index.add(documents, runner=runner).num_tokens
        in_workers = 0.0 if runner is None else runner.cpu_seconds
        return time.process_time() - started, in_workers, num_tokens


if __name__ == "__main__":
    print(*_ingest(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
