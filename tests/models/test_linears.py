"""A model's linear layers by other kernels: which computes what; nothing stays changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvrag.models import linears as module
from kvrag.models.linears import can_pack, fast_modules
from kvrag.native.linear import FewRowsLinear

pytestmark = pytest.mark.usefixtures("isa")


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
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("num_rows", [1, 16, 17])
def test_few_rows_go_to_the_kernel(
    layer: nn.Module,
    calls: list[int],
    num_rows: int,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "can_pack", lambda _: packs)
    rows = torch.randn(num_rows, 40)
    expected = layer(rows)
    with fast_modules(layer, "float32"):
        found = layer(rows)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(calls) == (2 if num_rows <= 16 else 0)
    assert not any("forward" in one.__dict__ for one in layer.modules())
    assert torch.equal(layer(rows), expected)


def test_gradients_stay(layer: nn.Module, calls: list[int]) -> None:
    with fast_modules(layer, "float32"):
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
    with fast_modules(layer, "float32"):
        layer(rows)
        change(layer[0])
        found = layer(rows)
    assert len(calls) == 4
    assert torch.allclose(found, layer(rows), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(layer: nn.Module, num_rows: int, precision: str, dtype: torch.dtype) -> None:
    layer.to(dtype)
    rows = torch.randn(num_rows, 40, dtype=dtype)
    expected = layer(rows)
    with fast_modules(layer, precision):
        found = layer(rows)
        assert torch.equal(layer(rows), found)
    assert found.dtype == dtype
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    own = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
    assert error < max(
        own, {"float32": 0.0, "bfloat16": 0.01, "int8": 0.03, "int4": 0.2}[precision]
    )
    # It really computes in it.
    if dtype == torch.float32 and precision != "float32":
        assert error > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_weights_changed_in_place_count_where_they_were_copied(
    layer: nn.Sequential, precision: str
) -> None:
    rows = torch.randn(40, 40)
    with fast_modules(layer, precision):
        before = layer[0](rows)
        layer[0].weight.mul_(2)
        layer[0].bias.mul_(2)
        after = layer[0](rows)
    assert torch.allclose(after, 2 * before, rtol=1e-2)


@torch.no_grad()
def test_weights_that_eight_bits_cannot_hold_are_left_to_torch(layer: nn.Sequential) -> None:
    layer[0].weight[0, 0] = float("inf")
    rows = torch.ones(1, 40)
    with fast_modules(layer, "int8"):
        assert torch.equal(layer[0](rows), layer[0](rows))
        assert layer[0](rows)[0, 0] == float("inf")


@torch.no_grad()
def test_a_part_of_a_model_stays_as_it_is() -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    with fast_modules(model, "float32", besides=model[1]):
        assert ["forward" in vars(layer) for layer in model] == [True, False]
        with fast_modules(model[1], "float32"):
            assert all("forward" in vars(layer) for layer in model)
    with fast_modules(model, "float32", besides=model[0]):
        assert ["forward" in vars(layer) for layer in model] == [False, True]
    assert not any("forward" in vars(layer) for layer in model)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "int8", "int4"])
def test_copies_of_weights_are_shared(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer alone, in a model, and with rows of other prompts uses one copy."""
    made = []
    for name in ("PackedWeight", "Int8Linear", "GroupedLinear"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *given, original=original: made.append(1) or original(*given),
        )
    model = nn.ModuleList([nn.Linear(64, 64).bfloat16()])
    rows = torch.randn(module._MOST_BY_SQUARES + 1, 64).bfloat16()
    with fast_modules(model, precision):
        model[0](rows)
    with fast_modules(model[0], precision):
        model[0](rows)
    with fast_modules(model, precision, each_row=True):
        model[0](rows[:8])
    copies = precision in ("int8", "int4") or can_pack(getattr(torch, precision))
    assert len(made) == (1 if copies else 0)


@torch.no_grad()
def test_layers_of_other_classes_are_left_alone(calls: list[int]) -> None:
    class Doubled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    doubled = Doubled(4, 4)
    rows = torch.ones(1, 4)
    expected = doubled(rows)
    with fast_modules(nn.ModuleList([doubled]), "float32"):
        assert torch.equal(doubled(rows), expected)
    assert not calls
