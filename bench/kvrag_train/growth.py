"""Grow a trained model by layers without changing what it computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")


def grow(
    weights: Mapping[str, torch.Tensor], twins: Sequence[int], place: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of a deeper model that computes what `weights` compute.

    Copies of the layers `twins` are inserted in that order, after the first `place` layers or after
    all. Their outputs are zero: a copy looks where its twin looks and adds nothing yet.

    Raises
    ------
    ValueError
        When `weights` lack one of the layers.
    """
    matches = {name: _LAYER.fullmatch(name) for name in weights}
    present = 1 + max((int(match[1]) for match in matches.values() if match), default=-1)
    if missing := [layer for layer in twins if not 0 <= layer < present]:
        raise ValueError(f"weights of {present} layers have no layer {missing[0]}")
    place = present if place is None else place
    grown = {}
    for name, tensor in weights.items():
        match = matches[name]
        if match is None:
            grown[name] = tensor
            continue
        layer, rest = int(match[1]), match[2]
        moved = layer if layer < place else layer + len(twins)
        grown[f"model.layers.{moved}.{rest}"] = tensor
        for new, twin in enumerate(twins, place):
            if twin == layer:
                is_output = rest.startswith(_OUTPUTS)
                copy = torch.zeros_like(tensor) if is_output else tensor.clone()
                grown[f"model.layers.{new}.{rest}"] = copy
    return grown
