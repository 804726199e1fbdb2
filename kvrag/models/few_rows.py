"""A model's linear layers over few rows, as in decoding, by kvrag's compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import linear

from kvrag.errors import ParameterError
from kvrag.native import MAX_ROWS, FewRowsLinear

Forward = Callable[[torch.Tensor], torch.Tensor]

_forwards: WeakKeyDictionary[nn.Module, list[tuple[nn.Linear, Forward]]] = WeakKeyDictionary()


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """Let linear layers on the CPU use the kernel inside the block, where few rows enter them.

    Layers of other classes, such as quantised ones, stay as they are. Hold the model's lock, and
    compute without gradients.
    """
    forwards = _forwards.get(model)
    if forwards is None:
        layers = [module for module in model.modules() if type(module) is nn.Linear]
        forwards = _forwards[model] = [(layer, _forward_of(layer)) for layer in layers]
    try:
        for layer, forward in forwards:
            # Past `nn.Module.__setattr__`, which takes longer than the layers of a token.
            layer.__dict__["forward"] = forward
        yield
    finally:
        for layer, _ in forwards:
            layer.__dict__.pop("forward", None)


def _forward_of(layer: nn.Linear) -> Forward:
    kernel: FewRowsLinear | None = None
    # What the kernel reads. It is kept alive, so no other tensor has these addresses.
    known: tuple[torch.Tensor, torch.Tensor | None] | None = None
    parameters = layer._parameters
    most = MAX_ROWS * layer.in_features

    def forward(rows: torch.Tensor) -> torch.Tensor:
        nonlocal kernel, known
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        if rows.numel() > most or rows.dtype != weight.dtype or torch.is_grad_enabled():
            return linear(rows, weight, bias)
        if known is None or not (_is_same(weight, known[0]) and _is_same(bias, known[1])):
            known = weight.detach(), None if bias is None else bias.detach()
            try:
                kernel = FewRowsLinear(*known)
            except ParameterError:
                kernel = None  # on another device, or of another type
        return linear(rows, weight, bias) if kernel is None else kernel(rows)

    return forward


def _is_same(parameter: torch.Tensor | None, known: torch.Tensor | None) -> bool:
    if parameter is None or known is None:
        return parameter is known
    return parameter.data_ptr() == known.data_ptr()
