"""KV that falls out of memory is written to the store, and read back as if it had stayed."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.chunk import ChunkKey
from kvrag.engine import sessions as module
from kvrag.engine.engine import KVEngine
from kvrag.engine.prompt_fuser import MISS_LOST
from kvrag.engine.sessions import StoredKept
from kvrag.errors import StoreError
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.store.base import StoredRecord, StoreWrapper
from kvrag.store.registry import open_store
from kvrag_testing.store_contract import stored
from tests.engine import test_sessions as s
from tests.support.folders import key_file
from tests.support.properties import examples
from tests.support.rag import text_index

ROOM = 1 << 30


@pytest.fixture
def own(tmp_path: Path, model: KVModel) -> Index:
    """An index of the test's own."""
    return text_index(tmp_path / "index", model)


def storing(index: Index, room: int = ROOM, **options: Any) -> KVEngine:
    """Return an engine whose memory has room for no conversation."""
    return KVEngine(
        index, **{"max_tokens": 5, "session_bytes": 1, "session_store_bytes": room, **options}
    )


def tell(engine: KVEngine, prompt: str, **options: Any) -> s.Asked:
    """Answer a prompt, and wait until what falls out of memory is stored."""
    asked = s.ask(engine, prompt, **options)
    engine._fuser.stored.flush()
    return asked


def kept_of(engine: KVEngine) -> list[StoredKept]:
    found = [kept for _, kept in engine._fuser.stored._sessions._kept]
    assert all(isinstance(kept, StoredKept) and kept.kv.storage.numel() == 0 for kept in found)
    return found  # type: ignore[return-value]  # as asserted


def chunk_keys(index: Index) -> set[ChunkKey]:
    chunks = index.get_chunks(
        [one for i in range(4) for one in index.catalog.chunk_ids_of(f"text-{i}")]
    )
    return {index.key_of(chunk) for chunk in chunks}


# -- what is read back equals what stayed in memory ----------------------------------------------


class _Stored(s.Conversations):
    """Conversations with an engine that stores what some or all of them leave."""

    def check(self, chain: tuple[str, ...]) -> s.Asked:
        asked = super().check(chain)
        self.engine._fuser.stored.flush()
        return asked


@pytest.fixture(scope="module", params=["two_stage", "boundary", "none"])
def conversations(request: pytest.FixtureRequest, index: Index) -> _Stored:
    return _Stored(index, request.param)


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_an_answer_is_that_of_a_conversation_in_memory(
    conversations: _Stored, data: st.DataObject
) -> None:
    memory = data.draw(st.sampled_from([0, 1, 1 << 20]))
    store = conversations.index.store
    # An engine of another test may not have been collected yet.
    others = set(store.keys()) - chunk_keys(conversations.index)
    engine = conversations.engine = storing(conversations.index, session_bytes=memory)
    conversations.reads = memory <= 1
    conversations.play(data, 6, lambda: memory > 1 or engine.stored_bytes)
    engine._fuser.stored.close()
    assert set(store.keys()) - others == chunk_keys(conversations.index)


# -- bounds --------------------------------------------------------------------------------------


def test_the_store_is_bounded_and_the_oldest_go_first(own: Index) -> None:
    prompts = [
        s.root_of((i % 4, (i + 1) % 4), question) for i in range(4) for question in s.QUESTIONS
    ]
    before = sum(dict(own.store.sizes()).values())
    one = storing(own)
    tell(one, prompts[0])
    size = one.stored_bytes
    one._fuser.stored.close()
    engine = storing(own, 3 * size)
    for prompt in prompts:
        tell(engine, prompt)
        assert engine.stored_bytes == sum(dict(own.store.sizes()).values()) - before <= 3 * size
    assert len(kept_of(engine)) >= 2
    assert tell(engine, prompts[-1]).report.num_kept > 50
    assert tell(engine, prompts[0]).report.num_kept < 20


def test_no_more_waits_than_is_said(own: Index) -> None:
    engine = storing(own)
    stored_ones = engine._fuser.stored
    with stored_ones._working:  # as if a record were being written
        for number in range(5):
            s.ask(engine, s.root_of((number % 4,), f"{number}?"))
    stored_ones.flush()
    assert len(kept_of(engine)) == module._MAX_WAITING


# -- damage --------------------------------------------------------------------------------------


class _Counting(StoreWrapper):
    """Notes what is asked of a store, and refuses when told to."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.num_put, self.opened = 0, list[ChunkKey]()
        self.refuses_put, self.refused = False, ChunkKey("0" * 40)

    def put(self, key: ChunkKey, record: bytes) -> None:
        self.num_put += 1
        if self.refuses_put:
            raise StoreError("this store is read-only")
        super().put(key, record)

    def open(self, key: ChunkKey) -> StoredRecord | None:
        self.opened.append(key)
        if key == self.refused:
            raise StoreError("this store does not answer")
        return super().open(key)


def _flip(store: Any, key: ChunkKey) -> None:
    content = bytearray(stored(store, key) or b"")
    content[-100] ^= 0x10
    store.replace(key, bytes(content))


def _cut(store: Any, key: ChunkKey) -> None:
    store.replace(key, (stored(store, key) or b"")[:-64])


def _other(store: Any, key: ChunkKey) -> None:
    store.replace(key, stored(store, next(one for one, _ in store.sizes() if one != key)) or b"")


def _refuse(store: Any, key: ChunkKey) -> None:
    store.refused = key


@pytest.mark.parametrize(
    "harm", [_flip, _cut, _other, _refuse, lambda store, key: store.delete(key)]
)
def test_a_lost_record_is_a_counted_miss(own: Index, harm: Callable[..., Any]) -> None:
    own.store = store = _Counting(own.store)
    engine = storing(own)
    prompt = s.root_of((1, 0), s.QUESTIONS[0])
    first = tell(engine, prompt)
    longer = s.next_of(prompt, first.text, (2,), s.QUESTIONS[1])
    (kept,) = kept_of(engine)
    harm(store, kept.key)
    asked = tell(engine, longer)
    plain = tell(KVEngine(own, max_tokens=5, session_bytes=0), longer)
    assert dict(asked.report.misses) == {MISS_LOST: 1}
    assert asked.report.num_kept == 0
    assert torch.equal(asked.logits, plain.logits)
    assert kept.key not in set(own.store.keys())
    # It is counted once, and the conversation goes on.
    again = tell(engine, s.next_of(longer, asked.text, (), s.QUESTIONS[2])).report
    assert again.num_kept > 50
    assert not again.misses


def test_a_store_that_refuses_costs_what_computing_costs(
    own: Index, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.store = store = _Counting(own.store)
    store.refuses_put = True
    engine = storing(own)
    prompt = s.root_of((0, 1), s.QUESTIONS[0])
    with caplog.at_level(logging.WARNING, "kvrag"):
        reports = [tell(engine, prompt).report for _ in range(3)]
    assert all(report.num_kept == 0 and not report.misses for report in reports)
    # It is not asked with every answer, and the user is told once.
    assert store.num_put == 1
    assert [one.getMessage() for one in caplog.records] == [
        "earlier turns cannot be stored, and are computed again once memory has no room for them: "
        "this store is read-only"
    ]
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    store.refuses_put, engine._fuser.stored._refused_until = False, 0.0
    tell(engine, prompt)
    assert tell(engine, prompt).report.num_kept > 50


def test_a_full_store_gives_room_to_either(tmp_path: Path, model: KVModel) -> None:
    """A limited store drops what was used least, records of chunks too; nothing is wrong then."""
    store = f"file:{tmp_path / 'kv'}?limit=600000"
    with text_index(tmp_path / "index", model, store=store) as limited:
        engine, plain = storing(limited), KVEngine(limited, max_tokens=5, session_bytes=0)
        for number in range(12):
            prompt = s.root_of((number % 4, (number + 1) % 4), s.QUESTIONS[number % 3])
            assert tell(engine, prompt, ratio=1.0).text == s.ask(plain, prompt, ratio=1.0).text
            assert sum(dict(limited.store.sizes()).values()) <= 600_000
        assert limited.store.counts()[0].evictions > 0


# -- what is left --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["index", "engine"])
def test_the_end_removes_everything(tmp_path: Path, model: KVModel, how: str) -> None:
    index = text_index(tmp_path / "index", model)
    engine = storing(index)
    for number in range(3):
        tell(engine, s.root_of((number,), s.QUESTIONS[number]))
    s.ask(engine, s.root_of((3,), s.QUESTIONS[0]))  # perhaps not written yet
    assert len(set(index.store.keys()) - chunk_keys(index)) >= 3
    if how == "index":
        index.close()
        index = Index.open(tmp_path / "index", model=model)
    else:
        del engine
        gc.collect()
    assert set(index.store.keys()) == chunk_keys(index)
    index.close()


def test_what_a_killed_process_left_is_garbage_and_no_damage(own: Index) -> None:
    engine = storing(own)
    tell(engine, s.root_of((0, 1), s.QUESTIONS[0]))
    assert own.upkeep.verify().ok
    assert len(list(own.store.keys())) == len(chunk_keys(own)) + 1
    assert own.upkeep.gc().num_records == 1
    assert set(own.store.keys()) == chunk_keys(own)
    # A process that is still there takes it for lost.
    assert dict(tell(engine, s.root_of((0, 1), s.QUESTIONS[0])).report.misses) == {MISS_LOST: 1}


@pytest.mark.parametrize("is_own", [True, False])
def test_a_move_in_the_same_process(tmp_path: Path, model: KVModel, is_own: bool) -> None:
    """The old store keeps nothing of a conversation, and the new one is used from then on."""
    elsewhere = {} if is_own else {"store": f"file:{tmp_path / 'old'}"}
    with text_index(tmp_path / "index", model, **elsewhere) as index:
        old, engine = index.store.url, storing(index)
        prompt = s.root_of((0, 1), s.QUESTIONS[0])
        first = tell(engine, prompt)
        keys, (_kept,) = chunk_keys(index), kept_of(engine)
        index.upkeep.move(f"file:{tmp_path / 'new'}")
        left = set(open_store(old).keys())
        assert left == (set() if is_own else keys)
        assert set(index.store.keys()) == keys
        assert engine.stored_bytes == 0
        second = s.next_of(prompt, first.text, (), s.QUESTIONS[1])
        moved = tell(engine, second)
        # It is not lost: it was given up.
        assert (moved.report.num_kept, moved.report.misses) == (0, {})
        assert moved.text == s.ask(KVEngine(index, max_tokens=5), second).text
        assert tell(engine, second).report.num_kept > 50
        assert len(set(index.store.keys()) - keys) >= 1
    assert set(open_store(f"file:{tmp_path / 'new'}").keys()) == keys


def test_a_fork_leaves_the_records_of_its_parent(
    own: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = storing(own)
    tell(engine, s.root_of((0, 1), s.QUESTIONS[0]))
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        engine._fuser.stored.close()
    assert tell(engine, s.root_of((0, 1), s.QUESTIONS[0])).report.num_kept > 50


def test_an_encrypted_index_holds_no_number_of_a_conversation(
    tmp_path: Path, model: KVModel
) -> None:
    pytest.importorskip("sqlcipher3")
    key = key_file(tmp_path / "tenant.key", "ab")
    found = {}
    for name, end in (("plain", ""), ("encrypted", f"?key_file={key}")):
        store = f"file:{tmp_path / name / 'kv'}{end}"
        with text_index(tmp_path / name / "index", model, store=store) as index:
            engine = KVEngine(index, max_tokens=5, session_bytes=ROOM, session_store_bytes=ROOM)
            s.ask(engine, s.root_of((0, 1), s.QUESTIONS[0]))
            ((_, kept),) = engine._fuser.sessions._kept
            values = kept.kv.values[0][0, 0, : len(kept.token_ids)].clone()
            engine._fuser.sessions._kept.clear()
            engine._fuser.stored.write(None, kept)
            engine._fuser.stored.flush()
            files = [one for one in (tmp_path / name).rglob("*") if one.is_file()]
            content = b"".join(one.read_bytes() for one in files)
            rows = [row.numpy().tobytes() for row in values]
            found[name] = sum(row in content for row in rows) / len(rows)
            assert tell(engine, s.root_of((0, 1), s.QUESTIONS[0])).report.num_kept > 50
    assert found == {"plain": 1.0, "encrypted": 0.0}


def test_sessions_share_nothing(own: Index) -> None:
    engine = storing(own)
    prompt = s.root_of((0, 1), s.QUESTIONS[0])
    for session in ("ines", "tomas", None):
        assert tell(engine, prompt, session=session).report.num_kept == 0
    assert len({kept.key for kept in kept_of(engine)}) == 3
    for session in ("ines", "tomas", None):
        assert tell(engine, prompt, session=session).report.num_kept > 50


def test_by_default_nothing_is_written(own: Index) -> None:
    own.store = store = _Counting(own.store)
    engine = KVEngine(own, max_tokens=4, session_bytes=1)
    tell(engine, s.root_of((0, 1), s.QUESTIONS[0]))
    assert store.num_put == 0
