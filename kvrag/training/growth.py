"""Grow a trained model by layers without changing what it computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")


def grow(weights: Mapping[str, torch.Tensor], twins: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the weights of a deeper model that computes what `weights` compute.

    Behind the last layer stands a copy of each of the layers `twins`, in that order, with
    outputs of zero: it looks where its twin looks and adds nothing yet.

    Raises
    ------
    ValueError
        When `weights` lack one of the layers.
    """
    matches = {name: _LAYER.fullmatch(name) for name in weights}
    present = 1 + max((int(match[1]) for match in matches.values() if match), default=-1)
    if missing := [layer for layer in twins if not 0 <= layer < present]:
        raise ValueError(f"weights of {present} layers have no layer {missing[0]}")
    grown = dict(weights)
    for place, twin in enumerate(twins, present):
        for name, match in matches.items():
            if match and int(match[1]) == twin:
                is_output = match[2].startswith(_OUTPUTS)
                tensor = weights[name]
                copy = torch.zeros_like(tensor) if is_output else tensor.clone()
                grown[f"model.layers.{place}.{match[2]}"] = copy
    return grown
