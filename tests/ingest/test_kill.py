"""Contract 5: killed at any moment, the index opens and a second run completes it."""

import os
import random
import time
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from tests.ingest.conftest import stored_bytes
from tests.support.killing import Forking
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import trials

DOCUMENTS = [
    Document(f"d{i}", f"Page {i}. The keeper of the northern light wrote the book. " * 3)
    for i in range(16)
]

# Small windows make catalog commits and records alternate quickly.
INGEST = """
from kvrag.ingest import stages
from kvrag.ingest.index import Index
from tests.ingest.test_kill import DOCUMENTS, tiny_model
stages.COMMIT_TOKENS = 200
model = tiny_model()

def work(folder, how):
    if how == "create":
        index = Index.create(folder, model=model, embedding="hashing", chunk_tokens=64)
    else:
        index = Index.open(folder, model=model)
    index.add(DOCUMENTS)
"""


def tiny_model() -> KVModel:
    return KVModel.load(make_model("llama", num_hidden_layers=2), tokenizer=make_tokenizer())


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
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
    with Forking(INGEST) as ingester:
        for round_number in range(trials(60, 2)):
            is_made = (folder / "index.json").exists()
            child = ingester.start(folder, "open" if is_made else "create")
            # The first is killed while the index is being made.
            time.sleep(chance.uniform(0, seconds / 3) if round_number else 0.005)
            ingester.kill(child)
            if not (folder / "index.json").exists():
                continue
            with Index.open(folder, model=model) as index:
                report = index.upkeep.verify()
                assert report.ok, report.problems
                assert report.num_chunks >= num_chunks  # what was committed stays
                num_chunks = report.num_chunks
                for hit in index.search("Page 7", 5):
                    assert index.open_kv(hit.chunk.chunk_id) is not None

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
