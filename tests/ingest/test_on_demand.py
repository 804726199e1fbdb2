"""Records of chunks alone beside those after a filler: made by the first prompt that needs one."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from kvrag.chunk import Chunk, ChunkKey, Document
from kvrag.engine import idle as idle_module
from kvrag.engine.engine import KVEngine
from kvrag.engine.idle import FirstPlaces, Idle, InterruptedWorkError
from kvrag.errors import StoreError
from kvrag.fusion.fuser import MADE, FusedPrompt
from kvrag.fusion.report import FusionReport
from kvrag.ingest import on_demand
from kvrag.ingest.coding import read_all
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.index import Index
from kvrag.ingest.storage import Storage
from kvrag.kvcache import ChunkKV
from kvrag.loading.cost import TierCost
from kvrag.models.kv_model import KVModel
from kvrag.server.app import ServerOptions
from kvrag.store.base import StoreWrapper
from kvrag.store.limited import LimitedStore
from tests.engine.test_decisions import FAR, NEAR, auto
from tests.ingest.conftest import MakeIndex, stored_bytes
from tests.support.api_server import serving
from tests.support.models import HEAD
from tests.support.waiting import wait_until

NAMES = ("Ines", "Tomas", "Marta", "Oleg", "Runa", "Pavel", "Lien")
TEXTS = [
    f"{name} keeps the harbour ledger of Varn, by the old river bank near the northern light, and "
    "repairs the tall clock, so that the lazy dog jumps over it."
    for name in NAMES
]
DOCUMENTS = [Document(name, text) for name, text in zip(NAMES, TEXTS, strict=True)]
QUESTION = "Question: who keeps the ledger?\nAnswer:"
FILLER = "filler:40"


@pytest.fixture
def index(make_index: MakeIndex) -> Index:
    index = make_index(context=FILLER)
    index.add(DOCUMENTS)
    return index


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """The chunks that are computed from now on to be stored."""
    computed: list[Chunk] = []
    prefill = Encoders.prefill

    def noting(self: Encoders, chunk: Chunk, *check: Callable[[], None]) -> ChunkKV:
        computed.append(chunk)
        return prefill(self, chunk, *check)

    monkeypatch.setattr(Encoders, "prefill", noting)
    return computed


def prompt_of(*numbers: int) -> str:
    return HEAD + "\n\n".join([*(TEXTS[number] for number in numbers), QUESTION])


def fuse(index: Index, *numbers: int) -> FusedPrompt:
    """Fuse a prompt that begins with a chunk, and wait until what it made is stored."""
    fused = KVEngine(index, policy="none").fuse(prompt_of(*numbers))
    index.on_demand.flush()
    return fused


def keys_alone(index: Index, *numbers: int) -> list[ChunkKey]:
    """Return the names of chunks' optional records."""
    found = []
    for number in numbers:
        (chunk,) = index.get_chunks(index.catalog.chunk_ids_of(NAMES[number]))
        _, alone = chunk.encodings()
        found.append(index.key_of(alone))
    return found


def is_whole(report: FusionReport) -> bool:
    kinds = report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
    return kinds == report.num_tokens and sum(report.fresh_reasons.values()) == report.num_fresh


def test_ingestion_stores_one_record_for_each_chunk(make_index: MakeIndex) -> None:
    plain, index = make_index("plain", context="none"), make_index(context=FILLER)
    reports = [one.add(DOCUMENTS) for one in (plain, index)]
    assert {report.num_records for report in reports} == {len(TEXTS)}
    assert reports[0].num_tokens_computed == reports[1].num_tokens_computed
    assert {one.stats().size_bytes for one in (plain, index)} == {reports[0].size_bytes}
    assert plain.documents() == index.documents()
    assert index.add(DOCUMENTS, force=True).num_records == 0
    assert index.add(Document("x", TEXTS[0] + "x"), dry_run=True).num_records == 1


def test_all_of_them_can_be_made_at_once(index: Index, prefills: list[Chunk]) -> None:
    fuse(index, 2, 0)
    prefills.clear()
    seen: list[tuple[int, int]] = []
    assert index.on_demand.make_all(lambda *progress: seen.append(progress)) == len(TEXTS) - 1
    assert sorted(chunk.source for chunk in prefills) == sorted({*NAMES} - {NAMES[2]})
    assert seen == [(done, len(TEXTS)) for done in range(1, len(TEXTS) + 1)]
    assert all(index.store.contains(key) for key in keys_alone(index, *range(len(TEXTS))))
    assert index.on_demand.make_all() == 0
    report = fuse(index, 0, 1).report
    assert (report.num_made, report.num_chunks) == (0, 2)


def test_the_first_prompt_makes_the_record_and_the_next_one_loads_it(
    index: Index, model: KVModel, prefills: list[Chunk]
) -> None:
    first, second = fuse(index, 0, 1), fuse(index, 0, 1)
    assert [chunk.source for chunk in prefills] == [NAMES[0]]
    (span, other) = first.layout.spans
    made, loaded = first.report, second.report
    assert (made.num_made, made.num_exact, made.num_chunks) == (span.length, 0, 1)
    assert made.fresh_reasons[MADE] == span.length
    assert (loaded.num_made, loaded.num_exact, loaded.num_chunks) == (0, span.length, 2)
    assert MADE not in loaded.fresh_reasons
    assert made.num_reused == loaded.num_reused == other.length
    assert is_whole(made)
    assert is_whole(loaded)
    assert not made.misses
    assert not loaded.misses
    # Making is computing, in every figure.
    num_rows = len(prefills[0].token_ids)
    assert made.rows_by_layer == tuple(rows + num_rows for rows in loaded.rows_by_layer)
    assert made.seconds["compute"] > 0 <= made.seconds["load"]
    assert made.bytes_loaded < loaded.bytes_loaded
    assert "first chunk of" in made.one_line()
    assert torch.equal(first.logits, second.logits)
    for layer in range(index.config.num_layers):
        for one, same in ((first.kv.keys, second.kv.keys), (first.kv.values, second.kv.values)):
            rows = slice(0, made.num_tokens)
            assert torch.equal(one[layer][:, :, rows], same[layer][:, :, rows])
    outcomes = {
        dict(labels)["outcome"]: count
        for (name, labels), count in index.counters.counts().items()
        if name == "chunks"
    }
    assert outcomes == {"made": 1, "loaded": 3}
    record = index.open_kv(span.chunk_id, ())
    (alone,) = model.prefill(index.prefix_ids, [prefills[0].token_ids])
    torch.testing.assert_close(
        read_all(record, index.config.spec).values, alone.values, rtol=1e-4, atol=1e-5
    )


def test_only_the_place_at_the_beginning_makes_one(index: Index, prefills: list[Chunk]) -> None:
    prompts = ["Context: " + prompt_of(0, 1), prompt_of(0, 1)[len(HEAD) :]]
    for prompt in prompts:
        report = KVEngine(index, policy="none").fuse(prompt).report
        assert (report.num_chunks, report.num_made) == (2, 0)
    assert KVEngine(index).fuse(prompt_of(0), reuse=False).report.num_made == 0
    assert not prefills


def test_a_part_of_a_chunk_makes_none_but_uses_one(index: Index, prefills: list[Chunk]) -> None:
    engine = KVEngine(index, policy="none")
    prompt = HEAD + TEXTS[0][:120] + " and so on."
    computed = engine.fuse(prompt).report
    assert (computed.num_made, computed.num_exact, computed.num_chunks) == (0, 0, 0)
    assert not computed.misses
    assert is_whole(computed)
    assert not prefills
    fuse(index, 0)
    used = engine.fuse(prompt)
    assert used.report.num_exact >= 32
    assert used.report.num_exact + used.report.num_fresh == computed.num_fresh


def test_prompts_at_the_same_time_make_it_once(
    index: Index, prefills: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_store = threading.Event()
    put = index.store.put
    puts: list[ChunkKey] = []

    def slowly(key: ChunkKey, record: bytes) -> None:
        puts.append(key)
        assert may_store.wait(30)
        put(key, record)

    monkeypatch.setattr(index.store, "put", slowly)
    engine = KVEngine(index, policy="none")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: engine.fuse(prompt_of(0, 1)), range(8)))
    assert len(prefills) == 1
    assert sorted(one.report.num_made > 0 for one in found) == [False] * 7 + [True]
    may_store.set()
    index.on_demand.flush()
    assert puts == keys_alone(index, 0)
    assert all(torch.equal(one.logits, found[0].logits) for one in found)
    assert all(is_whole(one.report) for one in found)


class Refusing(StoreWrapper):
    """A store that others may not write to."""

    num_refused = 0

    def put(self, key: ChunkKey, record: bytes) -> None:
        self.num_refused += 1
        raise StoreError("this store is read-only")


def test_a_store_that_refuses_costs_what_computing_costs(
    index: Index, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fuse(index, 0, 1).logits
    index.store.delete(*keys_alone(index, 0))
    index.store = store = Refusing(index.store)
    with caplog.at_level(logging.WARNING, "kvrag"):
        reports = [fuse(index, number).report for number in (0, 1, 0)]
    assert all(report.num_made > 0 and not report.misses for report in reports)
    assert torch.equal(fuse(index, 0, 1).logits, expected)
    # It is not asked with every prompt, and the user is told once.
    assert store.num_refused == 1
    monkeypatch.setattr(on_demand, "_PAUSE_SECONDS", 0.0)
    index.on_demand._refused_until = 0.0
    fuse(index, 0)
    assert store.num_refused == 2
    assert [one.message for one in caplog.records] == [
        "chunks that stand first in a prompt cannot be stored, and are computed each time: "
        "this store is read-only"
    ]


def test_what_was_removed_meanwhile_is_not_stored(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_store = threading.Event()
    reload_codec = Storage.reload_codec

    def waiting(self: Storage) -> None:
        if threading.current_thread().name.startswith("kvrag-keep"):
            assert may_store.wait(30)
        reload_codec(self)

    monkeypatch.setattr(Storage, "reload_codec", waiting)
    keys = keys_alone(index, 0, 1)
    engine = KVEngine(index, policy="none")
    for number in (0, 1):
        assert engine.fuse(prompt_of(number)).report.num_made > 0
    index.delete(sources=[NAMES[0]])
    may_store.set()
    index.on_demand.flush()
    assert [index.store.contains(key) for key in keys] == [False, True]


def test_closing_the_index_waits_for_what_was_made(
    make_index: MakeIndex, model: KVModel, prefills: list[Chunk]
) -> None:
    index = make_index(context=FILLER)
    index.add(DOCUMENTS)
    prefills.clear()
    with torch.inference_mode():
        KVEngine(index, policy="none").fuse(prompt_of(0))
    index.close()
    with Index.open(index.path, model=model) as opened:
        assert opened.stats().num_records == len(TEXTS) + 1
        assert fuse(opened, 0).report.num_exact > 0
        assert opened.upkeep.verify().ok
    assert len(prefills) == 1


def test_what_is_missing_is_no_damage_and_nobody_else_makes_it(
    index: Index, prefills: list[Chunk]
) -> None:
    assert index.upkeep.verify().num_records == len(TEXTS)
    fuse(index, 0)
    made = stored_bytes(index)
    assert len(made) == len(TEXTS) + 1
    for repair in (False, True):
        report = index.upkeep.verify(repair=repair)
        assert report.ok
        assert (report.num_records, report.num_repaired) == (len(made), 0)
    assert index.add(DOCUMENTS, force=True).num_records == 0
    assert index.upkeep.gc().num_records == 0
    assert index.stats().num_unreferenced_records == 0
    assert stored_bytes(index) == made
    assert index.upkeep.recode("lossless").num_records == len(made)
    assert index.upkeep.recode("raw").num_computed == 0
    assert stored_bytes(index) == made
    assert len(prefills) == 1
    index.delete(sources=[NAMES[0]])
    assert index.upkeep.gc().num_records == 2


@pytest.mark.parametrize("place", [100, -8])
def test_damage_is_a_miss_once_and_made_anew(
    index: Index, prefills: list[Chunk], place: int
) -> None:
    expected = fuse(index, 0, 1).logits
    (key,) = keys_alone(index, 0)
    good = stored_bytes(index)[key.digest]
    bad = bytearray(good)
    bad[place] ^= 255
    index.store.replace(key, bytes(bad))
    found = index.upkeep.verify()
    assert [one.key for one in found.problems] == [key.digest]
    missed = fuse(index, 0, 1)
    assert (missed.report.misses, missed.report.num_made) == ({"record damaged": 1}, 0)
    torch.testing.assert_close(missed.logits, expected, rtol=1e-4, atol=1e-4)
    assert not index.store.contains(key)
    again = fuse(index, 0, 1)
    assert (dict(again.report.misses), again.report.num_made > 0) == ({}, True)
    assert torch.equal(again.logits, expected)
    assert stored_bytes(index)[key.digest] == good
    index.store.replace(key, bytes(bad))
    assert index.upkeep.verify(repair=True).num_repaired == 1
    assert stored_bytes(index)[key.digest] == good


@pytest.mark.parametrize(("price", "num_made"), [(NEAR, 1), (FAR, 0)])
def test_a_record_that_would_be_slow_to_load_is_not_made(
    index: Index, prefills: list[Chunk], price: TierCost, num_made: int
) -> None:
    fused = KVEngine(index).fuse(prompt_of(0, 1), policy=auto(price))
    assert len(prefills) == num_made
    assert (fused.report.num_made > 0) == bool(num_made)
    assert is_whole(fused.report)


def test_idle_time_makes_what_was_found_most_often_first(
    index: Index, prefills: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    for question in ("Runa", "Pavel", "Runa"):
        index.search(f"{question} keeps the harbour ledger", 1)
    places = FirstPlaces(index)
    places.work(Idle())
    assert len(prefills) == len(NAMES)
    assert [chunk.source for chunk in prefills[:2]] == ["Runa", "Pavel"]
    assert not prefills[0].contexts[0]
    for number in range(len(NAMES)):
        report = fuse(index, number, (number + 1) % len(NAMES)).report
        assert (report.num_made, report.misses) == (0, {})
    places.work(Idle())
    FirstPlaces(index).work(Idle())
    assert len(prefills) == len(NAMES)
    index.add(Document("Olga", TEXTS[0].replace("Ines", "Olga")))
    num_before = len(prefills)
    places.work(Idle())
    assert [chunk.source for chunk in prefills[num_before:]] == ["Olga"]


def test_a_question_interrupts_idle_work_at_the_next_layer(index: Index) -> None:
    places = FirstPlaces(index)
    num_stored = len(stored_bytes(index))
    layers: list[int] = []
    idle = Idle()
    first_check = idle.check

    def check() -> None:
        first_check()
        layers.append(len(layers))
        if len(layers) == 3:  # before a document, before a chunk, in its first layer
            idle._num_asking += 1  # a question comes

    idle.check = check  # type: ignore[method-assign]
    with pytest.raises(InterruptedWorkError):
        places.work(idle)
    assert len(layers) == 3
    assert index.model.lock._depth == 0
    assert len(stored_bytes(index)) == num_stored
    places.work(Idle())
    assert len(stored_bytes(index)) == num_stored + len(NAMES)


def refuse(key: ChunkKey, record: bytes) -> None:
    raise StoreError("the folder is read-only")


# What bounds idle work, and how many chunks it then computes.
BOUNDS: dict[str, tuple[int, Callable[[pytest.MonkeyPatch, Index], None]]] = {
    "room": (1, lambda patch, _: patch.setattr(idle_module, "_MOST_BYTES", 1)),
    "disk": (0, lambda patch, _: patch.setattr(idle_module, "_LEAST_FREE_BYTES", 1 << 60)),
    "limit": (
        0,
        lambda patch, index: patch.setattr(
            index._storage, "store", LimitedStore(index.store, 1 << 30)
        ),
    ),
    "refused": (1, lambda patch, index: patch.setattr(index.store, "put", refuse)),
}


@pytest.mark.parametrize("why", BOUNDS)
def test_idle_work_is_bounded(
    index: Index,
    prefills: list[Chunk],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    most, bound = BOUNDS[why]
    bound(monkeypatch, index)
    places = FirstPlaces(index)
    if why == "refused":  # it is told once, and given up
        with Idle(places) as idle:
            wait_until(lambda: not idle.jobs)
        assert "the folder is read-only" in caplog.text
    else:
        places.work(Idle())
    assert len(prefills) == most


def test_a_server_prepares_first_places_between_requests(index: Index) -> None:
    num_stored = len(stored_bytes(index))
    with serving(index, ServerOptions(prepares=True)) as served:
        assert httpx.get(f"{served.url}/models").status_code == 200
        while len(stored_bytes(index)) < num_stored + len(NAMES):
            time.sleep(0.01)
        index.add(Document("Olga", TEXTS[0].replace("Ines", "Olga")))
        # As after an upload: the end of a request shows what is new.
        assert httpx.get(f"{served.url}/models").status_code == 200
        while len(stored_bytes(index)) < num_stored + len(NAMES) + 2:
            time.sleep(0.01)
    assert "kvrag-idle" not in [thread.name for thread in threading.enumerate()]
