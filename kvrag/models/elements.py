"""A model's norms and MLPs on the CPU, each number by number in one pass.

What a module computes is found by trial, not by its class: whatever agrees with the module's own
code may compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import is_grad_enabled, nn

from kvrag.native import ATTENTION_TYPES, gated, rms_norm

_Forward = Callable[[torch.Tensor], torch.Tensor]

# What is tried: rows of a module, and numbers of an activation up to this far from 0.
_NUM_TRIED = 4
_NUM_NUMBERS = 1000
_FARTHEST = 8.0
# How far results may be apart, in roundings of the greatest one.
_ROUNDINGS = 4

# What `_activation` found, by the classes of an MLP and of its activation: a trial of a large
# model's MLP takes a tenth of a second.
_activations: dict[tuple[type, type], bool | None] = {}


def element_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, _Forward]]:
    """Yield a model's norms and MLPs that kernels compute, each with what computes it.

    What is yielded calls an MLP's linear layers as modules, hooks included. Where gradients are on,
    or inputs are of another type or device than the weights, the module's own code computes.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            continue
        if (norm := _norm(module)) is not None:
            yield module, norm
        elif (mlp := _mlp(module)) is not None:
            yield module, mlp


def _norm(module: nn.Module) -> _Forward | None:
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not _is_ours(weight) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    tried = _sample(weight.shape[0], weight.dtype)
    try:
        with torch.no_grad():
            expected = type(module).forward(module, tried)
    except Exception:  # another class's code, called as it may not expect
        return None
    for adds_one in (False, True):
        compute = partial(rms_norm, epsilon=epsilon, adds_one=adds_one)
        if _agrees(compute(tried, weight.detach()), expected):
            return _norm_forward(module, compute)
    return None


def _norm_forward(module: nn.Module, compute: Callable[..., torch.Tensor]) -> _Forward:
    parameters = module._parameters
    plain = type(module).forward

    def forward(rows: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        assert weight is not None
        made: torch.Tensor
        if rows.dtype == weight.dtype and rows.device.type == "cpu" and not is_grad_enabled():
            made = compute(rows, weight)
        else:
            made = plain(module, rows)
        return made

    return forward


def _mlp(module: nn.Module) -> _Forward | None:
    if set(module._modules) - {"act_fn"} != {"gate_proj", "up_proj", "down_proj"}:
        return None
    own: Any = module
    weight = getattr(own.gate_proj, "weight", None)
    if not _is_ours(weight):
        return None
    kind = type(module), type(getattr(module, "act_fn", None))
    if kind not in _activations:
        _activations[kind] = _activation(module, _sample(weight.shape[1], weight.dtype))
    is_gelu = _activations[kind]
    if is_gelu is None:
        return None
    plain = type(module).forward

    def forward(rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor
        if rows.device.type == "cpu" and rows.dtype in ATTENTION_TYPES and not is_grad_enabled():
            opening, passing = own.gate_proj(rows), own.up_proj(rows)
            # Layers that are not plain ones may give another type.
            is_ours = opening.dtype == passing.dtype == rows.dtype
            made = own.down_proj(
                gated(opening, passing, is_gelu=is_gelu)
                if is_ours
                else own.act_fn(opening) * passing
            )
        else:
            made = plain(module, rows)
        return made

    return forward


@torch.no_grad()
def _activation(module: Any, tried: torch.Tensor) -> bool | None:
    """Return whether an MLP's activation is GELU, by tanh, or SiLU; None if it is another MLP."""
    numbers = torch.linspace(-_FARTHEST, _FARTHEST, _NUM_NUMBERS)
    try:
        activated = module.act_fn(numbers)
        expected = type(module).forward(module, tried)
        opening, passing = module.gate_proj(tried), module.up_proj(tried)
        for is_gelu in (False, True):
            if _agrees(gated(numbers, torch.ones_like(numbers), is_gelu=is_gelu), activated):
                made = module.down_proj(gated(opening, passing, is_gelu=is_gelu))
                return is_gelu if _agrees(made, expected) else None
    except Exception:  # another class's code, called as it may not expect
        return None
    return None


def _is_ours(weight: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype in ATTENTION_TYPES
        and weight.device.type == "cpu"
    )


def _sample(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows ``[n, width]`` of various sizes, the same each time."""
    numbers = torch.arange(_NUM_TRIED * width, dtype=torch.float32).sin() * 3
    return numbers.view(_NUM_TRIED, width).to(dtype)


def _agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two results differ by rounding only."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    allowed = _ROUNDINGS * torch.finfo(found.dtype).eps * expected.abs().max()
    return bool((found - expected).abs().max() <= allowed)
