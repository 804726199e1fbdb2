"""What only GPUs need, held against what the CPU does; `tests/engine/test_gpu.py` runs it there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrag.kvcache import FusedKV
from kvrag.models import rowgraphs
from kvrag.models.attention import (
    RowMask,
    row_attention,
)
from kvrag.models.batch import BatchRow, BatchRows
from kvrag.models.implementations import _functions
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import CapturedSteps
from tests.support.models import make_model, make_tokenizer


def test_a_whole_prompts_rows_need_no_mask() -> None:
    # float16: no kernel of ours.
    query, key, value = (torch.randn(1, heads, 9, 16).half() for heads in (4, 2, 2))
    module = torch.nn.Module()
    masks = [RowMask(torch.arange(9), 0, None, is_square=square) for square in (False, True)]
    expected, found = (
        _functions["kvrag_rows"](module, query, key, value, mask)[0] for mask in masks
    )
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, plain.transpose(1, 2), rtol=1e-2, atol=1e-2)


def filled(model: KVModel, num_rows: int, capacity: int, seed: int) -> FusedKV:
    fused = FusedKV(model.spec, num_rows, capacity)
    torch.manual_seed(seed)
    fused.storage.normal_()
    return fused


def rows_of(model: KVModel) -> list[BatchRow]:
    """Return two prompts' next rows, the second with a gap before it."""
    buffers = [filled(model, 20 + 4 * n, 30 + n, n) for n in range(2)]
    return [
        BatchRow(buffer, buffer.addresses, place := buffer.num_tokens, place + 3 * n)
        for n, buffer in enumerate(buffers)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral-sliding", "gpt2"])
def test_a_captured_step_reads_its_places_from_memory(family: str) -> None:
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
            [30, 28],
        )
        batch.in_kernel = False
        found = model._step(ids, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(found_rows, expected_rows, strict=True):
        torch.testing.assert_close(one.fused.storage, other.fused.storage, rtol=1e-4, atol=1e-4)


class OneGraph:
    """Stands for a graph: nothing is captured."""

    def __init__(self, run: Callable[[], Any], *_: object) -> None:
        self.made = run()

    def replay(self) -> None: ...


def num_rows_of(ids: torch.Tensor, batch: BatchRows) -> int:
    return len(batch.positions)


def found_after(steps: CapturedSteps, rows: Sequence[BatchRow], step: Any = num_rows_of) -> Any:
    """Return what is found when the steps that are not captured are over."""
    for _ in range(rowgraphs._STEPS_BEFORE):
        assert steps.find(rows, step) is None
    return steps.find(rows, step)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> CapturedSteps:
    monkeypatch.setattr(rowgraphs, "Graph", OneGraph)
    monkeypatch.setattr(rowgraphs, "_failures", [])
    monkeypatch.setattr(rowgraphs, "_is_on_gpu", lambda fused: True)
    monkeypatch.setattr(rowgraphs, "capture_stream", lambda _: None)
    model = KVModel(make_model(), make_tokenizer())
    return model._captured


def test_steps_are_captured_when_they_come_again(steps: CapturedSteps) -> None:
    model = KVModel(steps._hf, make_tokenizer())
    first, second = rows_of(model)
    once = found_after(steps, [first])
    assert once._graph.made == 1
    assert steps.find([replace(first, place=first.place + 1)], None) is once  # type: ignore[arg-type]
    # Another batch, another graph; the first one's is kept.
    assert found_after(steps, [first, second])._graph.made == 2
    assert steps.find([first], None) is once  # type: ignore[arg-type]
    # Only so many are kept, and then all are dropped.
    others = [row for _ in range(4) for row in rows_of(model)]
    for number, row in enumerate(others):
        assert found_after(steps, [row]) is not None
        assert len(steps._steps) == (number + 3 if number < 6 else number - 5)
    assert steps.find([first, second], None) is None  # type: ignore[arg-type]


def test_a_step_is_captured_for_each_block_of_keys(steps: CapturedSteps) -> None:
    model = KVModel(steps._hf, make_tokenizer())
    fused = FusedKV(model.spec, 1000, 3000)
    row = BatchRow(fused, fused.addresses, 1000, 1000)
    once = found_after(steps, [row])
    assert steps.find([replace(row, place=1023)], None) is once  # type: ignore[arg-type]
    assert found_after(steps, [replace(row, place=1024)]) is not once
    ends = [rowgraphs._end_of(replace(row, place=place)) for place in (0, 1023, 1024, 2999)]
    assert ends == [1024, 1024, 2048, 3000]


def test_short_memory_ends_captures_of_so_many_answers_alone(
    steps: CapturedSteps, caplog: pytest.LogCaptureFixture
) -> None:
    def full(ids: torch.Tensor, batch: BatchRows) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    model = KVModel(steps._hf, make_tokenizer())
    first, second = rows_of(model)
    assert found_after(steps, [first, second], full) is None
    assert found_after(steps, [second, first]) is None
    assert found_after(steps, [first]) is not None
    assert rowgraphs.uses_graphs()
    (told,) = (record.getMessage() for record in caplog.records)
    assert "of answers at most 1 at once" in told


def test_steps_are_forgotten_when_the_model_changes(
    steps: CapturedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KVModel(steps._hf, make_tokenizer())
    first, _ = rows_of(model)
    hf = steps._hf
    monkeypatch.setattr(type(hf), "device", torch.device("cuda"))
    layer = hf.get_submodule("model.layers.0.mlp")
    kept = []

    def moves() -> None:
        kept.append([parameter.data for parameter in hf.parameters()])
        hf.to(torch.float64)
        hf.to(torch.float32)

    def replaces_a_forward() -> None:
        vars(layer)["forward"] = layer.forward

    def replaces_a_module() -> None:
        hf.set_submodule("model.layers.0.mlp", copy.deepcopy(layer))

    def switches_an_adapter_off() -> None:
        vars(layer)["_disable_adapters"] = True

    changes = (replaces_a_forward, switches_an_adapter_off, replaces_a_module, moves)
    for change in changes:
        steps.check_model()
        with row_attention(hf):  # in which modules are not their own
            once = found_after(steps, [first])
        steps.check_model()
        assert steps.find([first], None) is once  # type: ignore[arg-type]
        change()
        steps.check_model()
        assert not steps._steps, change


def test_a_model_with_hooks_is_not_captured(
    steps: CapturedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KVModel(steps._hf, make_tokenizer())
    first, _ = rows_of(model)
    monkeypatch.setattr(type(steps._hf), "device", torch.device("cuda"))
    hook = steps._hf.register_forward_pre_hook(lambda *_: None)
    steps.check_model()
    assert found_after(steps, [first]) is None
    hook.remove()
    steps.check_model()
    assert found_after(steps, [first]) is not None


def test_adapted_rows_are_not_captured(
    steps: CapturedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KVModel(steps._hf, make_tokenizer())
    asked: list[int] = []

    def find(_: Any, rows: Sequence[BatchRow], step: Any) -> None:
        asked.append(len(rows))

    monkeypatch.setattr(CapturedSteps, "find", find)
    rows = rows_of(model)
    with model.computing_rows():
        model.forward_each([5, 9], rows)
    assert asked == [2]
    adapter: Any = SimpleNamespace(acting=lambda *_: nullcontext())
    with model.computing_rows(adapter):
        model.forward_each([5, 9], rows)
        with model.computing_rows():
            assert not model.rows.is_adapted
        assert model.rows.is_adapted
    assert asked == [2]
    assert not model.rows.is_adapted


def test_nothing_is_captured_on_the_cpu() -> None:
    model = KVModel(make_model(), make_tokenizer())
    first, _ = rows_of(model)
    assert [model._captured.find([first], model._step) for _ in range(9)] == [None] * 9


def syncs(ids: torch.Tensor, batch: BatchRows) -> None:
    raise RuntimeError("operation not permitted when stream is capturing\nlong story")


def test_a_capture_that_fails_is_told_once_and_steps_are_carried_out(
    steps: CapturedSteps, caplog: pytest.LogCaptureFixture
) -> None:
    model = KVModel(steps._hf, make_tokenizer())
    first, second = rows_of(model)
    assert found_after(steps, [first]) is not None
    assert found_after(steps, [second], syncs) is None
    # What was captured before is not used either: nothing here can be sure of it.
    assert steps.find([first], syncs) is None  # type: ignore[arg-type]
    assert found_after(steps, [second], syncs) is None
    (told,) = (record.getMessage() for record in caplog.records)
    assert "operation not permitted when stream is capturing" in told
    assert "KVRAG_CUDA_GRAPHS=off" in told
    assert "long story" not in told
