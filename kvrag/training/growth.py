"""Grow a trained model by layers without changing what it computes."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")


def grow(weights: Mapping[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of a model of `num_layers` that computes what `weights` compute.

    New layers stand before the last one. Each begins as a copy of the layer before it, with
    outputs of zero: it looks where its twin looks and adds nothing yet.

    Raises
    ------
    ValueError
        When `weights` have more layers than `num_layers`, or one that would have to grow.
    """
    matches = {name: _LAYER.fullmatch(name) for name in weights}
    present = 1 + max((int(match[1]) for match in matches.values() if match), default=-1)
    if present == num_layers:
        return dict(weights)
    if not 2 <= present <= num_layers:
        raise ValueError(f"weights of {present} layers do not grow to {num_layers}")
    grown = {}
    for name, tensor in weights.items():
        match = matches[name]
        if match is None:
            grown[name] = tensor
            continue
        layer, rest = int(match[1]), match[2]
        place = layer if layer < present - 1 else num_layers - 1
        grown[f"model.layers.{place}.{rest}"] = tensor
        if layer == present - 2:
            for new in range(present - 1, num_layers - 1):
                is_output = rest.startswith(_OUTPUTS)
                copy = torch.zeros_like(tensor) if is_output else tensor.clone()
                grown[f"model.layers.{new}.{rest}"] = copy
    return grown
