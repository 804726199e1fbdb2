"""Chunks that are quicker to compute than to load are computed: the same answer, told as such."""

import json
from collections.abc import Iterator

import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.fusion.controller import Calibration, Cost, LoadingController, Measured
from kvrag.ingest.index import Index
from kvrag.loading.cost import LoadingCost, TierCost
from kvrag.store.base import read_whole
from kvrag.store.memory import MemoryStore
from kvrag.store.tiered import TieredStore
from kvrag_testing.bench_top import TEXTS

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"
NEAR, FAR = TierCost("memory:", 0.0, 0.0), TierCost("far:", 10.0, 0.0)


def auto(*tiers: TierCost, policy: str = "none", ratio: float | None = None) -> LoadingController:
    calibration = Calibration(
        model_fingerprint="m",
        data="d",
        measure="none",
        num_questions=1,
        policies=(Measured(policy, ratio, 0.0, 0.0, 0.0),),
        cost=Cost(0.0, 1e-6, 0.0),
        loading=LoadingCost("store:", tiers),
    )
    return LoadingController(calibration=calibration)


@pytest.fixture
def tiers(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredStore]:
    store = TieredStore([MemoryStore(), index.store])
    monkeypatch.setattr(index, "store", store)
    yield store
    with store._changing:  # its thread alone ends: the store below is another test's as well
        store._is_closed = True
        store._changing.notify_all()


def bring_near(index: Index, store: TieredStore, text: str) -> str:
    (hit,) = [hit for hit in index.search(text, 3) if hit.chunk.text == text]
    key = index.key_of(hit.chunk)
    record = store.tiers[1].open(key)
    store.tiers[0].put(key, read_whole(record))
    return hit.chunk.chunk_id


def plain_logits(engine: KVEngine, prompt: str = PROMPT) -> torch.Tensor:
    ids = torch.tensor([engine.prompt_ids(prompt)])
    with torch.no_grad():
        return engine.index.model.hf(input_ids=ids, logits_to_keep=1).logits[0, -1]


@pytest.mark.parametrize("load_threads", [0, 4])
def test_where_all_is_far_the_prompt_is_prefilled(index: Index, load_threads: int) -> None:
    engine = KVEngine(index, load_threads=load_threads)
    made = engine.fuse(PROMPT, policy=auto(FAR))
    report = made.report
    torch.testing.assert_close(made.logits, plain_logits(engine), atol=1e-5, rtol=1e-5)
    assert report.bytes_loaded == 0
    assert report.misses == {}
    assert report.num_fresh == report.num_tokens
    assert [one.is_computed for one in report.decisions] == [True] * len(TEXTS)
    assert report.num_computed == sum(one.num_tokens for one in report.decisions) > 0
    assert all(one.seconds is not None and one.seconds > 0 for one in report.decisions)
    assert f"{len(TEXTS)} chunks of {report.num_computed} tokens computed" in report.one_line()
    json.dumps(report.to_dict())


@pytest.mark.parametrize("policy", ["none", "deviation", "two_stage", "query"])
def test_near_chunks_are_loaded_and_far_ones_computed(
    index: Index, tiers: TieredStore, policy: str
) -> None:
    near = bring_near(index, tiers, TEXTS[1])
    ratio = None if policy == "none" else 1.0
    engine = KVEngine(index)
    made = engine.fuse(PROMPT, policy=auto(NEAR, FAR, policy=policy, ratio=ratio))
    report = made.report
    assert {one.chunk_id for one in report.decisions if not one.is_computed} == {near}
    assert [(one.tier, one.is_computed) for one in report.decisions if one.chunk_id == near] == [
        (0, False)
    ]
    assert report.num_chunks == 1
    assert report.misses == {}
    assert report.num_tokens == (
        report.num_exact + report.num_reused + report.num_recomputed + report.num_fresh
    )
    if ratio is not None:
        torch.testing.assert_close(made.logits, plain_logits(engine), atol=1e-4, rtol=1e-4)


def test_what_is_lost_all_the_same_is_a_miss(index: Index, tiers: TieredStore) -> None:
    bring_near(index, tiers, TEXTS[1])
    tiers.tiers[0].replace(next(iter(tiers.tiers[0].keys())), b"x" * 4000)
    engine = KVEngine(index)
    made = engine.fuse(PROMPT, policy=auto(NEAR, FAR))
    assert sum(made.report.misses.values()) == 1
    assert [one.seconds for one in made.report.decisions if not one.is_computed] == [None]
    torch.testing.assert_close(made.logits, plain_logits(engine), atol=1e-5, rtol=1e-5)
