"""Positions with gaps, and positions that KV is bound to, against Transformers' own forward."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from kvrag.codec.base import EncodedChunk
from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError
from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.plan import MISS_POSITION
from kvrag.fusion.policies.base import NonePolicy, RecomputePolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.schemes import _alibi
from kvrag.store.memory import MemoryStore
from kvrag_testing.bench_top import Bench, relative_difference
from tests.support.models import (
    FAMILIES,
    LEARNED_POSITIONS,
    OTHER_POSITIONS,
    make_model,
    make_tokenizer,
)

PREFIX = (0,)
CHUNK = tuple(range(40, 60))
QUESTION = tuple(range(100, 108))
WITH_POSITION_IDS = [
    name
    for name in (*FAMILIES, *OTHER_POSITIONS, *LEARNED_POSITIONS)
    if name not in ("bloom", "mpt", "falcon-alibi")
]


def plain_logits(model: KVModel, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        # Without a mask, gaps would pass for the seams of packed sequences.
        output = model.hf(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            position_ids=torch.tensor([list(positions)]),
        )
    return output.logits[0, -1]


def laid_out(chunk_at: int, question_at: int, encoded_at: int | None = None) -> Layout:
    positions = (
        0,
        *range(chunk_at, chunk_at + len(CHUNK)),
        *range(question_at, question_at + len(QUESTION)),
    )
    span = ReusedSpan("chunk", 1, 0, len(CHUNK), encoded_at=encoded_at)
    return Layout((*PREFIX, *CHUNK, *QUESTION), (span,), 1, True, positions=positions)


def fused(
    model: KVModel, layout: Layout, policy: RecomputePolicy, start: int | None = None
) -> FusedPrompt:
    store, codec = MemoryStore(), get_codec("raw")
    key = Bench(model, texts=["x" * 40]).key("chunk-0")
    (kv,) = model.prefill(PREFIX, [CHUNK], None if start is None else [start])
    store.put(key, codec.encode(key, kv))

    def open_kv(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
        record = store.open(key)
        return codec.open(key, record, model.spec)

    num_tokens = len(layout.token_ids)
    return fuse(model, layout, open_kv, policy, FusedKV(model.spec, num_tokens, num_tokens))


@pytest.mark.parametrize("family", WITH_POSITION_IDS)
def test_gaps_equal_the_models_own_position_ids(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    layout = laid_out(30, 90, encoded_at=30 if model.is_position_bound else None)
    assert layout.positions is not None
    found = fused(model, layout, DeviationPolicy(ratio=1.0), start=30)
    expected = plain_logits(model, layout.token_ids, layout.positions)
    assert relative_difference(found.logits, expected) < 1e-4
    # The gaps matter: the oracle could not fail otherwise.
    closed = plain_logits(model, layout.token_ids, range(len(layout.token_ids)))
    assert relative_difference(found.logits, closed) > 1e-3


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon-alibi"])
def test_gaps_count_as_distance_in_the_bias(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These models take no position ids: their bias function is given the positions instead."""
    model = KVModel(make_model(family), make_tokenizer())
    layout = laid_out(chunk_at=30, question_at=90)
    assert layout.positions is not None
    found = fused(model, layout, DeviationPolicy(ratio=1.0))
    closed = plain_with_bias(model.hf, layout.token_ids, None, monkeypatch)
    spread = plain_with_bias(model.hf, layout.token_ids, layout.positions, monkeypatch)
    assert relative_difference(found.logits, spread) < 1e-4
    assert relative_difference(found.logits, closed) > 1e-3


def plain_with_bias(
    hf: PreTrainedModel,
    ids: Sequence[int],
    positions: Sequence[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> torch.Tensor:
    module = sys.modules[type(hf).__module__]
    if positions is not None:
        bias = _alibi(hf)(max(positions) + 1)[:, list(positions)][:, None]
        if hf.config.model_type == "mpt":
            monkeypatch.setattr(module, "build_mpt_alibi_tensor", lambda *_: bias)
        else:
            monkeypatch.setattr(module, "build_alibi_tensor", lambda *_, **__: bias)
    with torch.no_grad():
        mask = torch.ones(1, len(ids), dtype=torch.long)
        logits = hf(torch.tensor([list(ids)]), attention_mask=mask).logits[0, -1]
    monkeypatch.undo()
    return logits


@pytest.mark.parametrize("family", LEARNED_POSITIONS)
class TestLearned:
    def test_kv_is_exact_where_it_was_encoded(self, family: str) -> None:
        model = KVModel(make_model(family), make_tokenizer())
        layout = laid_out(chunk_at=30, question_at=90, encoded_at=30)
        assert layout.positions is not None
        found = fused(model, layout, NonePolicy(), start=30)
        assert found.report.num_exact == len(CHUNK)
        expected = plain_logits(model, layout.token_ids, layout.positions)
        assert relative_difference(found.logits, expected) < 1e-4

    def test_elsewhere_it_is_a_miss_and_computed(self, family: str) -> None:
        model = KVModel(make_model(family), make_tokenizer())
        layout = laid_out(chunk_at=31, question_at=90, encoded_at=30)
        assert layout.positions is not None
        found = fused(model, layout, NonePolicy(), start=30)
        assert found.report.misses == {MISS_POSITION: 1}
        assert found.report.num_fresh == len(layout.token_ids)
        expected = plain_logits(model, layout.token_ids, layout.positions)
        assert relative_difference(found.logits, expected) < 1e-4

    def test_a_retrieved_chunk_behind_the_prefix_is_exact_and_others_are_computed(
        self, family: str
    ) -> None:
        bench = Bench(KVModel(make_model(family), make_tokenizer()))
        prompt = bench.prompt(2, 0, 1)
        found = bench.fuse(prompt, NonePolicy())
        assert found.report.misses == {MISS_POSITION: 2}
        assert found.report.num_exact > 10
        assert relative_difference(found.logits, bench.plain_logits(prompt)) < 1e-4

    def test_positions_behind_the_last_are_refused(self, family: str) -> None:
        model = KVModel(make_model(family), make_tokenizer())
        for start in (0, 2040):
            with pytest.raises(ParameterError, match=f"20 tokens at position {start}"):
                model.prefill(PREFIX, [CHUNK], [start])


def test_free_kv_does_not_depend_on_where_it_is_encoded() -> None:
    model = KVModel(make_model(), make_tokenizer())
    (here,), (there,) = (model.prefill(PREFIX, [CHUNK], start) for start in (None, [500]))
    assert torch.equal(here.keys, there.keys)


@pytest.mark.parametrize("gap", [0, 1])
def test_a_chunk_behind_a_gap_is_not_exact(gap: int) -> None:
    layout = laid_out(chunk_at=1 + gap, question_at=60)
    assert layout.is_exact(layout.spans[0]) == (gap == 0)
    assert layout.end_position == 60 + len(QUESTION)
