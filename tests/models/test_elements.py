"""Which norms and MLPs of a model kernels compute, and that they compute the same."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from importlib import import_module

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvrag.models.elements import element_forwards
from kvrag.models.linears import fast_modules

pytestmark = pytest.mark.usefixtures("isa")

SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}
NORMS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3")


def made(name: str) -> nn.Module:
    """Return a norm or MLP of Transformers by the name of its class."""
    family = name.removesuffix("RMSNorm").removesuffix("MLP")
    home = import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    if name.endswith("Norm"):
        return getattr(home, name)(48)
    config = getattr(
        import_module("transformers"), f"{family}{'Text' * (family == 'Gemma3')}Config"
    )
    return getattr(home, name)(config(**SIZES))


MODULES = [
    *(f"{name}RMSNorm" for name in NORMS),
    *(f"{name}MLP" for name in NORMS if name != "Phi3"),
]


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_the_supported_families_agree(name: str, dtype: torch.dtype) -> None:
    module = filled(made(name), dtype)
    rows = torch.randn(1, 300, 48).to(dtype)
    expected = module(rows)
    ((found, forward),) = [one for one in element_forwards(module) if one[0] is module]
    assert found is module
    computed = forward(rows)
    allowed = 2 * torch.finfo(dtype).eps * expected.abs().max()
    assert (computed - expected).abs().max() <= allowed
    if dtype == torch.bfloat16:
        # They round where the modules round. GELU's last bits differ most.
        assert (computed == expected).float().mean() > (0.9 if "Gemma" in name else 0.999)
    # Weights that were changed in place count.
    for parameter in module.parameters():
        parameter.mul_(2)
    assert (forward(rows) - module(rows)).abs().max() <= 16 * allowed


@torch.no_grad()
def test_what_the_kernel_does_not_take_is_left_to_the_module() -> None:
    norm = filled(LlamaRMSNorm(48), torch.float32)
    ((_, forward),) = element_forwards(norm)
    rows = torch.randn(2, 48)
    expected = norm(rows)
    with fast_modules(norm, "float32"):
        assert torch.equal(norm(hidden_states=rows), expected)
    for dtype in (torch.float16, torch.float64):
        norm.to(dtype)
        assert torch.equal(forward(rows.to(dtype)), norm(rows.to(dtype)))
    mlp = filled(LlamaMLP(LlamaConfig(**SIZES)), torch.float32)
    ((_, forward),) = element_forwards(mlp)
    hook = mlp.act_fn.register_forward_hook(lambda _, __, output: 0 * output)
    assert not forward(rows).any()
    hook.remove()
    mlp.act_fn = nn.ReLU()
    assert torch.equal(forward(rows), mlp(rows))


class Doubled(LlamaMLP):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(768, bias=False).bfloat16(),
        CohereLayerNorm(48),
        Olmo2RMSNorm(48),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="relu")),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu")),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu_new")),
        Doubled(LlamaConfig(**SIZES)),
    ],
    ids=["layer norm", "cohere", "rounded once", "relu", "erf", "other tanh", "subclass"],
)
def test_what_computes_otherwise_stays_as_it_is(module: nn.Module) -> None:
    assert not list(element_forwards(nn.ModuleList([module])))


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
def test_a_forward_that_somebody_replaced_stays() -> None:
    model = nn.ModuleList([LlamaMLP(LlamaConfig(**SIZES)), nn.Linear(48, 48)])
    for module in model:
        module.forward = lambda rows: 0 * rows
    with fast_modules(model, "float32"), fast_modules(model, "float32"):
        assert not any(module(torch.ones(1, 30, 48)).any() for module in model)
    assert all("forward" in vars(module) for module in model)
