"""Prompts whose KV is streamed towards a time to first token, from a server that may fail."""

import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.chunk import Document
from kvrag.codec.container import RecordReader
from kvrag.engine.engine import KVEngine
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.fusion.slices import MISS_ABSENT, MISS_DAMAGED, MISS_UNREADABLE
from kvrag.ingest.index import Index
from kvrag.loading.streaming import ChunkStream, StreamEstimates, Streaming, StreamItem
from kvrag.store.base import read_whole
from kvrag.store.file import FileStore
from kvrag_bench.shapes import random_model, random_text
from tests.engine.test_loading import WatchedStore
from tests.support.proxy import FaultyProxy
from tests.support.rag import text_index
from tests.support.threads import together
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


def test_a_server_that_ends_while_chunks_are_refined(
    index: Index, prompt: str, plain: torch.Tensor
) -> None:
    """What is there is of use without it."""
    reads = count()

    def on_read(_: int) -> None:
        if next(reads) >= NUM_CHUNKS:
            raise StoreUnreachableError("gone")

    index.store = WatchedStore(index.store, on_read)
    engine = KVEngine(index, **FULL)
    # So slow that a first pass takes the coarsest planes.
    engine._fuser._estimates.link.expect(20_000.0)
    report = check_right(engine, prompt, plain, ttft=3.0)
    assert report.misses == {}
    assert set(levels_of(report)) <= {"1/5", "2/5", "3/5", "4/5", "5/5", "text"}


def test_prompts_at_the_same_time(index: Index, prompt: str, plain: torch.Tensor) -> None:
    engine = KVEngine(index, **FULL)

    def ask() -> None:
        for ttft in (5.0, 0.05):
            check_right(engine, prompt, plain, ttft)

    together(*[ask] * 4)
    assert sum(engine.stream_counts["deadlines"].values()) == 8


def test_every_codec_can_be_streamed(tmp_path: Path) -> None:
    """Records without planes have one level beside text."""
    model = random_model("test")
    text = random_text(model, 100, seed=1)
    for codec in ("raw", "cachegen:2"):
        options: Any = {"chunk_tokens": 100, "codec": codec, "context": "none"}
        with text_index(tmp_path / codec, model, [text], **options) as index:
            engine = KVEngine(index, policy="none", ttft=30.0)
            fused = engine.fuse(f"{text} and more")
            assert levels_of(fused.report) == {"1/1": 1}
            whole = KVEngine(index, policy="none").fuse(f"{text} and more")
            assert torch.equal(fused.logits, whole.logits)


def test_chunks_of_the_middle_of_a_prompt_are_streamed(tmp_path: Path) -> None:
    model = random_model("test")
    texts = [random_text(model, 100, seed=seed) for seed in (1, 2)]
    prompt = "\n\n".join(["Read this.", *texts, "Which of both?"])
    options: Any = {"chunk_tokens": 100, "context": "filler:16"}
    with text_index(tmp_path / "index", model, texts, **options) as index:
        for policy in ("two_stage", "query:shift=1"):
            fused = KVEngine(index, policy=policy, ttft=30.0).fuse(prompt)
            assert fused.report.num_in_context == 200
            whole = KVEngine(index, policy=policy).fuse(prompt)
            assert torch.equal(fused.logits, whole.logits)


class Interrupted:
    """A chunk whose caller is interrupted while he waits for its first plane."""

    num_tokens, plane_bytes = 10, (5000, 5000)

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def fetch(self, num_planes: int) -> None:
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGINT)
        assert self.cancelled.wait(20)
        raise StoreError("broken off")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
def test_an_interrupt_waits_for_no_store() -> None:
    chunk: Any = Interrupted()
    stream = ChunkStream(
        [StreamItem("chunk", chunk, lambda: None)],
        Streaming(2.0, time.perf_counter(), StreamEstimates()),
        lambda chosen: 1e9 * len(chosen),
        (StoreError, RecordError),
        torch.device("cpu"),
    )
    # Whoever started the tests in the background may have had interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert chunk.cancelled.is_set()
    for thread in threading.enumerate():
        if thread.name.startswith(("kvrag-fetch", "kvrag-decode")):
            thread.join(20)
            assert not thread.is_alive()
