"""Contract 5: killed at any moment, the index opens and a second run completes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import stored_bytes
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import trials

DOCUMENTS = [
    Document(f"d{i}", f"Page {i}. The keeper of the northern light wrote the book. " * 3)
    for i in range(16)
]

# Everything is imported once; each ingestion is a child that is forked before any computing
# thread exists. Small windows make catalog commits and records alternate quickly.
INGEST = """
import os, sys, torch
from kvrag.ingest import stages
from kvrag.ingest.index import Index
from tests.ingest.test_kill import DOCUMENTS, tiny_model
torch.set_num_threads(1)
stages.COMMIT_TOKENS = 200
model = tiny_model()
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    folder, how = line.split()
    child = os.fork()
    if child:
        print(child, flush=True)
        sys.stdin.readline()
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    if how == "create":
        index = Index.create(folder, model=model, embedding="hashing", chunk_tokens=64)
    else:
        index = Index.open(folder, model=model)
    index.add(DOCUMENTS)
    os._exit(0)
"""


def tiny_model() -> KVModel:
    return KVModel.load(make_model("llama", num_hidden_layers=2), tokenizer=make_tokenizer())


class Ingester:
    """A process whose children ingest and are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", INGEST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._read() == "ready"

    def ingest_and_kill(self, folder: Path, seconds: float) -> None:
        """Begin (again) to ingest, and send SIGKILL after so many seconds."""
        is_made = (folder / "index.json").exists()
        self._tell(f"{folder} {'open' if is_made else 'create'}")
        child = int(self._read())
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still its own
        self._tell("reap")
        assert self._read() == "ended"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
@pytest.mark.trials
def test_killed_at_random_moments_the_index_opens_and_is_completed(tmp_path: Path) -> None:
    model = tiny_model()
    with Index.create(
        tmp_path / "whole", model=model, embedding="hashing", chunk_tokens=64
    ) as whole:
        started = time.perf_counter()
        whole.add(DOCUMENTS)
        seconds = time.perf_counter() - started
        expected = stored_bytes(whole)
        expected_hits = whole.search("Page 7", 5)

    chance = random.Random(int(os.environ.get("KVRAG_TEST_SEED", "0")))
    folder = tmp_path / "killed"
    num_chunks = 0
    ingester = Ingester()
    try:
        for round_number in range(trials(60, 3)):
            # The first is killed while the index is being made.
            ingester.ingest_and_kill(
                folder, chance.uniform(0, seconds / 3) if round_number else 0.005
            )
            if not (folder / "index.json").exists():
                continue
            with Index.open(folder, model=model) as index:
                report = index.upkeep.verify()
                assert report.ok, report.problems
                assert report.num_chunks >= num_chunks  # what was committed stays
                num_chunks = report.num_chunks
                for hit in index.search("Page 7", 5):
                    assert index.open_kv(hit.chunk.chunk_id) is not None
    finally:
        ingester.close()

    with (
        Index.open(folder, model=model)
        if (folder / "index.json").exists()
        else Index.create(folder, model=model, embedding="hashing", chunk_tokens=64)
    ) as index:
        index.add(DOCUMENTS)
        index.upkeep.gc()
        assert stored_bytes(index) == expected
        assert [(h.chunk, h.score) for h in index.search("Page 7", 5)] == [
            (h.chunk, h.score) for h in expected_hits
        ]
        assert index.upkeep.verify().ok
