"""Moving a chunk's stored rows by the mean change of its recomputed rows."""

from __future__ import annotations

import pytest
import torch

from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.repair import ChunkShift, make_repair
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import Bench
from tests.support.models import make_model, make_tokenizer

ORDER = (2, 0, 3, 1)


@pytest.fixture(scope="module", params=["llama", "mistral-sliding", "gemma3", "gpt-neox"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(KVModel(make_model(request.param), make_tokenizer()))


def fused(bench: Bench, spec: str, ratio: float | None = None) -> FusedPrompt:
    return bench.fuse("Context:\n" + bench.prompt(*ORDER), make_repair(spec, ratio=ratio))


def rows_of(kv: FusedKV) -> torch.Tensor:
    return torch.stack([torch.stack(kv.keys), torch.stack(kv.values)])[..., : kv.num_tokens, :]


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_that_is_common_moves_the_other_rows(num_blocks: int, dtype: torch.dtype) -> None:
    model = KVModel(make_model().to(dtype), make_tokenizer())
    kv = FusedKV(model.spec, 40, 40)
    for rows in (*kv.keys, *kv.values):
        rows.zero_()
    (table, *_) = model.tables(40)
    spans = [ReusedSpan("a", 5, 0, 20), ReusedSpan("b", 25, 0, 10)]
    picks = torch.tensor([6, 7, 8, 11, 15, 24])
    moving = ChunkShift(spans, 40, torch.device("cpu"), 0.5)
    changed = moving.of_layer(kv, 1, table, picks)
    generator = torch.Generator().manual_seed(0)
    shape = (model.spec.num_kv_heads, 1, model.spec.head_dim)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    # The question's rows are computed as well; they belong to no chunk.
    for written in torch.cat([picks, torch.tensor([38, 39])]).chunk(num_blocks):
        placed = torch.empty(shape[0], len(written), shape[2])
        table.place(key.expand(placed.shape), written, placed)
        changed(written, placed.to(dtype), value.expand(placed.shape).to(dtype))
    rest = torch.tensor([row for row in range(5, 25) if row not in picks.tolist()])
    share = 0.5 * len(picks) / (len(picks) + 3)
    expected = torch.empty(shape[0], len(rest), shape[2])
    table.place(share * key.expand(expected.shape), rest, expected)
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(kv.keys[1][0][:, rest].float(), expected, **close)
    values = kv.values[1][0][:, rest].float()
    torch.testing.assert_close(values, (share * value).expand(expected.shape), **close)
    others = torch.tensor([*range(5), *picks.tolist(), *range(25, 40)])
    assert not kv.keys[1][0][:, others].any()
    assert not kv.values[1][0][:, others].any()
    assert not kv.keys[0].any()


def test_the_other_rows_move_and_those_computed_stay_exact_in_layer_0(bench: Bench) -> None:
    still, moved = fused(bench, "boundary", 0.3), fused(bench, "boundary:shift=1", 0.3)
    before, after = rows_of(still.kv), rows_of(moved.kv)
    change = (after - before).abs().amax(dim=(0, 2, 3, 5))
    # The first layer's K/V depend on no other token.
    assert change[0].max() < 1e-5
    stored = torch.ones(still.kv.num_tokens, dtype=torch.bool)
    stored[torch.cat([still.fresh, still.picks[-1]])] = False
    assert (change[1:, stored] > 0).any(dim=0).sum() > 0.5 * int(stored.sum())
    assert not torch.equal(still.logits, moved.logits)
    assert still.report.rows_by_layer == moved.report.rows_by_layer
