"""Actors, raylets and the driver are killed in mid-run: nothing is lost, nothing is done twice."""

import contextlib
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from kvrag.ingest.index import Index
from tests.ingest.ray.conftest import add_node, content
from tests.support.properties import trials

# Ray warns of its own settings, and leaves sockets to the garbage collector.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

NUM_KILLS = int(os.environ.get("KVRAG_TEST_KILLS", trials(30, 3)))
PAUSE = float(os.environ.get("KVRAG_TEST_PAUSE", "10"))
"""Most seconds between two kills."""
NUM_FILES = 120

# Small packets: a kill then hits the middle of the work, and much is left to do.
# Everything is imported once; each driver is a child that is forked before Ray has threads.
DRIVERS = """
import json, os, sys, torch, ray.data
from kvrag.ingest.index import Index
from kvrag.ingest.ray import RayOptions, RayRunner, packets
address, docs = sys.argv[1:]
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    folder = line.strip()
    child = os.fork()
    if child:
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    os.dup2(2, 1)  # what libraries print is no exit code
    with Index.open(folder) as index:
        before = sum(1 for _ in index.store.keys())
        options = RayOptions(address, max_actors=2, cpus=0.5, batch_tokens=512)
        report = index.add(docs, runner=RayRunner(options))
    done = {"before": before, "computed": report.num_records, "ok": report.ok}
    open(folder + ".json", "w").write(json.dumps(done))
    os._exit(0)
"""


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    chance = random.Random(7)
    words = "the keeper of northern light wrote a book about ships in harbour fox dog river".split()  # noqa: SIM905
    for number in range(NUM_FILES):
        text = f"Page {number}. " + " ".join(chance.choices(words, k=220))
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def make(folder: Path) -> Index:
    store = f"file:{folder}-kv"
    return Index.create(
        folder, model="kvrag-tiny", embedding="hashing", chunk_tokens=64, store=store
    )


class Drivers:
    """A process whose children ingest and may be killed."""

    def __init__(self, address: str, docs: Path, errors: IO[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DRIVERS, address, str(docs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self._ended: queue.Queue[int] = queue.Queue()
        self.child = 0
        assert self._read() == "ready"

    def start(self, folder: Path) -> None:
        """Begin (again) to ingest into an index."""
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        self.child = int(self._read())
        threading.Thread(target=lambda: self._ended.put(int(self._read())), daemon=True).start()

    def wait(self, seconds: float) -> int | None:
        """Return the child's exit code, or None if it still runs after so many seconds."""
        with contextlib.suppress(queue.Empty):
            return self._ended.get(timeout=seconds)
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        return self._process.stdout.readline().strip()


def test_kills_at_random_moments_lose_nothing_and_repeat_nothing(
    cluster: Any, docs: Path, tmp_path: Path
) -> None:
    with make(tmp_path / "whole") as whole:
        whole.add(docs)
        expected = content(whole)
        num_records = whole.stats().num_records
    seed = int(os.environ.get("KVRAG_TEST_SEED", "0"))
    chance = random.Random(seed)
    kinds = [("actor", "raylet", "driver")[number % 3] for number in range(NUM_KILLS)]
    chance.shuffle(kinds)
    with (tmp_path / "drivers.err").open("w+") as errors:
        drivers = Drivers(cluster.address, docs, errors)
        try:
            for number in itertools.count():
                folder = tmp_path / f"round-{number}"
                make(folder).close()
                _ingest_under_fire(cluster, drivers, folder, chance, kinds)
                done = json.loads(Path(f"{folder}.json").read_text())
                assert done["ok"]
                # What an actor stored before it was killed is in neither number.
                assert done["before"] + done["computed"] <= num_records
                with Index.open(folder) as index:
                    assert content(index) == expected
                    assert index.upkeep.verify().ok
                if not kinds:
                    break
        finally:
            drivers.close()
            errors.seek(0)
            print(errors.read()[-4000:])


def _ingest_under_fire(
    cluster: Any, drivers: Drivers, folder: Path, chance: random.Random, kinds: list[str]
) -> None:
    """Run drivers until one finishes; kill by the list meanwhile, and shorten it."""
    while True:
        drivers.start(folder)
        code = None
        while code is None:
            code = drivers.wait(chance.uniform(0, PAUSE) if kinds else 600)
            if code is None:
                assert kinds, "the last run does not end"
                kind = kinds[-1]
                if _kill(cluster, drivers.child, kind, chance):
                    print(f"{time.strftime('%X')} killed: {kinds.pop()}", flush=True)
                    if kind == "driver":
                        code = drivers.wait(60)
        if code == 0:
            print(f"{time.strftime('%X')} done: {folder.name}", flush=True)
            return
        assert code == -signal.SIGKILL, code


def _kill(cluster: Any, driver: int, kind: str, chance: random.Random) -> bool:
    """Kill one of a kind; return False if there is none at the moment."""
    if kind == "driver":
        os.kill(driver, signal.SIGKILL)
        return True
    if kind == "raylet":
        (node,) = cluster.worker_nodes
        os.kill(_raylet_of(node), signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        add_node(cluster)
        return True
    raylets = {_raylet_of(node) for node in [cluster.head_node, *cluster.worker_nodes]}
    actors = sorted(_actors_of(raylets))
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(chance.choice(actors), signal.SIGKILL)
        return True
    return False


def _raylet_of(node: Any) -> int:
    (started,) = node.all_processes["raylet"]
    return int(started.process.pid)


def _actors_of(raylets: set[int]) -> Iterator[int]:
    """Yield the processes that embed or compute, children of these raylets."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            title = (place / "cmdline").read_bytes()
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if title.startswith(b"ray::MapWorker") and parent in raylets:
                yield int(place.name)
