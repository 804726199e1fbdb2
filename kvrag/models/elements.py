"""A model's norms and MLPs on the CPU, each number by number in one pass.

What a module computes is found by trial, not by its class: a small copy of it, with other weights,
has to agree with a kernel in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import is_grad_enabled, nn

from kvrag.native import ATTENTION_TYPES, gated, rms_norm

_Forward = Callable[..., torch.Tensor]

# Sizes of the copies that are tried, and how far from 0 activations are.
_WIDTH, _INNER, _NUM_ROWS, _FARTHEST = 24, 40, 5, 6.0
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def element_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, _Forward]]:
    """Yield a model's norms and MLPs that kernels compute, each with what computes it.

    What is yielded calls an MLP's linear layers as modules, hooks included. Where gradients are on,
    or inputs are of another type or device than a kernel takes, the module's own code computes.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            continue
        forward = _norm(module) or _mlp(module)
        if forward is not None:
            yield module, forward


def _norm(module: nn.Module) -> _Forward | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = module._parameters
    if set(parameters) != {"weight"} or module._modules or module._buffers:
        return None
    if parameters["weight"] is None or not isinstance(epsilon, float):
        return None
    tried = _copy(module, parameters={"weight": nn.Parameter(_numbers(1, _WIDTH)[0])})
    rows = _numbers(_NUM_ROWS, _WIDTH)
    expected = _result(partial(type(module).forward, tried), rows)
    for adds_one in (False, True):
        compute = partial(rms_norm, epsilon=epsilon, adds_one=adds_one)
        if _agrees(compute(rows, tried.weight), expected):
            return _norm_forward(module, compute)
    return None


def _norm_forward(module: nn.Module, compute: Callable[..., torch.Tensor]) -> _Forward:
    own, plain = ref(module), type(module).forward
    parameters = module._parameters

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        weight = parameters["weight"]
        if len(given) == 1 and not named and weight is not None:
            (rows,) = given
            if rows.dtype == weight.dtype and _is_ours(rows) and _is_ours(weight):
                return compute(rows, weight)
        made: torch.Tensor = plain(own(), *given, **named)
        return made

    return forward


def _mlp(module: nn.Module) -> _Forward | None:
    modules = module._modules
    if set(modules) - {"act_fn"} != set(_PROJECTIONS) or module._parameters or module._buffers:
        return None
    activation: Any = getattr(module, "act_fn", None)
    widths = ((_WIDTH, _INNER), (_WIDTH, _INNER), (_INNER, _WIDTH))
    layers = {name: _linear(*size) for name, size in zip(_PROJECTIONS, widths, strict=True)}
    tried = _copy(module, modules={**modules, **layers})
    rows = _numbers(_NUM_ROWS, _WIDTH)
    numbers = torch.linspace(-_FARTHEST, _FARTHEST, 1000)
    activated = _result(activation, numbers)
    expected = _result(partial(type(module).forward, tried), rows)
    for is_gelu in (False, True):
        compute = partial(gated, is_gelu=is_gelu)
        if not _agrees(compute(numbers, torch.ones_like(numbers)), activated):
            continue
        made = layers["down_proj"](compute(layers["gate_proj"](rows), layers["up_proj"](rows)))
        return _mlp_forward(module, activation, compute) if _agrees(made, expected) else None
    return None


def _mlp_forward(
    module: nn.Module, activation: Any, compute: Callable[..., torch.Tensor]
) -> _Forward:
    reference, plain = ref(module), type(module).forward

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        own: Any = reference()
        made: torch.Tensor
        if len(given) != 1 or named or not _is_ours(given[0]) or own.act_fn is not activation:
            made = plain(own, *given, **named)
            return made
        (rows,) = given
        opening, passing = own.gate_proj(rows), own.up_proj(rows)
        # Layers that are not plain ones may give another type.
        if opening.dtype == passing.dtype and _is_ours(opening):
            made = own.down_proj(compute(opening, passing))
        else:
            made = own.down_proj(own.act_fn(opening) * passing)
        return made

    return forward


def _is_ours(numbers: torch.Tensor) -> bool:
    return (
        numbers.dtype in ATTENTION_TYPES and numbers.device.type == "cpu" and not is_grad_enabled()
    )


def _copy(
    module: nn.Module,
    parameters: dict[str, nn.Parameter] | None = None,
    modules: dict[str, nn.Module | None] | None = None,
) -> Any:
    """Return a module of the same class and settings, with other weights and without hooks."""
    made: Any = nn.Module.__new__(type(module))
    nn.Module.__init__(made)
    standard = set(vars(made))
    for name, value in vars(module).items():
        if name not in standard and name != "forward":
            object.__setattr__(made, name, value)
    made._parameters.update(parameters or {})
    made._modules.update(modules or {})
    made.training = module.training
    return made


@torch.no_grad()
def _result(function: Callable[[torch.Tensor], Any], numbers: torch.Tensor) -> Any:
    """Return what another class's code gives; None if it expects something else."""
    try:
        return function(numbers)
    except Exception:  # whatever the code is
        return None


def _agrees(found: torch.Tensor, expected: Any) -> bool:
    """Return whether two results are the same, except for the last bits of float32."""
    return (
        isinstance(expected, torch.Tensor)
        and expected.dtype == found.dtype
        and expected.shape == found.shape
        and torch.allclose(found, expected, rtol=1e-5, atol=2e-6)
    )


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(_numbers(num_outputs, num_inputs), requires_grad=False)
    return layer


def _numbers(num_rows: int, width: int) -> torch.Tensor:
    """Return ``[num_rows, width]`` numbers whose mean is not 0, the same each time."""
    numbers = torch.arange(num_rows * width, dtype=torch.float32)
    return (numbers.sin() + 0.4).view(num_rows, width)
