"""A model's positions: its own rotary module, its own ALiBi bias, or learned ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrag.kvcache import KVSpec
from kvrag.models.families import Family, has_alibi
from kvrag.positions.rotary import RotaryPositions, RotaryTable
from kvrag.positions.unrotated import UnrotatedPositions


class Positions(Protocol):
    """Returns a model's tables for any positions."""

    def tables(self, positions: torch.Tensor) -> list[RotaryTable]:
        """Return one table per layer for `positions` ``[N]``."""
        ...


def find_positions(hf: PreTrainedModel, family: Family, spec: KVSpec) -> Positions:
    """Return the positions of a model. Raises UnsupportedModelError as `RotaryPositions` does."""
    if has_alibi(hf.config):
        return UnrotatedPositions(spec.num_layers, spec.head_dim, _alibi(hf))
    if family.position_embedding is not None:
        return UnrotatedPositions(spec.num_layers, spec.head_dim)
    base: Any = hf.base_model
    layer_types: Sequence[str | None] = [None] * spec.num_layers
    if family.rotary_per_layer_type:
        layer_types = hf.config.layer_types
    return RotaryPositions(cast(nn.Module, base.rotary_emb), layer_types)


def _alibi(hf: PreTrainedModel) -> Callable[[int], torch.Tensor]:
    """Return the model's own bias function, number of positions to ``[heads, positions]``."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as of_bloom
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor as of_falcon
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as of_mpt

    num_heads: int = hf.config.num_attention_heads

    def bias(num_positions: int) -> torch.Tensor:
        if hf.config.model_type == "mpt":
            # Called as the model does; it omits the configuration's own alibi_bias_max.
            return cast(torch.Tensor, of_mpt(num_heads, num_positions))[:, 0]  # type: ignore[no-untyped-call]
        build = of_bloom if hf.config.model_type == "bloom" else of_falcon
        ones = torch.ones(1, num_positions, dtype=torch.long)
        return build(ones, num_heads, hf.dtype)[:, 0]

    return bias
