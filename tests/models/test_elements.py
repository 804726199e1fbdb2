"""Which norms and MLPs of a model kernels compute, and that they compute the same."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from kvrag.models.elements import element_forwards
from kvrag.models.fast_modules import fast_modules

SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}
MODULES = [
    lambda: LlamaRMSNorm(48),
    lambda: Qwen2RMSNorm(48),
    lambda: Gemma3RMSNorm(48),
    lambda: LlamaMLP(LlamaConfig(**SIZES)),
    lambda: Qwen2MLP(Qwen2Config(**SIZES)),
    lambda: Gemma3MLP(Gemma3TextConfig(**SIZES)),
]


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MODULES)
def test_transformers_modules_are_found_and_agree(make, dtype: torch.dtype) -> None:
    module = filled(make(), dtype)
    rows = torch.randn(1, 30, 48).to(dtype)
    expected = module(rows)
    ((found, forward),) = [
        one for one in element_forwards(nn.ModuleList([module])) if one[0] is module
    ]
    assert found is module
    made = forward(rows)
    allowed = 2 * torch.finfo(dtype).eps * expected.abs().max()
    assert (made - expected).abs().max() <= allowed
    # Weights that were changed in place count.
    for parameter in module.parameters():
        parameter.mul_(2)
    assert (forward(rows) - module(rows)).abs().max() <= 16 * allowed
    # Other types are left to the module.
    if isinstance(module, LlamaRMSNorm | Qwen2RMSNorm):
        assert torch.equal(forward(rows.double()), module(rows.double()))


@torch.no_grad()
def test_a_great_weight_hides_no_formula() -> None:
    norm = filled(Gemma3RMSNorm(48), torch.bfloat16)
    norm.weight[3] = 40
    rows = torch.randn(1, 30, 48).bfloat16()
    ((_, forward),) = element_forwards(norm)
    assert torch.allclose(forward(rows), norm(rows), rtol=2**-7)


@torch.no_grad()
def test_what_the_kernel_does_not_take_is_left_to_the_module() -> None:
    norm = filled(LlamaRMSNorm(48), torch.float32)
    ((_, forward),) = element_forwards(norm)
    rows = torch.randn(2, 48)
    with fast_modules(nn.ModuleList([norm]), "float32"):
        assert torch.equal(norm(hidden_states=rows), norm(rows))
    for dtype in (torch.float16, torch.float64):
        norm.to(dtype)
        assert torch.equal(forward(rows.to(dtype)), norm(rows.to(dtype)))
    mlp = filled(LlamaMLP(LlamaConfig(**SIZES)), torch.float32)
    ((_, forward),) = element_forwards(mlp)
    mlp.act_fn = nn.ReLU()
    assert torch.equal(forward(rows), mlp(rows))


class Scaled(LlamaMLP):
    """Instances of one class that compute differently."""

    def __init__(self, factor: float) -> None:
        super().__init__(LlamaConfig(**SIZES))
        self.factor = factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(rows)


class OfFunctions(nn.Module):
    """An MLP whose activation is a function."""

    def __init__(self, act_fn) -> None:
        super().__init__()
        for name, sizes in (("gate", (48, 80)), ("up", (48, 80)), ("down", (80, 48))):
            setattr(self, f"{name}_proj", nn.Linear(*sizes, bias=False))
        self.act_fn = act_fn

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))


def test_each_instance_is_tried() -> None:
    model = nn.ModuleList(
        [
            Scaled(1.0),
            Scaled(3.0),
            OfFunctions(functional.silu),
            OfFunctions(functional.relu),
            OfFunctions(nn.GELU(approximate="tanh")),
            OfFunctions(nn.GELU()),
        ]
    )
    found = [module for module, _ in element_forwards(model)]
    assert found == [model[0], model[2], model[4]]


class Squared(nn.Module):
    """A norm's attributes, and another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))
        self.eps = 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * rows * self.weight


class Raising(Squared):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("called with rows alone")


class Doubled(LlamaMLP):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


@pytest.mark.parametrize(
    "module",
    [
        Squared(),
        Raising(),
        nn.LayerNorm(48),
        nn.LayerNorm(768, bias=False).bfloat16(),
        nn.LayerNorm(768).bfloat16(),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="relu")),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu")),
        Doubled(LlamaConfig(**SIZES)),
    ],
    ids=["squared", "raising", "layer norm", "no bias", "bias of 0", "relu", "erf", "doubled"],
)
def test_what_is_something_else_stays_as_it_is(module: nn.Module) -> None:
    assert module not in [found for found, _ in element_forwards(nn.ModuleList([module]))]


def test_gradients_flow_through_the_modules_own_code() -> None:
    module = filled(LlamaMLP(LlamaConfig(**SIZES)), torch.float32)
    rows = torch.randn(1, 3, 48, requires_grad=True)
    with fast_modules(nn.ModuleList([module]), "float32"):
        module(rows).sum().backward()
    assert rows.grad is not None


@torch.no_grad()
def test_hooks_of_an_mlps_layers_act() -> None:
    module = filled(LlamaMLP(LlamaConfig(**SIZES)), torch.float32)
    rows = torch.randn(1, 30, 48)
    module.up_proj.register_forward_hook(lambda _, __, output: 3 * output)
    expected = module(rows)
    with fast_modules(nn.ModuleList([module]), "float32"):
        assert torch.allclose(module(rows), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_afterwards_nothing_is_left() -> None:
    """A model can be copied and pickled after its modules were fast, and is freed."""
    model = nn.ModuleList([filled(LlamaMLP(LlamaConfig(**SIZES)), torch.float32)])
    with fast_modules(model, "float32"):
        model[0](torch.randn(1, 30, 48))
    assert not any("forward" in vars(one) for one in model.modules())
    rows = torch.randn(1, 2, 48)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other[0](rows), model[0](rows))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@torch.no_grad()
@pytest.mark.parametrize("make", MODULES)
def test_a_module_alone_is_freed_too(make) -> None:
    module = filled(make(), torch.float32)
    with fast_modules(module, "float32"):
        module(torch.randn(1, 30, 48))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_a_forward_that_somebody_replaced_stays() -> None:
    model = nn.ModuleList([LlamaMLP(LlamaConfig(**SIZES)), nn.Linear(48, 48)])
    for module in model:
        module.forward = lambda rows: 0 * rows
    with fast_modules(model, "float32"), fast_modules(model, "float32"):
        assert not any(module(torch.ones(1, 30, 48)).any() for module in model)
    assert all("forward" in vars(module) for module in model)
