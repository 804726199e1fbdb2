"""Prompts whose KV is streamed towards a time to first token, from a server that may fail."""

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.chunk import Document
from kvrag.codec.container import RecordReader
from kvrag.engine.engine import KVEngine
from kvrag.fusion.slices import MISS_ABSENT, MISS_DAMAGED, MISS_UNREADABLE
from kvrag.ingest.index import Index
from kvrag.store.base import read_whole
from kvrag.store.file import FileStore
from kvrag_bench.shapes import random_model, random_text
from tests.engine.test_loading import WatchedStore
from tests.support.proxy import FaultyProxy
from tests.support.web_server import WebServer

NUM_CHUNKS = 4
NUM_PLANES = 5
FULL = {"policy": "deviation", "ratio": 1.0}  # equals full prefill, whatever is loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    model = random_model("test")
    path = tmp_path_factory.mktemp("streaming") / "index"
    # More than the prompt's: the codec is fitted to them.
    texts = [random_text(model, 300, seed=i) for i in range(2 * NUM_CHUNKS)]
    with Index.create(
        path, model=model, embedding="hashing", chunk_tokens=300, codec="stream:2"
    ) as index:
        index.add([Document(source=str(i), text=text) for i, text in enumerate(texts)])
        yield index


@pytest.fixture(scope="module")
def prompt(folder: Index) -> str:
    texts = [random_text(folder.model, 300, seed=i) for i in range(NUM_CHUNKS)]
    # Not at the beginning: a chunk that stands where it was encoded is never computed again.
    begin, end = (random_text(folder.model, 10, seed=seed) for seed in (98, 99))
    return "\n\n".join([begin, *texts, end])


@pytest.fixture
def behind(folder: Index, tmp_path: Path) -> FileStore:
    """What the server serves: a copy that tests may harm."""
    store = FileStore(tmp_path / "served")
    for key in folder.store.keys():  # noqa: SIM118 (a store is no mapping)
        record = folder.store.open(key)
        store.put(key, read_whole(record))
    return store


@pytest.fixture
def server(behind: FileStore) -> Iterator[WebServer]:
    with WebServer(behind.path) as server:
        yield server


@pytest.fixture
def index(folder: Index, server: WebServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setattr("kvrag.store.objects._HEAD_BYTES", 4096)  # these records are small
    with Index.open(folder.path, model=folder.model, store=f"{server.url}?timeout=2") as index:
        yield index


@pytest.fixture
def plain(folder: Index, prompt: str) -> torch.Tensor:
    ids = torch.tensor([KVEngine(folder).prompt_ids(prompt)])
    with torch.no_grad():
        return folder.model.hf(input_ids=ids).logits[0, -1]


def levels_of(report: Any) -> dict[str, int]:
    return dict(report.stream.levels)


def test_with_time_enough_all_is_loaded(folder: Index, index: Index, prompt: str) -> None:
    """Nothing is known of computing yet, so nothing is computed instead."""
    engine = KVEngine(index, policy="none", ttft=60.0)
    streamed = engine.fuse(prompt)
    whole = KVEngine(folder, policy="none").fuse(prompt)
    assert torch.equal(streamed.logits, whole.logits)
    assert levels_of(streamed.report) == {"5/5": NUM_CHUNKS}
    report = streamed.report
    assert report.num_reused == whole.report.num_reused
    assert report.stream.is_met
    assert report.misses == {}
    assert sum(chunk.num_bytes for chunk in report.stream.chunks) < report.bytes_loaded
    assert "streamed in" in report.one_line()
    assert report.to_dict()["stream"]["levels"] == {"5/5": NUM_CHUNKS}
    assert engine.stream_counts == {
        "levels": {"5/5": NUM_CHUNKS},
        "deadlines": {"met": 1},
    }


def test_what_is_as_quick_to_compute_is_computed(
    index: Index, prompt: str, plain: torch.Tensor
) -> None:
    engine = KVEngine(index, policy="none")
    for text in (prompt, "something else entirely"):
        engine.fuse(text)  # what computing takes is known now
    fused = engine.fuse(prompt, ttft=60.0)
    assert levels_of(fused.report) == {"text": NUM_CHUNKS}
    assert fused.report.num_fresh == fused.report.num_tokens
    assert fused.report.misses == {}
    torch.testing.assert_close(fused.logits, plain, rtol=1e-3, atol=1e-4)


def test_without_time_the_least_is_loaded(index: Index, prompt: str) -> None:
    engine = KVEngine(index, policy="none")
    fused = engine.fuse(prompt, ttft=1e-6)
    assert levels_of(fused.report) == {"1/5": NUM_CHUNKS}
    assert not fused.report.stream.is_met
    assert "late" in fused.report.one_line()
    assert engine.stream_counts["deadlines"] == {"missed": 1}


def check_right(engine: KVEngine, prompt: str, plain: torch.Tensor, ttft: float) -> Any:
    fused = engine.fuse(prompt, ttft=ttft)
    torch.testing.assert_close(fused.logits, plain, rtol=1e-3, atol=1e-4)
    report = fused.report
    streamed = len(report.stream.chunks) if report.stream is not None else 0
    assert streamed + sum(report.misses.values()) == NUM_CHUNKS
    return report


@pytest.mark.parametrize("num_reads", [0, 1, 3])
def test_a_server_that_is_killed_in_mid_stream(
    index: Index, server: WebServer, prompt: str, plain: torch.Tensor, num_reads: int
) -> None:
    lock, reads = threading.Lock(), count()

    def on_read(_: int) -> None:
        with lock:
            if next(reads) == num_reads:
                server.stop()

    index.store = WatchedStore(index.store, on_read)
    report = check_right(KVEngine(index, **FULL), prompt, plain, ttft=30.0)
    # The coarsest plane of the first chunk may have come with its header.
    assert set(report.misses) == {MISS_UNREADABLE}
    assert 0 <= NUM_CHUNKS - num_reads - report.misses[MISS_UNREADABLE] <= 1


def damage(store: FileStore, plane: int) -> None:
    """Change a byte in a plane of every record."""
    for key in list(store.keys()):
        record = store.open(key)
        blocks = RecordReader(record, key).header.blocks
        content = bytearray(read_whole(record))
        content[blocks[plane * len(blocks) // NUM_PLANES].offset] ^= 1
        store.replace(key, bytes(content))


def test_what_is_deleted_or_damaged_is_a_miss_and_a_plane_leaves_the_coarser_ones(
    index: Index, behind: FileStore, prompt: str, plain: torch.Tensor
) -> None:
    def asked() -> Any:  # of a new engine, which does not know yet that computing is as quick
        return check_right(KVEngine(index, **FULL), prompt, plain, ttft=30.0)

    damage(behind, NUM_PLANES - 1)
    report = asked()
    assert levels_of(report) == {"4/5": NUM_CHUNKS}
    (counts,) = index.store.counts()
    assert counts.misses["damaged"] == NUM_CHUNKS
    damage(behind, 0)
    assert asked().misses == {MISS_DAMAGED: NUM_CHUNKS}
    (chunk,) = index.get_chunks(index.catalog.chunk_ids_of("0"))
    behind.delete(index.key_of(chunk))
    assert asked().misses == {MISS_ABSENT: 1, MISS_DAMAGED: NUM_CHUNKS - 1}


@pytest.mark.parametrize("mode", ["dead", "half-closed", "wrong", "silent"])
def test_a_bad_line(
    folder: Index, server: WebServer, prompt: str, plain: torch.Tensor, mode: str
) -> None:
    with FaultyProxy(server.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/kv?timeout=0.3"
        with Index.open(folder.path, model=folder.model, store=url) as index:
            engine = KVEngine(index, **FULL)
            proxy.mode = mode
            report = check_right(engine, prompt, plain, ttft=5.0)
            if mode == "wrong":  # some answers are so small that they are left alone
                assert index.store.counts()[0].misses["damaged"] >= 1
            else:
                assert sum(report.misses.values()) == NUM_CHUNKS
            proxy.mode = "good"
            proxy.cut()
