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
from transformers import PreTrainedModel

Gate = Callable[[], torch.Tensor | None]
"""Returns which of the rows at hand the adapter acts on, bool ``[n]``; None: on all."""


@dataclass(frozen=True)
class RowAdapter:
    """Low-rank weights by the name of the linear layer that they are added to.

    Attributes
    ----------
    down, up
        ``[R, inputs]`` and ``[outputs, R]`` of each layer, names as in ``hf.named_modules()``.
    scale
        What the product is multiplied by.
    """

    down: Mapping[str, torch.Tensor]
    up: Mapping[str, torch.Tensor]
    scale: float

    @property
    def rank(self) -> int:
        """R."""
        return next(iter(self.down.values())).shape[0]

    @contextmanager
    def acting(self, hf: PreTrainedModel, gate: Gate = lambda: None) -> Iterator[None]:
        """Add to the layers' outputs in forwards of the calling thread. Hold the model's lock."""
        caller = threading.get_ident()
        with ExitStack() as hooks:
            for name in self.down:
                hook = self._hook(name, gate, caller)
                handle = hf.get_submodule(name).register_forward_hook(hook)
                hooks.callback(handle.remove)
            yield

    def _hook(self, name: str, gate: Gate, caller: int) -> Callable[..., torch.Tensor | None]:
        down, up = self.down[name], self.up[name]

        def add(_: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
            if threading.get_ident() != caller:
                return None
            chosen = gate()
            if chosen is not None and not bool(chosen.any()):
                return None
            hidden: torch.Tensor = inputs[0]
            added = (hidden.to(down.dtype) @ down.T @ up.T * self.scale).to(output.dtype)
            if chosen is None:
                return output + added
            return torch.where(chosen[:, None], output + added, output)

        return add


def linear_layers(hf: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear maps inside the decoder layers, by their names in `hf`."""
    layers: Any = hf.base_model.layers
    inside = {id(module) for layer in layers for module in layer.modules()}
    return {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
