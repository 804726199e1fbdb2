"""Writers of a shared index are killed at any moment: what they said is written is there, once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kvrag.ingest.index import Index
from kvrag.ingest.shared.manifest import Log
from kvrag.ingest.shared.place import read_place
from kvrag.models.kv_model import KVModel
from tests.ingest.test_kill import tiny_model
from tests.support.properties import trials

# Everything is imported once; each writer is a child, forked before any thread exists.
WRITE = """
import os, sys, torch
from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.ingest.shared import log
from tests.ingest.test_kill import tiny_model
torch.set_num_threads(1)
log.MOST_DELTAS = 5
model = tiny_model()
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    if line == "reap\\n":
        os.wait()
        print("reaped", flush=True)
        continue
    url, views, name, journal = line.split()
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    os.environ["KVRAG_VIEWS"] = views
    index = Index.open(url, model=model)
    with open(journal, "a") as said:
        said.write("open\\n")
        said.flush()
        for number in range(1000):
            source = f"{name}.{number}"
            index.add([Document(source, f"Page {source}. The keeper of the light wrote it. " * 3)])
            said.write(source + "\\n")
            said.flush()
    os._exit(1)
"""


class Writers:
    """A process whose children write to an index until they are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WRITE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._told("ready")

    def _told(self, expected: str = "") -> str:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert not expected or said == expected
        return said

    def _ask(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._told()

    def start(self, url: str, views: Path, name: str, journal: Path) -> int:
        return int(self._ask(f"{url} {views} {name} {journal}"))

    def kill(self, writer: int) -> None:
        os.kill(writer, signal.SIGKILL)  # not reaped yet, so the number is still its own
        assert self._ask("reap") == "reaped"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def text_of(journal: Path) -> str:
    return journal.read_text() if journal.exists() else ""


@pytest.mark.trials
def test_killed_writers(tmp_path: Path, model: KVModel, monkeypatch: pytest.MonkeyPatch) -> None:
    num_kills = trials(100, 3)
    url = f"file://{tmp_path}/bucket/index"
    views = [tmp_path / "machine0", tmp_path / "machine1"]
    monkeypatch.setenv("KVRAG_VIEWS", str(views[0]))
    tiny = tiny_model()
    Index.create(url, model=tiny, embedding="hashing", chunk_tokens=64, context="none").close()
    chance = random.Random(num_kills)
    writers = Writers()
    journals: list[Path] = []
    try:
        running: list[int] = []
        for kill in range(num_kills):
            # Two machines write at once; each is killed in turn, and its view is opened again.
            while len(running) < 2:
                number = len(journals)
                journals.append(tmp_path / f"journal{number}")
                machine = views[(kill + len(running)) % 2]
                running.append(writers.start(url, machine, f"w{number}", journals[-1]))
            # Every other one has written, and is killed in one of its next commits.
            deadline = time.monotonic() + 60 * (kill % 2)
            while time.monotonic() < deadline and "w" not in text_of(journals[-2]):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.4))
            writers.kill(running.pop(0))
        for writer in running:
            writers.kill(writer)
    finally:
        writers.close()
    said = {
        line for journal in journals for line in text_of(journal).split("\n")[:-1] if line != "open"
    }
    assert said
    for machine in [*views, tmp_path / "newcomer"]:
        monkeypatch.setenv("KVRAG_VIEWS", str(machine))
        with Index.open(url, model=tiny) as index:
            found = Counter(row.source for row in index.documents())
            assert not said - found.keys()
            assert set(found.values()) == {1}
            # Each writer may have been killed between its commit and its journal, once.
            assert len(found) <= len(said) + len(journals)
            report = index.upkeep.verify()
            assert report.ok, report
            version = index.refresh()
            assert index.catalog.version()[0] == version
    versions = Log(read_place(url).bucket("log")).versions()
    assert versions == list(range(version + 1))
