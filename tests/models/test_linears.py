"""A model's linear layers over few rows: which the kernel computes; nothing stays changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvrag.models import linears as module
from kvrag.models.linears import fast_linears
from kvrag.native import MAX_ROWS, FewRowsLinear


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that the kernel was asked for."""
    found: list[int] = []

    class Counted(FewRowsLinear):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            found.append(rows.shape[-2])
            return super().__call__(rows)

    monkeypatch.setattr(module, "FewRowsLinear", Counted)
    return found


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 20, bias=False))


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, MAX_ROWS + 1])
def test_few_rows_go_to_the_kernel(layer: nn.Module, calls: list[int], num_rows: int) -> None:
    rows = torch.randn(num_rows, 40)
    expected = layer(rows)
    with fast_linears(layer, "float32"):
        found = layer(rows)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(calls) == (2 if num_rows <= MAX_ROWS else 0)
    assert not any("forward" in one.__dict__ for one in layer.modules())
    assert torch.equal(layer(rows), expected)


def test_gradients_stay(layer: nn.Module, calls: list[int]) -> None:
    with fast_linears(layer, "float32"):
        layer(torch.randn(1, 40)).sum().backward()
    assert not calls
    assert all(one.grad is not None for one in layer.parameters())


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.weight.mul_(2),
        lambda one: setattr(one, "weight", nn.Parameter(torch.randn(30, 40))),
        lambda one: setattr(one.weight, "data", torch.randn(30, 40)),
        lambda one: setattr(one, "bias", nn.Parameter(torch.randn(30))),
    ],
)
def test_changed_weights_count(
    layer: nn.Sequential, calls: list[int], change: Callable[[nn.Module], object]
) -> None:
    rows = torch.randn(2, 40)
    with fast_linears(layer, "float32"):
        layer(rows)
        change(layer[0])
        found = layer(rows)
    assert len(calls) == 4
    assert torch.allclose(found, layer(rows), atol=1e-5)


@torch.no_grad()
def test_other_types_are_left_to_torch(layer: nn.Module, calls: list[int]) -> None:
    for dtype in (torch.float64, torch.float16):
        with fast_linears(layer, "float32"):
            assert layer.to(dtype)(torch.ones(1, 40, dtype=dtype)).dtype == dtype
    assert not calls


@torch.no_grad()
def test_layers_of_other_classes_are_left_alone(calls: list[int]) -> None:
    class Doubled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    doubled = Doubled(4, 4)
    rows = torch.ones(1, 4)
    expected = doubled(rows)
    with fast_linears(nn.ModuleList([doubled]), "float32"):
        assert torch.equal(doubled(rows), expected)
    assert not calls
