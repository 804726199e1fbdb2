"""Loading behind the computation: the same KV and the same misses, whatever the threads."""

import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch

from kvrag.chunk import ChunkKey
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError, StoreError
from kvrag.fusion.slices import MISS_ABSENT, MISS_SLOW, MISS_UNREADABLE
from kvrag.ingest.index import Index
from kvrag.loading.patience import LEAST_SECONDS, UNKNOWN_SECONDS
from kvrag.models.rows import RowRunner
from kvrag.store.base import RecordWrapper, StoreWrapper
from kvrag_testing.bench_top import TEXTS, relative_difference
from tests.support.threads import at_work

PROMPT = "Context:\n\n" + "\n\n".join([*TEXTS, TEXTS[0]]) + "\n\nQuestion: who keeps it?\nAnswer:"


class WatchedStore(StoreWrapper):
    """Calls `on_read` before each read of more than a header."""

    def __init__(self, inner, on_read: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._on_read = on_read
        self.opened: list[ChunkKey] = []
        self.hidden: set[ChunkKey] = set()

    def open(self, key):
        if key in self.hidden:
            return None
        record = super().open(key)
        number = len(self.opened)
        self.opened.append(key)
        return None if record is None else _Watched(record, lambda: self._on_read(number))


class _Watched(RecordWrapper):
    def __init__(self, inner, on_read) -> None:
        super().__init__(inner)
        self._on_read = on_read

    def read_into(self, offset, buffer) -> None:
        if offset:
            self._on_read()
        super().read_into(offset, buffer)


@pytest.fixture
def watched(index: Index, monkeypatch: pytest.MonkeyPatch):
    def put(on_read: Callable[[int], None]) -> WatchedStore:
        store = WatchedStore(index.store, on_read)
        monkeypatch.setattr(index, "store", store)
        return store

    return put


@pytest.mark.parametrize("policy", ["none", "deviation", "two_stage"])
def test_threads_change_no_bit(index: Index, policy: str) -> None:
    made = [KVEngine(index, load_threads=n).fuse(PROMPT, policy=policy) for n in (0, 1, 4)]
    for other in made[1:]:
        assert torch.equal(other.logits, made[0].logits)
        for layer in range(index.model.spec.num_layers):
            rows = made[0].kv.num_tokens
            for mine, theirs in (
                (other.kv.keys, made[0].kv.keys),
                (other.kv.values, made[0].kv.values),
            ):
                assert torch.equal(mine[layer][:, :, :rows], theirs[layer][:, :, :rows])
        assert other.report.bytes_loaded == made[0].report.bytes_loaded
    assert not at_work("kvrag-load")


def test_layers_are_read_while_others_are_computed(index: Index, watched) -> None:
    """The first computation waits for the reading of another layer to begin, and that for it."""
    computing, reading = threading.Event(), threading.Event()
    forward = RowRunner.forward
    seen: list[bool] = []

    def note(*arguments, **named):
        if not computing.is_set():
            computing.set()
            seen.append(reading.wait(120))
        return forward(*arguments, **named)

    num_reads = itertools.count(1)

    def on_read(_: int) -> None:
        if next(num_reads) == 2:
            reading.set()
            seen.append(computing.wait(120))

    watched(on_read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowRunner, "forward", note)
        prompt = f"{TEXTS[0]}\n\nWho keeps it?"
        made = KVEngine(index, load_threads=2).fuse(prompt, policy="none")
    assert made.report.num_chunks == 1
    assert seen == [True, True]
    assert made.report.hidden_load_seconds > 0


@pytest.mark.parametrize("load_threads", [0, 2])
@pytest.mark.parametrize("blocks", ["opening", "reading"])
def test_a_store_that_does_not_answer_is_given_up(
    index: Index, watched, monkeypatch: pytest.MonkeyPatch, load_threads: int, blocks: str
) -> None:
    answering, asked = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        if number == 1:
            asked.set()
            assert answering.wait(60)

    store = watched(wait if blocks == "reading" else lambda _: None)
    if blocks == "opening":
        opened = store.open

        def open_late(key: ChunkKey):
            record = opened(key)
            wait(len(store.opened) - 1)
            return record

        monkeypatch.setattr(store, "open", open_late)
    engine = KVEngine(index, load_threads=load_threads, store_patience=0.3, session_bytes=0)
    fused = engine.fuse(PROMPT, policy="none")
    expected = KVEngine(index).fuse(PROMPT, reuse=False)
    assert asked.is_set()
    assert not answering.is_set()
    # All chunks of the prompt, the one that stands there twice too.
    assert sum(fused.report.misses.values()) == len(TEXTS) + 1
    assert fused.report.misses[MISS_SLOW] == len(TEXTS) + 1
    assert relative_difference(fused.logits, expected.logits) < 1e-4
    # Another prompt loads as ever, while the read is still pending.
    other = KVEngine(index, store_patience=600, session_bytes=0).fuse(PROMPT, policy="none")
    assert not other.report.misses
    rows = fused.kv.num_tokens  # what follows them was never written
    kept = [layer[:, :, :rows].clone() for layer in fused.kv.keys]
    answering.set()
    while at_work("kvrag-store"):  # the abandoned read ends, and writes nothing to the prompt
        time.sleep(0.01)
    assert all(map(torch.equal, kept, (layer[:, :, :rows] for layer in fused.kv.keys)))


def test_patience_is_the_price_of_computing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []
    opened = index.open_kv

    def note(chunk_id, context_ids=None, *, patience=None):
        given.append(None if patience is None else patience.seconds)
        return opened(chunk_id, context_ids, patience=patience)

    monkeypatch.setattr(index, "open_kv", note)
    engine = KVEngine(index, session_bytes=0)
    engine.fuse(PROMPT, policy="none")
    assert set(given) == {None}  # a folder of this machine
    monkeypatch.setattr("kvrag.loading.threads.is_local", lambda _: False)
    given.clear()
    engine = KVEngine(index, session_bytes=0)
    engine.fuse(PROMPT, policy="none")
    assert set(given) == {UNKNOWN_SECONDS}
    given.clear()
    engine.fuse(PROMPT, policy="none")
    assert set(given) == {LEAST_SECONDS}
    given.clear()
    monkeypatch.setattr(engine._fuser._estimates.computing, "seconds", lambda rows: rows * 1.0)
    engine.fuse(PROMPT, policy="none")
    (seconds,) = set(given)
    assert seconds > 100 * index.model.spec.num_layers
    with pytest.raises(ParameterError, match="store_patience 0: expected a number above 0"):
        KVEngine(index, store_patience=0)


@pytest.mark.parametrize(
    ("num_threads", "policy"), [(0, "deviation"), (1, "none"), (4, "two_stage"), (4, "none")]
)
def test_a_store_that_fails_half_way(index: Index, watched, num_threads: int, policy: str) -> None:
    num_reads = {0: 0, 1: 0}

    def on_read(record: int) -> None:
        if record in num_reads:
            num_reads[record] += 1
            if num_reads[record] > 1:
                raise StoreError("the line was cut")

    store = watched(on_read)
    engine = KVEngine(index, load_threads=num_threads, max_tokens=8)
    given = engine.fuse(PROMPT, policy=policy)
    # Which records they are depends on the threads that open them; one of them may stand twice.
    assert dict(given.report.misses) in ({MISS_UNREADABLE: 2}, {MISS_UNREADABLE: 3})
    assert given.report.num_chunks == len(TEXTS) - 2
    assert len(store.opened) == len(TEXTS)
    assert not at_work("kvrag-load")
    # As if they had never been there.
    store.hidden = set(store.opened[:2])
    expected = engine.fuse(PROMPT, policy=policy)
    assert dict(expected.report.misses).keys() == {MISS_ABSENT}
    assert relative_difference(given.logits, expected.logits) < 1e-4


def test_a_defect_is_not_taken_for_damage(index: Index, watched) -> None:
    def on_read(_: int) -> None:
        raise ZeroDivisionError

    watched(on_read)
    with pytest.raises(ZeroDivisionError):
        KVEngine(index).fuse(PROMPT, policy="none")
    assert not at_work("kvrag-load")
