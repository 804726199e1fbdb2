"""A low-rank addition to a model's linear layers that acts on chosen rows only.

Source: Hu et al., LoRA (arXiv 2106.09685) §4.1. Deviation: nothing is merged, and rows that are
not chosen get the base model's output bit for bit, so that KV stored before the adapter existed
stays valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvrag.models.decoders import Model
from kvrag.models.families import base_of, find_family

Gate = Callable[[], torch.Tensor | None]
"""Returns which of the current rows the adapter acts on, bool ``[n]``; None: on all."""


class _Innermost(threading.local):
    """The adapter that acts in this thread's forwards, for each model (by identity)."""

    def __init__(self) -> None:
        self.by_model: dict[int, object] = {}


_innermost = _Innermost()


@contextmanager
def without_adapters(hf: Model, instead: object = None) -> Iterator[None]:
    """Suspend surrounding adapters in the calling thread's forwards of a model.

    A forward then gives what it gives without an adapter, so indexing and fusing stay right
    wherever a user calls them.

    Parameters
    ----------
    hf
        The model.
    instead
        Name of what acts now; None: nothing.
    """
    outer = _innermost.by_model.get(id(hf))
    _innermost.by_model[id(hf)] = instead
    try:
        yield
    finally:
        if outer is None:
            # Another model may get this identity later.
            _innermost.by_model.pop(id(hf), None)
        else:
            _innermost.by_model[id(hf)] = outer


@dataclass(frozen=True)
class RowAdapter:
    """Low-rank weights, by the name of the linear layer that they are added to.

    Attributes
    ----------
    down, up
        ``[R, inputs]`` and ``[outputs, R]`` for each layer, named as in ``hf.named_modules()``.
    scale
        Factor of the product.
    """

    down: Mapping[str, torch.Tensor]
    up: Mapping[str, torch.Tensor]
    scale: float

    @property
    def rank(self) -> int:
        """The rank R."""
        return next(iter(self.down.values())).shape[0]

    @contextmanager
    def acting(self, hf: Model, gate: Gate = lambda: None) -> Iterator[None]:
        """Add to the layers' outputs in the calling thread's forwards. Hold the model's lock.

        Inside another adapter's `acting`, this adapter replaces that one.
        """
        name_of_this = object()

        def acts() -> bool:
            return _innermost.by_model.get(id(hf)) is name_of_this

        with ExitStack() as hooks:
            hooks.enter_context(without_adapters(hf, name_of_this))
            for name in self.down:
                hook = self._hook(name, gate, acts)
                handle = hf.get_submodule(name).register_forward_hook(hook)
                hooks.callback(handle.remove)
            yield

    def _hook(
        self, name: str, gate: Gate, acts: Callable[[], bool]
    ) -> Callable[..., torch.Tensor | None]:
        down, up = self.down[name], self.up[name]

        def add(_: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
            if not acts():
                return None
            chosen = gate()
            if chosen is not None and not bool(chosen.any()):
                return None
            hidden: torch.Tensor = inputs[0]
            inner = hidden.to(down.dtype) @ down.T
            if chosen is None and output.dtype == down.dtype:  # one pass over the output, not four
                rows, base = inner.flatten(0, -2), output.flatten(0, -2)
                return torch.addmm(base, rows, up.T, alpha=self.scale).view_as(output)
            added = (inner @ up.T * self.scale).to(output.dtype)
            if chosen is None:
                return output + added
            return torch.where(chosen[:, None], output + added, output)

        return add


def linear_layers(hf: Model) -> dict[str, nn.Linear]:
    """Return the linear layers inside the decoder layers, by their names in `hf`."""
    layers: Any = getattr(base_of(hf), find_family(hf).layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    return {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
