"""What only GPUs need, held against what the CPU does; `tests/engine/test_gpu.py` runs it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrag.kvcache import FusedKV
from kvrag.models import captured
from kvrag.models.attention import RowMask, _row_attention
from kvrag.models.batch import BatchRow, BatchRows
from kvrag.models.captured import CapturedSteps
from kvrag.models.headwise import attend_by_head, attend_by_rows
from kvrag.models.kv_model import KVModel
from kvrag.positions.deferred import DeferredTable
from kvrag.positions.rotary import RotaryTable
from tests.support.models import make_model, make_tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_placed_later_are_those_placed_at_once(dtype: torch.dtype) -> None:
    table = RotaryTable(*torch.randn(2, 40, 8).clamp(-1, 1))
    keys = torch.randn(3, 30, 12).to(dtype)
    spans = [slice(20, 33), slice(2, 14), slice(35, 40)]
    expected = torch.full((3, 44, 12), 7.0, dtype=dtype)
    found = expected.clone()
    deferred = DeferredTable.of(table)
    begin = 0
    for rows in spans:
        given = keys[:, begin : begin + rows.stop - rows.start]
        begin += given.shape[1]
        table.place(given, rows, expected[:, rows])
        deferred.place(given, rows, found[:, rows])
        assert torch.equal(found[:, rows], given)
    deferred.finish(found)
    assert torch.equal(found, expected)
    deferred.finish(found)  # nothing is placed twice
    assert torch.equal(found, expected)
    given, rows = keys[:, :2], torch.tensor([39, 1])
    table.place(given, rows, out := torch.empty_like(given))
    deferred.place(given, rows, at_once := torch.empty_like(given))
    assert torch.equal(at_once, out)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scores_at_once", [1, 4 * 25 * 3, 1 << 20])
def test_heads_together_are_heads_one_by_one(
    softcap: float | None, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.models.headwise._SCORES_AT_ONCE", scores_at_once)
    query, key, value = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 25, 8), torch.randn(1, 2, 25, 6)
    allowed = torch.arange(25) <= torch.arange(10, 24, 2)[:, None]
    expected_mass: list[torch.Tensor] = []
    summed = torch.zeros(7, 25)

    def note(rows: slice, weights: torch.Tensor, values: torch.Tensor) -> None:
        if rows.start == 0:
            summed.zero_()
        summed[rows] = weights.sum(0)
        if rows.stop >= 7:
            expected_mass.append(summed[3:].sum(0))

    expected = attend_by_head(query, key, value, allowed, 0.4, softcap, observe=note)
    output, mass = attend_by_rows(query, key, value, allowed, 0.4, softcap, 3)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(mass, torch.stack(expected_mass))


def test_a_whole_prompts_rows_need_no_mask() -> None:
    # float16: no kernel of ours.
    query, key, value = (torch.randn(1, heads, 9, 16).half() for heads in (4, 2, 2))
    module = torch.nn.Module()
    masks = [RowMask(torch.arange(9), 0, None, is_square=square) for square in (False, True)]
    expected, found = (_row_attention(module, query, key, value, mask)[0] for mask in masks)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, plain.transpose(1, 2), rtol=1e-2, atol=1e-2)


def filled(model: KVModel, num_rows: int, capacity: int, seed: int) -> FusedKV:
    fused = FusedKV(model.spec, num_rows, capacity)
    torch.manual_seed(seed)
    fused.storage.normal_()
    return fused


def rows_of(model: KVModel, extra: int = 0) -> list[BatchRow]:
    """Return two prompts' next rows, the second with a gap before it."""
    buffers = [filled(model, 20 + 4 * n, 30 + n, n) for n in range(2)]
    return [
        BatchRow(buffer, buffer.addresses, place := buffer.num_tokens + extra, place + 3 * n)
        for n, buffer in enumerate(buffers)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral-sliding", "gpt2"])
def test_a_captured_step_reads_its_places_from_memory(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    ids = torch.tensor([5, 9])
    expected_rows, found_rows = rows_of(model), rows_of(model)
    with model.computing_rows():
        expected = model._step(ids, BatchRows(expected_rows, model._windows))
        # Captured at another place, as a replay's.
        at = torch.tensor([[row.place for row in found_rows], [r.position for r in found_rows]])
        batch = BatchRows(
            [BatchRow(r.fused, r.addresses, r.place - 5, r.position - 5) for r in found_rows],
            model._windows,
            at,
        )
        batch._in_kernel = False
        found = model._step(ids, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(found_rows, expected_rows, strict=True):
        torch.testing.assert_close(one.fused.storage, other.fused.storage, rtol=1e-4, atol=1e-4)


class OneStep:
    """Stands for a captured step."""

    made: list[int]

    def __init__(self, step: Any, rows: Sequence[BatchRow], windows: Any) -> None:
        if step == "syncs":
            raise RuntimeError("operation not permitted when stream is capturing\nlong story")
        self.num_rows = len(rows)


def test_steps_are_captured_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CapturedStep", OneStep)
    monkeypatch.setattr(captured, "_is_on_gpu", lambda fused: True)
    model = KVModel(make_model(), make_tokenizer())
    steps = CapturedSteps(model._windows)
    step: Callable[..., Any] = lambda ids, batch: ids  # noqa: E731
    first, second = rows_of(model)
    assert steps.find([first], step) is None
    once = steps.find([first], step)
    assert isinstance(once, OneStep)
    assert once.num_rows == 1
    assert steps.find([first], step) is once
    # Another batch, another graph; the first one's is kept.
    assert steps.find([first, second], step) is None
    assert isinstance(steps.find([first, second], step), OneStep)
    assert steps.find([first], step) is once
    # Only so many are kept.
    for row in [row for _ in range(8) for row in rows_of(model)]:
        steps.find([row], step)
    assert steps.find([first], step) is None
    # A model that cannot be captured is not tried again.
    assert steps.find([second], step) is None
    assert steps.find([second], "syncs") is None  # type: ignore[arg-type]
    assert steps.find([second], step) is None


def test_nothing_is_captured_on_the_cpu() -> None:
    model = KVModel(make_model(), make_tokenizer())
    steps = CapturedSteps(model._windows)
    first, _ = rows_of(model)
    assert [steps.find([first], model._step) for _ in range(3)] == [None] * 3
